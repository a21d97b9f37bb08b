"""Elementwise arithmetic and norms."""

from __future__ import annotations

import math

from ggml_engine.ggml.ops.graph_context import GraphContext
from ggml_engine.ggml.ops.tensors import FLOAT_TYPES, Tensor, require
from ggml_engine.ggml.tensor_types import TensorType


def _repeats(small: Tensor, large: Tensor) -> bool:
    return all(n and big % n == 0 for n, big in zip(small.ne, large.ne, strict=True))


class ArithmeticOps(GraphContext):
    """Sums, products and norms, element by element or row by row."""

    def _elementwise(self, operation: str, a: Tensor, b: Tensor) -> None:
        require(a.type in FLOAT_TYPES and b.type in FLOAT_TYPES, operation, "both must be floats", a, b)
        require(b.type in {TensorType.F32, a.type}, operation, "the second must be f32 or of the first's type", a, b)
        require(_repeats(b, a), operation, "the second does not repeat into the first", a, b)
        require(a.has_contiguous_rows and b.has_contiguous_rows, operation, "rows must be contiguous", a, b)

    def add(self, a: Tensor, b: Tensor, name: str = "") -> Tensor:
        """a + b; b is repeated to a's shape."""
        self._elementwise("add", a, b)
        return self._named(self.base.ggml_add(self._room("add", a, b), a.ptr, b.ptr), name)

    def sub(self, a: Tensor, b: Tensor, name: str = "") -> Tensor:
        """a - b; b is repeated to a's shape."""
        self._elementwise("sub", a, b)
        return self._named(self.base.ggml_sub(self._room("sub", a, b), a.ptr, b.ptr), name)

    def mul(self, a: Tensor, b: Tensor, name: str = "") -> Tensor:
        """a * b elementwise; b is repeated to a's shape."""
        self._elementwise("mul", a, b)
        return self._named(self.base.ggml_mul(self._room("mul", a, b), a.ptr, b.ptr), name)

    def div(self, a: Tensor, b: Tensor, name: str = "") -> Tensor:
        """a / b elementwise; b is repeated to a's shape."""
        self._elementwise("div", a, b)
        return self._named(self.base.ggml_div(self._room("div", a, b), a.ptr, b.ptr), name)

    def scale(self, a: Tensor, factor: float, name: str = "") -> Tensor:
        """a * factor."""
        packed = a.is_contiguous and a.nb[2:] == (a.nb[1] * a.ne[1], a.nb[2] * a.ne[2])  # also where that is one row
        require(a.type == TensorType.F32 and packed, "scale", "f32 and contiguous is needed", a)
        require(math.isfinite(factor), "scale", f"the factor must be finite, is {factor}")
        return self._named(self.base.ggml_scale(self._room("scale", a), a.ptr, factor), name)

    def clamp(self, a: Tensor, low: float, high: float, name: str = "") -> Tensor:
        """min(max(a, low), high), in memory of its own; the bounds may be infinite."""
        require(a.type == TensorType.F32 and a.has_packed_rows, "clamp", "f32 rows at one distance are needed", a)
        require(low <= high, "clamp", f"low {low}, high {high}", a)
        return self._named(self.base.ggml_clamp(self._room("clamp", a), a.ptr, low, high), name)

    def fill(self, a: Tensor, value: float, name: str = "") -> Tensor:
        """A tensor of a's shape that holds `value` everywhere, which may be infinite; `a` keeps its own."""
        require(a.type == TensorType.F32 and a.is_contiguous, "fill", "f32 and contiguous is needed", a)
        require(not math.isnan(value), "fill", "the value is NaN", a)
        return self._named(self.base.ggml_fill(self._room("fill", a), a.ptr, value), name)

    def _norm_input(self, operation: str, a: Tensor, eps: float) -> None:
        require(a.type == TensorType.F32 and a.has_contiguous_rows, operation, "f32 with contiguous rows", a)
        require(math.isfinite(eps) and eps >= 0, operation, f"eps must be finite and not negative, is {eps}")

    def layer_norm(self, a: Tensor, eps: float, name: str = "") -> Tensor:
        """(a - mean(a)) / sqrt(variance(a) + eps) per row, without weights (Ba et al. 2016, arXiv:1607.06450)."""
        self._norm_input("layer_norm", a, eps)
        return self._named(self.base.ggml_norm(self._room("layer_norm", a), a.ptr, eps), name)

    def rms_norm(self, a: Tensor, eps: float, name: str = "") -> Tensor:
        """a / sqrt(mean(a^2) + eps) per row (Zhang and Sennrich 2019, arXiv:1910.07467)."""
        self._norm_input("rms_norm", a, eps)
        return self._named(self.base.ggml_rms_norm(self._room("rms_norm", a), a.ptr, eps), name)
