"""The context of one graph: its inputs, its outputs, the order of its nodes, and the room that is left for more.

Knows no operation; the classes of the files beside this one add them.
"""

from __future__ import annotations

from typing import Any

from ggml_engine.errors import GraphError
from ggml_engine.ggml.library import Libraries, ffi
from ggml_engine.ggml.ops.tensors import Tensor, TensorContext, require_tensor_count
from ggml_engine.ggml.tensor_types import TensorType


class GraphContext(TensorContext):
    """What every operation needs of the graph that it adds a node to."""

    def __init__(self, libraries: Libraries, max_tensors: int, n_outside: int = 0) -> None:
        """Makes room for `n_outside` tensors of other contexts: weights, pool, and what these are views of."""
        require_tensor_count(max_tensors, 1)
        require_tensor_count(n_outside, 0)
        self.has_graph = False
        self.kept: list[Any] = []  # memory that operations of the graph point to
        self.outside: list[Any] = []  # pointers; their data must be there before the graph runs
        self._reached: set[Any] = set()  # pointers of all tensors, made here or outside; cffi's hash by address
        self.graph_size = max_tensors + n_outside
        overhead = libraries.base.ggml_graph_overhead_custom(self.graph_size, False)
        super().__init__(libraries, max_tensors, overhead)
        self.cgraph = self.base.ggml_new_graph_custom(self.ctx, self.graph_size, False)

    # ---- what is in reach

    def _note(self, ptr: Any) -> None:
        self._reached.add(ptr)

    def _room(self, operation: str, *inputs: Tensor | None) -> Any:
        for tensor in inputs:
            if tensor is not None and tensor.ptr not in self._reached:
                self._reach(operation, tensor.ptr)
        self._require_graph_room(operation)
        return super()._room(operation, *inputs)

    def _require_graph_room(self, operation: str) -> None:
        if len(self._reached) >= self.graph_size:
            raise GraphError(f"{operation}: the graph is full ({self.graph_size} tensors, those outside included)")

    def _reach(self, operation: str, ptr: Any) -> None:
        # ggml counts what hangs below an outside tensor too, and aborts where its graph is full
        waiting = [ptr] if self.ctx else []
        while waiting:
            found = waiting.pop()
            if found == ffi.NULL or found in self._reached:
                continue
            self._require_graph_room(operation)
            self._reached.add(found)
            self.outside.append(found)
            if found.op:  # a leaf, which weights are, is made of nothing
                waiting += list(found.src)

    def seal(self) -> None:
        """The graph gets its working memory: nothing more can be added, and the bookkeeping of its making goes."""
        self.has_graph = True
        self.outside.clear()
        self._reached.clear()

    # ---- inputs, outputs, order

    def input(self, name: str, tensor_type: TensorType, *ne: int, is_kept: bool = False) -> Tensor:
        """A tensor that is filled before every run; if `is_kept`, once: else later results may lie in its memory."""
        tensor = self.new_tensor(name, tensor_type, *ne)
        self.base.ggml_set_input(tensor.ptr)
        if is_kept:
            self.base.ggml_set_output(tensor.ptr)  # which the allocator never gives away
        return tensor

    def output(self, tensor: Tensor, name: str) -> Tensor:
        """Mark a result that is read after the run."""
        self._reach("output", tensor.ptr)
        self.base.ggml_set_name(tensor.ptr, name.encode("utf-8")[:63])
        self.base.ggml_set_output(tensor.ptr)
        self.expand(tensor)
        return tensor

    def expand(self, tensor: Tensor) -> None:
        """Let everything up to `tensor` run before what is expanded later."""
        if self.has_graph:
            raise GraphError("expand: the graph has its working memory already")
        self._reach("expand", tensor.ptr)
        self.base.ggml_build_forward_expand(self.cgraph, tensor.ptr)
