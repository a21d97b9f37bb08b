"""Activations and gated activations, f32."""

from __future__ import annotations

from ggml_engine.ggml.ops.graph_context import GraphContext
from ggml_engine.ggml.ops.tensors import Tensor, require
from ggml_engine.ggml.tensor_types import TensorType


class ActivationOps(GraphContext):
    """Functions of one element, and products with a gate."""

    def _unary_input(self, operation: str, *tensors: Tensor) -> None:
        for a in tensors:
            require(a.type == TensorType.F32, operation, "f32 is needed", a)
            require(a.is_contiguous, operation, "a contiguous tensor is needed", a)

    def tanh(self, a: Tensor, name: str = "") -> Tensor:
        """Hyperbolic tangent."""
        self._unary_input("tanh", a)
        return self._named(self.base.ggml_tanh(self._room("tanh", a), a.ptr), name)

    def silu(self, a: Tensor, name: str = "") -> Tensor:
        """x * sigmoid(x)."""
        self._unary_input("silu", a)
        return self._named(self.base.ggml_silu(self._room("silu", a), a.ptr), name)

    def swiglu(self, gate: Tensor, up: Tensor, name: str = "") -> Tensor:
        """silu(gate) * up (Shazeer 2020, arXiv:2002.05202)."""
        self._unary_input("swiglu", gate, up)
        require(gate.ne == up.ne, "swiglu", "shapes differ", gate, up)
        return self._named(self.base.ggml_swiglu_split(self._room("swiglu", gate, up), gate.ptr, up.ptr), name)

    def geglu(self, gate: Tensor, up: Tensor, name: str = "") -> Tensor:
        """gelu(gate) * up, with the tanh approximation (Shazeer 2020, arXiv:2002.05202)."""
        self._unary_input("geglu", gate, up)
        require(gate.ne == up.ne, "geglu", "shapes differ", gate, up)
        return self._named(self.base.ggml_geglu_split(self._room("geglu", gate, up), gate.ptr, up.ptr), name)
