"""Which products of a graph are computed together, as one operation (ggml/ops/joint.py).

In a step of few tokens an operation is short, and ggml's threads wait for each other after each. So products of one x
are one, the norm of x and the sum that follows go with them, all as ggml would round them. In steps of many tokens
those go this way that are multiplied by panels. Owns what was built of a
graph's norms and products so far: a norm whose result is taken along is reached by nothing, and is not computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ggml_engine.ggml.joint_kernel import JointKernel, find_joint_kernel
from ggml_engine.ggml.ops import GraphBuilder, Tensor
from ggml_engine.ggml.tensor_types import TensorType


@dataclass(frozen=True, slots=True)
class _Norm:
    x: Tensor
    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class _Product:
    x: Tensor
    weight: Tensor
    norm: _Norm | None


class JointProducts:
    """Those of one graph of `n_tokens` tokens, all of whose layers compute on the CPU, in `n_threads` threads."""

    def __init__(self, b: GraphBuilder, kernel: JointKernel, n_threads: int) -> None:
        self._b = b
        self._kernel = kernel
        self._n_threads = n_threads
        self._norms: dict[Tensor, _Norm] = {}
        self._products: dict[Tensor, _Product] = {}

    @classmethod
    def find(cls, b: GraphBuilder, n_tokens: int, n_threads: int) -> JointProducts | None:
        """None where there is no such operation, or no type of weights that it takes in a step of so many tokens."""
        kernel = find_joint_kernel(b.libraries)
        return cls(b, kernel, n_threads) if kernel is not None and kernel.takes_some(n_tokens) else None

    def takes(self, x: Tensor, weight: Tensor) -> bool:
        """Whether a product can be one of these: of matrices, the weight as the file has it."""
        if x.type is not TensorType.F32 or not x.has_contiguous_rows:
            return False
        if x.ne[2:] != (1, 1) or weight.ne[2:] != (1, 1) or not self._kernel.takes(weight.type, x.ne[1]):
            return False
        buffer = weight.ptr.buffer  # none: a view, or made by the graph
        return bool(buffer) and bool(self._b.base.ggml_backend_buffer_is_host(buffer))

    def note_norm(self, y: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
        """y is x [k, tokens], RMS-normed and multiplied with a weight [k]."""
        if weight.type is TensorType.F32 and x.ne[2:] == (1, 1) and weight.ne == (x.ne[0], 1, 1, 1):
            self._norms[y] = _Norm(x, weight, eps)

    def multiply(self, x: Tensor, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The products of weights with x, by the weights' names; all of them can be such."""
        norm = self._norms.get(x)
        made = self._make(x, list(weights.values()), norm, None, [f"{name}.out" for name in weights])
        if len(made) == 1:
            self._products[made[0]] = _Product(x, next(iter(weights.values())), norm)
        return dict(zip(weights, made, strict=True))

    def add(self, y: Tensor, other: Tensor, name: str) -> Tensor | None:
        """y + other; None where neither is such a product."""
        for summed, added in ((y, other), (other, y)):
            product = self._products.get(summed)
            fits = added.type is TensorType.F32 and added.has_contiguous_rows and added.ne == summed.ne
            if product is not None and fits:
                return self._make(product.x, [product.weight], product.norm, added, [name])[0]
        return None

    def _make(
        self, x: Tensor, weights: Sequence[Tensor], norm: _Norm | None, added: Tensor | None, names: Sequence[str]
    ) -> list[Tensor]:
        x, how = (x, None) if norm is None else (norm.x, (norm.weight, norm.eps))
        return self._b.joint_products(
            self._kernel, x, weights, self._n_threads, norm=how, added=added, names=names
        )  # fmt: skip
