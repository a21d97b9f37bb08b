"""Sequences in an executor beside what each of them has seen: every step's logits are compared with the definition.

The definition is `NaiveModel`: one sequence alone, from position 0. It knows no cells, clones, windows of reads or batches,
so whatever the executor shares or plans has to come to the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from engines import Logits, batch_of, executor_over, loaded
from naive import NaiveModel

from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.models.model import Model

# Largest differences allowed, for logits that spread by 2 to 3: see test_engine_against_naive, which measures them.
EXACT = 1e-4  # all f32
GELU_TABLE = 3e-2  # f32 but for ggml's table of GELU (gemma3)
ROUNDED_KV = 1e-1  # f16 K and V, or flash attention, which rounds to f16 too


class SideBySide:
    """An executor, and for each of its open sequences the tokens that it holds."""

    def __init__(self, executor: GgmlExecutor, naive: NaiveModel, seed: int = 0) -> None:
        self.executor = executor
        self.naive = naive
        self.histories: dict[int, list[int]] = {}
        self.n_compared = 0
        self._n_vocab = executor.model.hp.n_vocab
        self._rng = np.random.default_rng(seed)
        rounded = executor.options.k_type == "f16" or executor.form.is_flash
        exact = EXACT if naive.architecture == "llama" else GELU_TABLE
        self.limit = ROUNDED_KV if rounded else exact

    def open(self) -> int:
        sequence = self.executor.open()
        self.histories[sequence] = []
        return sequence

    def clone(self, source: int, upto: int | None = None) -> int:
        """Shares cells and takes none."""
        upto = len(self.histories[source]) if upto is None else upto
        used, rows = self.executor.cache.used_cells, self.executor.cache.pool.rows
        clone = self.executor.clone(source, upto)
        assert (self.executor.cache.used_cells, self.executor.cache.pool.rows) == (used, rows)
        self.histories[clone] = self.histories[source][:upto]
        return clone

    def rewind(self, sequence: int, to: int) -> None:
        self.executor.rewind(sequence, to)
        del self.histories[sequence][to:]

    def close(self, *sequences: int) -> None:
        for sequence in sequences:
            self.executor.close(sequence)
            del self.histories[sequence]

    def tokens(self, n: int) -> list[int]:
        return self._rng.integers(3, self._n_vocab, n).tolist()

    def step(self, lengths: Mapping[int, int]) -> Logits:
        """Appends that many random tokens to every sequence in one forward, and compares the logits of all."""
        parts = [(sequence, self.tokens(n)) for sequence, n in lengths.items()]
        logits = self.executor.forward(batch_of(parts))
        for sequence, tokens in parts:
            self.histories[sequence] += tokens
        self.compare(logits, lengths)
        return logits

    def compare(self, logits: Logits, lengths: Mapping[int, int]) -> None:
        """`logits` are those of the last tokens of these sequences, by the definition."""
        want = np.concatenate([self.naive.logits(self.histories[s])[-n:] for s, n in lengths.items()])
        assert logits.shape == want.shape
        worst = float(np.abs(logits - want).max())
        assert worst < self.limit, f"differs from the definition by {worst}, {self.limit} is allowed"
        for sequence in lengths:
            assert self.executor.length(sequence) == len(self.histories[sequence])
        self.n_compared += len(want)

    def decode(self, sequences: list[int], n: int) -> None:
        """`n` forwards of one token each."""
        for _ in range(n):
            self.step(dict.fromkeys(sequences, 1))

    def check_cells(self) -> None:
        """Owned are exactly the cells that open sequences hold, and each of them holds as many as it has tokens."""
        cells = self.executor.cache
        held: set[int] = set()
        for sequence, history in self.histories.items():
            own = cells.cells_of(sequence).tolist()
            assert len(own) == len(set(own)) == len(history)
            held.update(own)
        assert cells.used_cells == len(held)
        assert cells.free_cells == cells.capacity - len(held)


@contextmanager
def side_by_side(model: Model | Path, seed: int = 0, **options: Any) -> Iterator[SideBySide]:
    """An executor over a model or a file; at the end every cell is accounted for."""
    if isinstance(model, Path):
        with loaded(model, threads=1) as opened, side_by_side(opened, seed, **options) as sides:
            yield sides
        return
    with executor_over(model, **options) as executor:
        sides = SideBySide(executor, NaiveModel(model.file.path), seed)
        yield sides
        sides.check_cells()
