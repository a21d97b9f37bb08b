"""`ResultRows`: what of a computed graph's result comes into Python, as much as is needed of each row.

Rows lie in memory that Python can reach, or on a device. Counts the bytes that cross.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from ggml_engine.executor.graph_cache import ReadyGraph
from ggml_engine.executor.outputs import NeededRows, Outputs, Rows, WholeRows
from ggml_engine.ggml.backends import get_data
from ggml_engine.ggml.candidates import Candidates, RowNeed, best_of
from ggml_engine.ggml.library import Libraries

_MAX_LOCKED_BYTES = 8 << 20  # a copy of at most a millisecond, during which Python's lock is kept


class ResultRows:
    """Reads the results of graphs whose rows of logits have `n_vocab` numbers. `n_bytes` is what was read so far."""

    def __init__(self, libraries: Libraries, n_vocab: int) -> None:
        self._libraries = libraries
        self._n_vocab = n_vocab
        self.n_bytes = 0

    def read(self, ready: ReadyGraph, shape: tuple[int, int]) -> npt.NDArray[np.float32]:
        """The first rows f32 of this shape; padding comes last."""
        rows = np.empty(shape, np.float32)
        if ready.result is not None:
            self._copy(ready, rows, 0)
        return rows

    def row(self, ready: ReadyGraph, row: int) -> npt.NDArray[np.float32]:
        """A copy of a row of logits f32 [n_vocab]."""
        found = np.empty(self._n_vocab, np.float32)
        self._copy(ready, found.reshape(1, -1), row)
        return found

    def needed(
        self, ready: ReadyGraph, needs: Sequence[RowNeed], row_later: Callable[[int], npt.NDArray[np.float32]]
    ) -> Outputs:
        """What is needed of the first rows; `row_later` gives one of which only candidates were read."""
        for need in needs:
            if need.n_best:
                break
        else:
            return WholeRows(self.read(ready, (len(needs), self._n_vocab)), needs)
        if ready.best is None:
            return NeededRows(self._find(ready, needs), row_later)
        found, n_bytes = ready.best.read(needs, partial(self.row, ready))
        self.n_bytes += n_bytes
        return NeededRows([self.row(ready, i) if each is None else each for i, each in enumerate(found)], row_later)

    def _find(self, ready: ReadyGraph, needs: Sequence[RowNeed]) -> list[Candidates | Rows]:
        """Candidates by the rows where they lie, and copies of whole rows."""
        found: list[Candidates | Rows] = []
        for i, need in enumerate(needs):
            if need.n_best and ready.rows is not None:
                best = best_of(ready.rows[i], need)
                self.n_bytes += best.n_bytes
                found.append(best)
            else:
                row = self.row(ready, i)
                found.append(best_of(row, need) if need.n_best else row)
        return found

    def _copy(self, ready: ReadyGraph, rows: npt.NDArray[np.float32], first: int) -> None:
        """Fill `rows` [n, width] with those of the result from `first` on."""
        assert ready.result is not None
        if ready.rows is None or rows.nbytes > _MAX_LOCKED_BYTES:
            get_data(self._libraries, ready.result, rows, first * rows.shape[1] * rows.itemsize)
        else:
            rows[...] = ready.rows[first : first + rows.shape[0]]
        self.n_bytes += rows.nbytes
