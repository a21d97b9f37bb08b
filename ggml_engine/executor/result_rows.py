"""`ResultRows`: what of a computed graph's result comes into Python, as much as is needed of each row.

Rows lie in memory that Python can reach, or on a device. Counts the bytes that cross.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from ggml_engine.executor.graph_cache import ReadyGraph
from ggml_engine.executor.outputs import NeededRows, Outputs, WholeRows
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
        if not any(need.n_best for need in needs):
            return WholeRows(self.read(ready, (len(needs), self._n_vocab)), needs)
        found: list[Candidates | None] = []
        if ready.best is not None:
            found, n_bytes = ready.best.read(needs, partial(self.row, ready))
            self.n_bytes += n_bytes
        elif needs:
            found = self._find(ready, needs)
        rows = [self.row(ready, i) if each is None else each for i, each in enumerate(found)]
        return NeededRows(rows, row_later)

    def _find(self, ready: ReadyGraph, needs: Sequence[RowNeed]) -> list[Candidates | None]:
        """Candidates by the rows where they lie."""
        view = ready.result_view
        if view is None:
            return [best_of(self.row(ready, i), need) if need.n_best else None for i, need in enumerate(needs)]
        rows = np.frombuffer(view, np.float32).reshape(-1, self._n_vocab)
        found = [best_of(rows[i], need) if need.n_best else None for i, need in enumerate(needs)]
        self.n_bytes += sum(each.n_bytes for each in found if each is not None)
        return found

    def _copy(self, ready: ReadyGraph, rows: npt.NDArray[np.float32], first: int) -> None:
        """Fill `rows` [n, width] with those of the result from `first` on."""
        assert ready.result is not None
        view, at = ready.result_view, first * rows.shape[1] * rows.itemsize
        if view is None or rows.nbytes > _MAX_LOCKED_BYTES:
            get_data(self._libraries, ready.result, rows, at)
        else:
            rows.data.cast("B")[:] = view[at : at + rows.nbytes]
        self.n_bytes += rows.nbytes
