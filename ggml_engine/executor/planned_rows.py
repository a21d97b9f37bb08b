"""Reading by plan: how a graph's compiled attention is told, before each run, which rows each token sees.

Rows are not part of a graph's shape then, only how long a plan may be: one graph serves a decoding batch for as long
as the pool does not grow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ggml_engine.executor.input_memory import InputMemory
from ggml_engine.ggml.cell_kernel import CellKernel, find_kernel
from ggml_engine.ggml.ops import GraphBuilder, Tensor
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.models.attention import KvCells
from ggml_engine.models.config import Hyperparameters, KvLayer
from ggml_engine.pool.cell_plan import CellPlan, plan_cells
from ggml_engine.pool.read_plan import Comb
from ggml_engine.pool.registry import GgmlCache
from ggml_engine.pool.step import Placement

# Items of work for each thread: the more, the less one waits for the other; each costs its partial sums.
_ITEMS_PER_THREAD = 4
_MAX_SPLITS = 32


@dataclass(frozen=True, slots=True)
class PlannedReading:
    """How an executor's steps are cut for the kernel."""

    kernel: CellKernel
    tokens_per_tile: int
    n_threads: int

    @classmethod
    def of(cls, hp: Hyperparameters, layers: Sequence[KvLayer], n_threads: int) -> PlannedReading | None:
        """For a model's heads; None where there is no kernel, or none that takes them."""
        kernel = find_kernel()
        if kernel is None or not all(kernel.takes(each.head_k) and kernel.takes(each.head_v) for each in layers):
            return None
        groups = [hp.n_head[il] // layers[hp.kv_index(il)].n_head for il in range(hp.n_layer)]
        return cls(kernel, kernel.tokens_per_tile(max(groups)), n_threads)

    def plans(self, placement: Placement) -> tuple[CellPlan, ...]:
        """The plan of every window."""
        return tuple([plan_cells(read, self.tokens_per_tile) for read in placement.reads])

    def n_splits(self, n_tokens: int, n_head_kv: int) -> int:
        """Into how many parts the rows of a tile are cut, so that all threads have work."""
        n_items = -(-n_tokens // self.tokens_per_tile) * n_head_kv
        return max(1, min(_MAX_SPLITS, -(-_ITEMS_PER_THREAD * self.n_threads // n_items)))


class PlannedRows:
    """The inputs of a graph's reads: one plan for each window. `capacities` are theirs."""

    def __init__(
        self, b: GraphBuilder, capacities: Sequence[int], n_tokens: int, cache: GgmlCache, reading: PlannedReading
    ) -> None:
        self._b = b
        self._cache = cache
        self._reading = reading
        self._n_tokens = n_tokens
        self._plans = [b.input(f"inp_plan_{i}", TensorType.I32, n) for i, n in enumerate(capacities)]

    def read(self, layer: int) -> KvCells:
        """All rows of a layer, and its window's plan."""
        window = self._cache.window_of_layer[layer]
        pool = self._cache.pool
        (k,), (v,) = pool.read(self._b, layer, [Comb(0, pool.rows)])
        reading = self._reading
        n_splits = reading.n_splits(self._n_tokens, k.ne[2])
        return KvCells(k, v, self._plans[window], reading.kernel, n_splits, reading.n_threads)

    def fill(self, plans: Sequence[CellPlan], memory_of: Callable[[Tensor], InputMemory]) -> None:
        """Set the plans of a step."""
        for tensor, plan in zip(self._plans, plans, strict=True):
            memory = memory_of(tensor)
            if memory.is_read:  # some layer of this graph reads through the window
                memory.array[: plan.numbers.size] = plan.numbers
                memory.send()
