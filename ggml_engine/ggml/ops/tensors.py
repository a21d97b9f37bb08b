"""Tensors of ggml and the context that holds their descriptions.

Shapes are in ggml's order, ne0 (the contiguous one) first; every Tensor has four dimensions. Knows no operation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ggml_engine.errors import AllocationError, GraphError
from ggml_engine.ggml.library import Libraries, ffi
from ggml_engine.ggml.tensor_types import TYPES_BY_NUMBER, TensorType, describe_refusal

FLOAT_TYPES = frozenset({TensorType.F32, TensorType.F16, TensorType.BF16})
MATMUL_TYPES = frozenset(kind for kind in TensorType if kind.can_multiply)
_MAX_ELEMENTS = 2**63 - 1
_MAX_TENSORS = 1 << 20
Shape = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor of ggml: the pointer, and what never changes about it. `nb` are strides in bytes."""

    ptr: Any
    type: TensorType
    ne: Shape
    nb: Shape

    @property
    def name(self) -> str:
        """The name that was given to it."""
        return str(ffi.string(self.ptr.name).decode("utf-8", "replace"))

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.ne)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after the other in ne0, ne1, ne2, ne3 order."""
        expected = self.type.block_bytes
        if self.nb[0] != expected:
            return False
        expected = self.type.row_bytes(self.ne[0])
        for n, stride in zip(self.ne[1:], self.nb[1:], strict=True):
            if n != 1 and stride != expected:
                return False
            expected = stride * n if n != 1 else expected * n
        return True

    @property
    def has_contiguous_rows(self) -> bool:
        """Whether each row's elements lie one after the other."""
        return self.nb[0] == self.type.block_bytes

    @property
    def has_packed_rows(self) -> bool:
        """Whether the rows are contiguous, and row i, counted over ne1, ne2 and ne3, starts i * nb1 bytes in."""
        expected = self.nb[1] * self.ne[1]
        for n, stride in zip(self.ne[2:], self.nb[2:], strict=True):
            if n != 1 and stride != expected:
                return False
            expected *= n
        return self.has_contiguous_rows

    @property
    def span_bytes(self) -> int:
        """Bytes from the first element to one past the last."""
        (n0, n1, n2, n3), (b0, b1, b2, b3) = self.ne, self.nb
        kind = self.type
        row = kind.block_bytes + (n0 - 1) * b0 if kind.block_size == 1 else kind.row_bytes(n0)
        return row + (n1 - 1) * b1 + (n2 - 1) * b2 + (n3 - 1) * b3

    def __repr__(self) -> str:
        return f"{self.name or 'tensor'} {self.type.name} {list(self.ne)}"


def wrap(ptr: Any) -> Tensor:
    """The Tensor behind a `struct ggml_tensor *`. Raises GraphError for null."""
    if ptr == ffi.NULL:
        raise GraphError("a null pointer is no tensor")
    return Tensor(ptr, TYPES_BY_NUMBER[ptr.type], tuple(ffi.unpack(ptr.ne, 4)), tuple(ffi.unpack(ptr.nb, 4)))


def require(condition: bool, operation: str, reason: str, *tensors: Tensor) -> None:
    if not condition:
        raise refusal(operation, reason, *tensors)


def refusal(operation: str, reason: str, *tensors: Tensor) -> GraphError:
    """What `require` raises; by itself where an operation is made often, since the text costs more than the check."""
    shown = ", ".join(repr(tensor) for tensor in tensors)
    return GraphError(f"{operation}: {reason} (given: {shown})" if shown else f"{operation}: {reason}")


def require_countable(operation: str, ne: tuple[int, ...]) -> None:
    # times 16: in bytes of the widest type, and with the padding of buffers
    require(math.prod(ne) * 16 <= _MAX_ELEMENTS, operation, f"too many elements: {list(ne)}")


def require_tensor_count(n_tensors: int, least: int) -> None:
    if not least <= n_tensors <= _MAX_TENSORS:
        raise GraphError(f"room for {n_tensors} tensors was asked for, {least} to {_MAX_TENSORS} are possible")


class TensorContext:
    """A ggml context: room for the descriptions of at most `max_tensors` tensors, their data lies elsewhere."""

    def __init__(self, libraries: Libraries, max_tensors: int, extra_bytes: int = 0) -> None:
        require_tensor_count(max_tensors, 1)
        self.libraries = libraries
        self.base = libraries.base
        self.max_tensors = max_tensors
        self.n_tensors = 0
        n_bytes = self.base.ggml_tensor_overhead() * max_tensors + extra_bytes
        params = {"mem_size": n_bytes, "mem_buffer": ffi.NULL, "no_alloc": True}
        self._ctx = self.base.ggml_init(ffi.new("struct ggml_init_params *", params)[0])
        if self._ctx == ffi.NULL:
            raise AllocationError(f"a ggml context of {n_bytes} bytes could not be had")

    @property
    def ctx(self) -> Any:
        """The open context's pointer."""
        if self._ctx is None:
            raise GraphError("the context was freed before")
        return self._ctx

    def free(self) -> None:
        """Free the descriptions; the tensors must not be used afterwards."""
        ctx, self._ctx = self._ctx, None
        if ctx is not None:
            self.base.ggml_free(ctx)

    def _room(self, operation: str, *_inputs: Tensor | None) -> Any:
        """The context, for one more tensor that is made of `inputs`."""
        if self.n_tensors >= self.max_tensors:
            raise GraphError(f"{operation}: the context is full ({self.max_tensors} tensors)")
        ctx = self.ctx
        self.n_tensors += 1
        return ctx

    def new_tensor(self, name: str, tensor_type: TensorType, *ne: int) -> Tensor:
        """A tensor without data, of one to four dimensions."""
        require(1 <= len(ne) <= 4, "new_tensor", f"1 to 4 dimensions, asked for {len(ne)}")
        require(all(0 < n <= _MAX_ELEMENTS for n in ne), "new_tensor", f"dimensions must be positive, asked for {ne}")
        require_countable("new_tensor", ne)
        kind = TYPES_BY_NUMBER.get(int(tensor_type))
        if kind is None:
            raise GraphError(f"new_tensor: {describe_refusal(int(tensor_type))}")
        require(ne[0] % kind.block_size == 0, "new_tensor", f"rows of {ne[0]} do not fill blocks of {kind.block_size}")
        ptr = self.base.ggml_new_tensor(self._room("new_tensor"), int(kind), len(ne), ffi.new("int64_t[]", ne))
        return self._named(ptr, name)

    def _named(self, ptr: Any, name: str) -> Tensor:
        if ptr == ffi.NULL:
            raise GraphError(f"ggml made no tensor for {name!r}")
        if name:
            self.base.ggml_set_name(ptr, name.encode("utf-8")[:63])
        self._note(ptr)
        return wrap(ptr)

    def _note(self, ptr: Any) -> None:
        """Called with every tensor that was made here."""
