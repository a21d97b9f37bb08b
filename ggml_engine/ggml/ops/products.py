"""Matrix products."""

from __future__ import annotations

from ggml_engine.ggml.ops.shapes import ShapeOps
from ggml_engine.ggml.ops.tensors import FLOAT_TYPES, MATMUL_TYPES, Tensor, require, require_countable
from ggml_engine.ggml.tensor_types import TensorType


class ProductOps(ShapeOps):
    """Products of a weight, of any type that ggml multiplies, with f32."""

    def mul_mat(self, a: Tensor, b: Tensor, name: str = "", *, f32_accumulation: bool = False) -> Tensor:
        """a^T b: [k, m] by [k, n] gives f32 [m, n]; dimensions 2 and 3 of a are repeated to b's."""
        require(a.type in MATMUL_TYPES, "mul_mat", "the first cannot be multiplied in this type", a, b)
        fits = b.type == TensorType.F32 or b.type == a.type in FLOAT_TYPES
        require(fits, "mul_mat", "the second must be f32, or of the first's float type", a, b)
        require(a.ne[0] == b.ne[0], "mul_mat", "row lengths differ", a, b)
        require(b.ne[2] % a.ne[2] == 0 and b.ne[3] % a.ne[3] == 0, "mul_mat", "batches do not repeat", a, b)
        require(a.nb[0] <= a.nb[1] and a.has_contiguous_rows, "mul_mat", "the first must not be transposed", a, b)
        require(b.has_contiguous_rows, "mul_mat", "the second's rows must be contiguous", a, b)
        require_countable("mul_mat", (a.ne[1], *b.ne[1:]))
        result = self._named(self.base.ggml_mul_mat(self._room("mul_mat", a, b), a.ptr, b.ptr), name)
        if f32_accumulation:
            self.base.ggml_prec_set_acc(result.ptr, self.base.GGML_PREC_F32)
        return result

    def hadamard(self, a: Tensor, matrix: Tensor, name: str = "") -> Tensor:
        """Rows of `a`, f32, in pieces of n = matrix.ne[0] elements, each times a Hadamard matrix f32 [n, n].

        The CPU uses a fast Walsh-Hadamard transform in place of the product. Its own inverse.
        """
        n = matrix.ne[0]
        require(
            matrix.type == TensorType.F32 and matrix.ne == (n, n, 1, 1), "hadamard", "a square f32 matrix", a, matrix
        )
        require(n & (n - 1) == 0, "hadamard", f"the matrix must have a power of two of rows, has {n}")
        require(a.type == TensorType.F32 and a.ne[0] % n == 0, "hadamard", f"f32 rows in pieces of {n}", a, matrix)
        pieces = self.reshape(a, n, a.n_elements // n) if a.is_contiguous else self.cont_2d(a, n, a.n_elements // n)
        rotated = self.mul_mat(matrix, pieces)
        self.base.ggml_mul_mat_set_hint(rotated.ptr, self.base.GGML_HINT_SRC0_IS_HADAMARD)
        shape = a.ne[:2] if a.ne[2] == 1 else a.ne[:3]
        return self.reshape(rotated, *shape, name=name)
