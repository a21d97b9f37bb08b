"""Rows that are read and written by number."""

from __future__ import annotations

from ggml_engine.ggml.ops.graph_context import GraphContext
from ggml_engine.ggml.ops.tensors import MATMUL_TYPES, Tensor, require, require_countable
from ggml_engine.ggml.tensor_types import TensorType

_SET_ROWS_TYPES = frozenset(
    {
        TensorType.F32,
        TensorType.F16,
        TensorType.BF16,
        TensorType.Q8_0,
        TensorType.Q4_0,
        TensorType.Q4_1,
        TensorType.Q5_0,
        TensorType.Q5_1,
        TensorType.IQ4_NL,
    }
)


class RowOps(GraphContext):
    """Rows by number. The numbers are data: check them where they are set."""

    def get_rows(self, a: Tensor, ids: Tensor, name: str = "") -> Tensor:
        """Rows of `a` [n, rows] at `ids` i32 [k]: f32 [n, k].

        With batches: `a` [n, rows, b, c], ids [k, b, c], result [n, k, b, c]. The ids are data.
        """
        require(ids.type == TensorType.I32, "get_rows", "ids must be i32", a, ids)
        require(a.type in MATMUL_TYPES, "get_rows", "rows cannot be read in this type", a, ids)
        fits = a.ne[2] == ids.ne[1] and a.ne[3] == ids.ne[2] and ids.ne[3] == 1
        require(fits, "get_rows", "the batches differ", a, ids)
        require(a.has_contiguous_rows, "get_rows", "rows must be contiguous", a, ids)
        require_countable("get_rows", (a.ne[0], *ids.ne))
        return self._named(self.base.ggml_get_rows(self._room("get_rows", a, ids), a.ptr, ids.ptr), name)

    def set_rows(self, a: Tensor, rows: Tensor, ids: Tensor, name: str = "") -> Tensor:
        """Write `rows` f32 [n, k] over the rows of `a` [n, m] at `ids` i64 or i32 [k]; gives `a`.

        With batches: `a` [n, m, b, c], rows [n, k, b, c], ids [k, b, c], where the ids' b and c may be divisors, which
        are repeated. The ids are data.
        """
        require(a.type in _SET_ROWS_TYPES, "set_rows", "rows cannot be written in this type", a, rows, ids)
        require(rows.type == TensorType.F32, "set_rows", "the new rows must be f32", a, rows, ids)
        require(ids.type in {TensorType.I64, TensorType.I32}, "set_rows", "ids must be i64 or i32", a, rows, ids)
        require(a.ne[0] == rows.ne[0] and rows.ne[1] == ids.ne[0], "set_rows", "shapes differ", a, rows, ids)
        fits = rows.ne[2] % ids.ne[1] == 0 and rows.ne[3] % ids.ne[2] == 0 and ids.ne[3] == 1
        require(fits and a.ne[2:] == rows.ne[2:], "set_rows", "the batches differ", a, rows, ids)
        require(a.has_contiguous_rows and rows.has_contiguous_rows, "set_rows", "contiguous rows", a, rows, ids)
        ctx = self._room("set_rows", a, rows, ids)
        return self._named(self.base.ggml_set_rows(ctx, a.ptr, rows.ptr, ids.ptr), name)
