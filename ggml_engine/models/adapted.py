"""What the adapters of a step add to a graph's products: b (a x) times a factor, one adapter after the other.

Owns the factors. They are inputs of the graph and not part of it, so that sequences that differ in their scales alone
use the same graph. A factor is a row as wide as the product, which multiplies it at the speed of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from ggml_engine.ggml.ops import GraphBuilder, Tensor
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.models.adapter import Adapter
from ggml_engine.models.adapter_set import AdapterSet

NODES_PER_PAIR = 4  # two products, the factor, the sum

Multiply = Callable[[Tensor, Tensor], Tensor]  # of a tensor of a pair and what it is multiplied with


class AdaptedProducts:
    """The adapters of one graph, in the order in which they are added."""

    def __init__(self, b: GraphBuilder, adapters: Sequence[Adapter]) -> None:
        self._b = b
        self._adapters = tuple(adapters)
        self._factors: dict[tuple[int, int, int], Tensor] = {}  # by adapter, rank and width

    def add_to_product(self, y: Tensor, weight: str, x: Tensor) -> Tensor:
        """y f32 [out, tokens], which is the weight of this name times x, with what the adapters add."""
        return self._add(y, weight, lambda a: self._b.mul_mat(a, x), self._b.mul_mat)

    def add_to_experts(self, y: Tensor, weight: str, x: Tensor, multiply: Multiply) -> Tensor:
        """The same of products with chosen experts, f32 [out, used, tokens], as `multiply` makes them."""
        return self._add(y, weight, lambda a: multiply(a, x), multiply)

    def add_to_rows(self, y: Tensor, weight: str, ids: Tensor) -> Tensor:
        """The same of rows f32 [width, tokens] that were looked up at `ids` i32 [tokens]."""
        return self._add(y, weight, lambda a: self._b.get_rows(a, ids), self._b.mul_mat)

    def _add(self, y: Tensor, weight: str, first: Callable[[Tensor], Tensor], second: Multiply) -> Tensor:
        for i, adapter in enumerate(self._adapters):
            pair = adapter.pairs.get(weight)
            if pair is None:
                continue
            change = second(pair.b, first(pair.a))
            change = self._b.mul(change, self._factor(i, pair.rank, y.ne[0]), f"{weight}.change_{i}")
            y = self._b.add(y, change, f"{weight}.adapted_{i}")
        return y

    def _factor(self, i: int, rank: int, width: int) -> Tensor:
        key = (i, rank, width)
        if key not in self._factors:
            name = f"inp_adapter_{i}_rank_{rank}_width_{width}"
            self._factors[key] = self._b.input(name, TensorType.F32, width)
        return self._factors[key]

    def values(self, adapters: AdapterSet) -> Iterator[tuple[Tensor, npt.NDArray[np.float32]]]:
        """Every input with what it is filled with, f32 [width], at the scales of `adapters`: those of this graph."""
        scales = [scale for _, scale in adapters.scaled]
        for (i, rank, width), tensor in self._factors.items():
            yield tensor, np.full(width, self._adapters[i].factor(scales[i], rank), np.float32)


def max_nodes(adapters: Sequence[Adapter], n_apart: int = 0) -> int:
    """Tensors of a graph that adapters add, at most: inputs included, each pair used once.

    `n_apart` are those that a product with experts takes beyond one.
    """
    pairs = [pair for adapter in adapters for pair in adapter.pairs.values()]
    return (NODES_PER_PAIR + 1) * len(pairs) + 2 * n_apart * sum(pair.a.ne[2] > 1 for pair in pairs)
