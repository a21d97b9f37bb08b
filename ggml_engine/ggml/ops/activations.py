"""Activations and gated activations, f32.

Source of the gated ones: Shazeer 2020, arXiv:2002.05202. A gate and what it gates may be halves of one tensor: as
views, or as the halves of each row of one operand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ggml_engine.ggml.ops.graph_context import GraphContext
from ggml_engine.ggml.ops.tensors import Tensor, require
from ggml_engine.ggml.tensor_types import TensorType

_Unary = Callable[[Any, Any], Any]
_Gated = Callable[[Any, Any, Any], Any]


class ActivationOps(GraphContext):
    """Functions of one element, and products with a gate."""

    def _unary(self, operation: str, make: _Unary, a: Tensor, name: str) -> Tensor:
        require(a.type == TensorType.F32, operation, "f32 is needed", a)
        require(a.has_contiguous_rows, operation, "rows must be contiguous", a)
        return self._named(make(self._room(operation, a), a.ptr), name)

    def tanh(self, a: Tensor, name: str = "") -> Tensor:
        """Hyperbolic tangent."""
        return self._unary("tanh", self.base.ggml_tanh, a, name)

    def sigmoid(self, a: Tensor, name: str = "") -> Tensor:
        """1 / (1 + exp(-x))."""
        return self._unary("sigmoid", self.base.ggml_sigmoid, a, name)

    def silu(self, a: Tensor, name: str = "") -> Tensor:
        """x * sigmoid(x)."""
        return self._unary("silu", self.base.ggml_silu, a, name)

    def gelu(self, a: Tensor, name: str = "") -> Tensor:
        """x * normal cdf(x) by the tanh approximation, rounded to f16 (Hendrycks and Gimpel, arXiv:1606.08415)."""
        return self._unary("gelu", self.base.ggml_gelu, a, name)

    def gelu_erf(self, a: Tensor, name: str = "") -> Tensor:
        """x * normal cdf(x) by the error function (Hendrycks and Gimpel, arXiv:1606.08415)."""
        return self._unary("gelu_erf", self.base.ggml_gelu_erf, a, name)

    def relu(self, a: Tensor, name: str = "") -> Tensor:
        """max(x, 0)."""
        return self._unary("relu", self.base.ggml_relu, a, name)

    def step(self, a: Tensor, name: str = "") -> Tensor:
        """1 where x > 0, else 0, of NaN too."""
        return self._unary("step", self.base.ggml_step, a, name)

    def softplus(self, a: Tensor, name: str = "") -> Tensor:
        """log(1 + exp(x)); x itself above 20."""
        return self._unary("softplus", self.base.ggml_softplus, a, name)

    def exp(self, a: Tensor, name: str = "") -> Tensor:
        """e to the power of x."""
        return self._unary("exp", self.base.ggml_exp, a, name)

    def sqr(self, a: Tensor, name: str = "") -> Tensor:
        """x * x."""
        return self._unary("sqr", self.base.ggml_sqr, a, name)

    def sqrt(self, a: Tensor, name: str = "") -> Tensor:
        """Square root; NaN below 0."""
        return self._unary("sqrt", self.base.ggml_sqrt, a, name)

    def xielu(self, a: Tensor, alpha_n: float, alpha_p: float, beta: float, eps: float, name: str = "") -> Tensor:
        """An integral of ELU with trained slopes (Huang and Schlag 2024, arXiv:2411.13010).

        Above 0: softplus(alpha_p) x^2 + beta x. Else: (beta + softplus(alpha_n)) (expm1(min(x, eps)) - x) + beta x.
        """
        require(a.type == TensorType.F32 and a.has_packed_rows, "xielu", "f32 rows at one distance are needed", a)
        terms = (alpha_n, alpha_p, beta, eps)
        require(all(math.isfinite(term) for term in terms), "xielu", f"the terms must be finite, are {terms}")
        return self._named(self.base.ggml_xielu(self._room("xielu", a), a.ptr, *terms), name)

    # ---- gated

    def _gated_input(self, operation: str, *tensors: Tensor) -> None:
        for a in tensors:
            require(a.type == TensorType.F32, operation, "f32 is needed", *tensors)
            require(a.has_packed_rows, operation, "contiguous rows at one distance are needed", *tensors)
            require(a.ne == tensors[0].ne, operation, "shapes differ", *tensors)

    def _gated(self, operation: str, make: _Gated, gate: Tensor, up: Tensor, name: str) -> Tensor:
        self._gated_input(operation, gate, up)
        return self._named(make(self._room(operation, gate, up), gate.ptr, up.ptr), name)

    def _halves(self, operation: str, make: _Unary, a: Tensor, name: str) -> Tensor:
        self._gated_input(operation, a)
        require(a.ne[0] % 2 == 0, operation, f"rows of {a.ne[0]} have no halves", a)
        return self._named(make(self._room(operation, a), a.ptr), name)

    def swiglu(self, gate: Tensor, up: Tensor, name: str = "") -> Tensor:
        """silu(gate) * up."""
        return self._gated("swiglu", self.base.ggml_swiglu_split, gate, up, name)

    def geglu(self, gate: Tensor, up: Tensor, name: str = "") -> Tensor:
        """gelu(gate) * up, with the tanh approximation."""
        return self._gated("geglu", self.base.ggml_geglu_split, gate, up, name)

    def geglu_erf(self, gate: Tensor, up: Tensor, name: str = "") -> Tensor:
        """gelu_erf(gate) * up."""
        return self._gated("geglu_erf", self.base.ggml_geglu_erf_split, gate, up, name)

    def reglu(self, gate: Tensor, up: Tensor, name: str = "") -> Tensor:
        """relu(gate) * up."""
        return self._gated("reglu", self.base.ggml_reglu_split, gate, up, name)

    def swiglu_oai(self, gate: Tensor, up: Tensor, alpha: float, limit: float, name: str = "") -> Tensor:
        """g * sigmoid(alpha g) * (u + 1), with g = min(gate, limit) and u = up within -limit to limit (gpt-oss)."""
        self._gated_input("swiglu_oai", gate, up)
        require(math.isfinite(alpha) and limit >= 0, "swiglu_oai", f"alpha {alpha}, limit {limit}", gate, up)
        ctx = self._room("swiglu_oai", gate, up)
        return self._named(self.base.ggml_swiglu_oai(ctx, gate.ptr, up.ptr, alpha, limit), name)

    def swiglu_halves(self, a: Tensor, name: str = "") -> Tensor:
        """silu(first half of each row) * second half: [2n, ...] gives [n, ...]."""
        return self._halves("swiglu_halves", self.base.ggml_swiglu, a, name)

    def geglu_halves(self, a: Tensor, name: str = "") -> Tensor:
        """gelu(first half of each row) * second half, with the tanh approximation: [2n, ...] gives [n, ...]."""
        return self._halves("geglu_halves", self.base.ggml_geglu, a, name)
