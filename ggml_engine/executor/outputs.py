"""`Outputs`: what a forward gives for each of its rows, as much as was needed.

Who asked for candidates gets them, and may still look at the whole row until the next forward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import InputError
from ggml_engine.ggml.candidates import Candidates, RowNeed, best_of

Rows = npt.NDArray[np.float32]


class Outputs(ABC):
    """The rows of one step, in batch order. Any thread."""

    @abstractmethod
    def candidates(self, row: int) -> Candidates | None:
        """The candidates of a row; None where the whole row was needed."""

    @abstractmethod
    def row(self, row: int) -> Rows:
        """A whole row f32 [n_vocab]. Raises ExecutorError where it was not needed and is no longer there."""

    def rows(self, start: int, stop: int) -> Rows:
        """Whole rows f32 [stop - start, n_vocab]."""
        return np.stack([self.row(row) for row in range(start, stop)])


class WholeRows(Outputs):
    """Of an executor that gives logits f32 [outputs, n_vocab], whatever is needed."""

    def __init__(self, logits: Rows, needs: Sequence[RowNeed]) -> None:
        self.logits = logits
        self._needs = needs

    def candidates(self, row: int) -> Candidates | None:
        """The candidates of a row, found at every call."""
        need = self._needs[row]
        return best_of(self.logits[row], need) if need.n_best else None

    def row(self, row: int) -> Rows:
        """A view of a row."""
        found: Rows = self.logits[row]
        return found

    def rows(self, start: int, stop: int) -> Rows:
        """A view of rows."""
        return self.logits[start:stop]


class NeededRows(Outputs):
    """Candidates and copies of whole rows; `read` gives a row that only its candidates are known of."""

    def __init__(self, found: Sequence[Candidates | Rows], read: Callable[[int], Rows]) -> None:
        self._found = found
        self._read = read

    def candidates(self, row: int) -> Candidates | None:
        """The candidates of a row."""
        found = self._found[row]
        return found if isinstance(found, Candidates) else None

    def row(self, row: int) -> Rows:
        """A row, read where only candidates are known."""
        found = self._found[row]
        return self._read(row) if isinstance(found, Candidates) else found


def check_needs(needs: Sequence[RowNeed], n_outputs: int, n_vocab: int) -> None:
    """Raises InputError for needs that do not go with a step of `n_outputs` rows of `n_vocab`."""
    if len(needs) != n_outputs:
        raise InputError(f"what is needed is said of {len(needs)} rows, the batch has {n_outputs}")
    for need in dict.fromkeys(needs):
        if need.n_best and not 0 < need.n_best <= need.n_tokens <= n_vocab:
            raise InputError(f"needed are the best {need.n_best} of {need.n_tokens}, a row has {n_vocab}")
