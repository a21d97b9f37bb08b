"""Mixtures of experts: the choice of the best, and products with the weights of those that were chosen."""

from __future__ import annotations

from ggml_engine.ggml.library import ffi
from ggml_engine.ggml.ops.shapes import ShapeOps
from ggml_engine.ggml.ops.tensors import MATMUL_TYPES, Tensor, require, require_countable
from ggml_engine.ggml.tensor_types import TensorType

_MAX_SORTED = 2**31 - 1

# The CPU multiplies rows of one expert in these types together once there are so many of them, and rounds otherwise
# then. Weights that lie rearranged are always multiplied row by row.
_TOGETHER_FROM = 8
TOGETHER_TYPES = frozenset(
    {
        TensorType.Q2_K,
        TensorType.Q3_K,
        TensorType.Q4_K,
        TensorType.Q5_K,
        TensorType.Q6_K,
        TensorType.IQ1_S,
        TensorType.IQ1_M,
        TensorType.IQ2_XXS,
        TensorType.IQ2_XS,
        TensorType.IQ2_S,
        TensorType.IQ3_XXS,
        TensorType.IQ3_S,
        TensorType.IQ4_XS,
    }
)


def n_tensors_apart(n_tokens: int) -> int:
    """How many tensors `mul_mat_id_apart` adds to a graph at most."""
    return 4 * -(-n_tokens // (_TOGETHER_FROM - 1))


class ExpertOps(ShapeOps):
    """Weights of which every token uses a few. The numbers of the experts are data, as those that `top_k` gives."""

    def top_k(self, a: Tensor, k: int, name: str = "") -> Tensor:
        """Where the k largest of each row of `a` [n, rows] are, largest first: i32 [k, rows].

        A view of all n sorted numbers, so that its rows are n numbers apart. Takes two tensors of the graph. Which of
        equals comes first is not said; a row with NaN gives its numbers in some order.
        """
        require(a.type == TensorType.F32 and a.has_packed_rows, "top_k", "f32 rows at one distance are needed", a)
        require(0 < k <= a.ne[0] <= _MAX_SORTED, "top_k", f"{k} of {a.ne[0]}", a)
        order = self._named(self.base.ggml_argsort(self._room("top_k", a), a.ptr, self.base.GGML_SORT_ORDER_DESC), "")
        return self.view(order, (k, *a.ne[1:]), order.nb[1:], 0, name)

    def mul_mat_id(self, experts: Tensor, x: Tensor, ids: Tensor, name: str = "") -> Tensor:
        """Each token's row by the matrices that it chose: f32 [m, used, tokens].

        experts [k, m, n_expert], x f32 [k, used, tokens] or [k, 1, tokens], ids i32 [used, tokens].
        """
        given = (experts, x, ids)
        require(experts.type in MATMUL_TYPES, "mul_mat_id", "the experts cannot be multiplied in this type", *given)
        require(x.type == TensorType.F32, "mul_mat_id", "the second must be f32", *given)
        require(ids.type == TensorType.I32, "mul_mat_id", "ids must be i32", *given)
        require(experts.ne[0] == x.ne[0], "mul_mat_id", "row lengths differ", *given)
        require(experts.ne[3] == x.ne[3] == 1, "mul_mat_id", "at most three dimensions are needed", *given)
        fits = ids.ne[1:] == (x.ne[2], 1, 1) and ids.ne[0] % x.ne[1] == 0
        require(fits, "mul_mat_id", "the ids are not [used, tokens]", *given)
        rows = experts.has_contiguous_rows and x.has_contiguous_rows
        require(rows, "mul_mat_id", "rows must be contiguous", *given)
        require_countable("mul_mat_id", (experts.ne[1], *ids.ne))
        require_countable("mul_mat_id", (experts.ne[2], *ids.ne))  # which rows go to which expert
        ctx = self._room("mul_mat_id", *given)
        return self._named(self.base.ggml_mul_mat_id(ctx, experts.ptr, x.ptr, ids.ptr), name)

    def mul_mat_id_apart(self, experts: Tensor, x: Tensor, ids: Tensor, name: str = "") -> Tensor:
        """As `mul_mat_id`; on a CPU no row's bits depend on which experts the other tokens chose.

        In some types that takes products over so few tokens that an expert, which a token chooses at most once, never
        gets as many rows as are multiplied together.
        """
        n_tokens, step = ids.ne[1], _TOGETHER_FROM - 1
        is_rearranged = experts.ptr.extra != ffi.NULL
        if experts.type not in TOGETHER_TYPES or is_rearranged or n_tokens <= step:
            return self.mul_mat_id(experts, x, ids, name)
        parts = []
        for first in range(0, n_tokens, step):
            n = min(step, n_tokens - first)
            rows = self.view(x, (*x.ne[:2], n), x.nb[1:3], first * x.nb[2])
            chosen = self.view(ids, (ids.ne[0], n), ids.nb[1:2], first * ids.nb[1])
            parts.append(self.mul_mat_id(experts, rows, chosen, name))
        return self.concat_all(parts, 2)

    def add_id(self, a: Tensor, b: Tensor, ids: Tensor, name: str = "") -> Tensor:
        """`a` f32 [n, used, tokens] plus the rows of `b` f32 [n, n_expert] at `ids` i32 [used, tokens]."""
        given = (a, b, ids)
        require(a.type == b.type == TensorType.F32, "add_id", "both must be f32", *given)
        require(ids.type == TensorType.I32, "add_id", "ids must be i32", *given)
        require(a.ne[0] == b.ne[0] and b.ne[2:] == (1, 1), "add_id", "row lengths differ", *given)
        require(a.ne[1:] == (*ids.ne[:2], 1) and ids.ne[2:] == (1, 1), "add_id", "ids are not [used, tokens]", *given)
        require(a.has_contiguous_rows and b.has_contiguous_rows, "add_id", "rows must be contiguous", *given)
        return self._named(self.base.ggml_add_id(self._room("add_id", *given), a.ptr, b.ptr, ids.ptr), name)
