"""What executors without tensors have in common: real cells, and limits."""

from __future__ import annotations

from ggml_engine.executor.protocol import Executor
from ggml_engine.pool.cells import CellCache


class CellExecutor(Executor):
    """An executor over a `CellCache`; what it computes is its heir's."""

    def __init__(self, cache: CellCache, max_batch_tokens: int, n_vocab: int) -> None:
        self.cache = cache
        self._max_batch_tokens = max_batch_tokens
        self._n_vocab = n_vocab

    @property
    def run(self) -> int:
        return self.cache.run

    @property
    def capacity(self) -> int:
        return self.cache.capacity

    @property
    def free_cells(self) -> int:
        return self.cache.free_cells

    @property
    def max_batch_tokens(self) -> int:
        return self._max_batch_tokens

    @property
    def n_vocab(self) -> int:
        return self._n_vocab
