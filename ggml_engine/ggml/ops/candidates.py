"""The largest of a row, found where the row was computed."""

from __future__ import annotations

from ggml_engine.ggml.ops.graph_context import GraphContext
from ggml_engine.ggml.ops.tensors import Tensor, require
from ggml_engine.ggml.tensor_types import TensorType

_MAX_WIDTH = 2**31 - 1


class CandidateOps(GraphContext):
    """Searches over rows as long as a vocabulary. `ExpertOps.top_k` sorts short ones."""

    def argmax(self, a: Tensor, name: str = "") -> Tensor:
        """Where the largest of each row of `a` [n, rows] is: i32 [rows].

        Which of equals is not said; a row with NaN gives any of its numbers.
        """
        require(a.type == TensorType.F32 and a.is_contiguous, "argmax", "contiguous f32 is needed", a)
        require(a.ne[2:] == (1, 1), "argmax", "two dimensions are needed", a)
        require(a.ne[0] <= _MAX_WIDTH, "argmax", "more than i32 counts", a)
        return self._named(self.base.ggml_argmax(self._room("argmax", a), a.ptr), name)

    def largest(self, a: Tensor, k: int, name: str = "") -> Tensor:
        """Where the k largest of each row of `a` [n, rows] are, in no order: i32 [k, rows].

        Which of equals is not said; a row with NaN gives any of its numbers.
        """
        require(a.type == TensorType.F32 and a.is_contiguous, "largest", "contiguous f32 is needed", a)
        require(0 < k <= a.ne[0] <= _MAX_WIDTH, "largest", f"{k} of {a.ne[0]}", a)
        return self._named(self.base.ggml_top_k(self._room("largest", a), a.ptr, k), name)
