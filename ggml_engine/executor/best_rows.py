"""Candidates found inside the graph: rows of logits stay on the device, the best of them cross.

Devices do not say which of equal logits they take, and pass NaN over. So there is one candidate more than is needed,
or a count of those that are smaller, and the sum of the row: where these leave something open, the row is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ggml_engine.ggml.backends import get_data
from ggml_engine.ggml.candidates import NOT_FINITE, Candidates, RowNeed, best_of
from ggml_engine.ggml.library import Libraries
from ggml_engine.ggml.ops import GraphBuilder, Tensor

MAX_NODES = 24
_GRAIN = 32  # so that sessions of other options, and their steps together, share graphs

ReadRow = Callable[[int], npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class BestKey:
    """What a graph finds in every row: the `n_best` of the first `n_tokens`."""

    n_best: int
    n_tokens: int

    @classmethod
    def of(cls, needs: Sequence[RowNeed]) -> BestKey | None:
        """For all rows of a step; None where none of them does with candidates, or not of the same tokens."""
        wanted = {need for need in needs if need.n_best and not need.log_sum}
        n_tokens = {need.n_tokens for need in wanted}
        if len(n_tokens) != 1:
            return None
        n_best, n = max(need.n_best for need in wanted), n_tokens.pop()
        if n_best > 1:
            n_best = min(-(-(n_best + 1) // _GRAIN) * _GRAIN, n)
        return cls(n_best, n)


class BestRows:
    """The nodes that find the best of `logits` f32 [n_vocab, outputs], and what they found."""

    def __init__(self, b: GraphBuilder, logits: Tensor, key: BestKey) -> None:
        self._libraries: Libraries = b.libraries
        self._key = key
        n, n_rows = key.n_tokens, logits.ne[1]
        rows = logits
        if n < logits.ne[0]:
            rows = b.cont(b.view(logits, (n, n_rows), (logits.nb[1],), 0))
        total = b.sum_rows(rows)
        ids = b.reshape(b.argmax(rows), 1, n_rows) if key.n_best == 1 else b.largest(rows, key.n_best)
        values = b.reshape(b.get_rows(b.reshape(rows, 1, n, n_rows), ids), key.n_best, n_rows)
        parts = [total, values]
        if key.n_best == 1:
            parts.insert(1, b.sum_rows(b.step(b.scale(b.sub(rows, values), -1.0))))
        self._ids = b.output(ids, "result_ids")
        self._numbers = b.output(b.concat_all(parts, 0), "result_candidates")

    def read(self, needs: Sequence[RowNeed], read_row: ReadRow) -> tuple[list[Candidates | None], int]:
        """The candidates of the first rows, None where the whole row is needed, and how many bytes were read."""
        n = len(needs)
        ids = np.empty((n, self._ids.ne[0]), np.int32)
        numbers = np.empty((n, self._numbers.ne[0]), np.float32)
        get_data(self._libraries, self._ids, ids)
        get_data(self._libraries, self._numbers, numbers)
        find = self._argmax if self._key.n_best == 1 else self._best
        found: list[Candidates | None] = []
        for i, need in enumerate(needs):
            if not need.n_best:
                found.append(None)
            elif need.log_sum or need.n_tokens != self._key.n_tokens:
                found.append(best_of(read_row(i), need))
            elif not np.isfinite(numbers[i, 0]):  # a sum of finite logits may overflow, too
                found.append(NOT_FINITE)
            else:
                found.append(find(ids[i], numbers[i, 1:], need) or best_of(read_row(i), need))
        return found, ids.nbytes + numbers.nbytes

    def _argmax(self, ids: npt.NDArray[np.int32], numbers: npt.NDArray[np.float32], _: RowNeed) -> Candidates | None:
        n_smaller, value = numbers
        return Candidates(ids, numbers[1:]) if n_smaller == self._key.n_tokens - 1 and np.isfinite(value) else None

    def _best(self, ids: npt.NDArray[np.int32], values: npt.NDArray[np.float32], need: RowNeed) -> Candidates | None:
        k, order = need.n_best, np.lexsort((ids, -values))
        ids, values = ids[order], values[order]
        is_all = ids.size == self._key.n_tokens
        # what was left out may be equal to the last one
        return Candidates(ids[:k], values[:k]) if is_all or values[k - 1] > values[-1] else None
