"""A step over the cell cache: admitted (`Step`), then given its cells and its read plan (`Placement`), then committed.

The order is held by these types. Where cells come from is the cache's to know.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import PositionError, StepError
from ggml_engine.pool.arguments import checked_integers
from ggml_engine.pool.read_plan import WindowRead
from ggml_engine.pool.sequence_cells import SequenceCells


@dataclass(frozen=True, slots=True, eq=False)
class Extension:
    """The tokens of one sequence in a step: where they stand in the batch, and the sequence's revision at `declare`."""

    sequence: SequenceCells
    tokens: slice | npt.NDArray[np.int64]
    n_tokens: int
    revision: int


class Step:
    """An admitted step. Made by `CellCache.declare` only; `place` turns it into a `Placement`, once."""

    __slots__ = ("_is_placed", "_place", "extensions", "positions", "sequences")

    def __init__(
        self,
        place: Callable[[Step], Placement],
        sequences: npt.NDArray[np.int64],
        positions: npt.NDArray[np.int64],
        extensions: tuple[Extension, ...],
    ) -> None:
        self._place = place
        self._is_placed = False
        self.sequences = sequences  # i64 [n_tokens], read-only
        self.positions = positions  # i64 [n_tokens], read-only: where each token has to stand
        self.extensions = extensions
        sequences.setflags(write=False)
        positions.setflags(write=False)

    def place(self, positions: npt.ArrayLike) -> Placement:
        """Claims a cell for every token: all or none. `positions` are integers [n_tokens], in batch order.

        Raises PositionError when a position does not continue its sequence (the step can still be placed), and
        StepError when the step was placed before, or is stale: since it was declared, one of its sequences has moved or
        was closed, or another step took the cells.
        """
        if self._is_placed:
            raise StepError("the step was placed before")
        for extension in self.extensions:
            if extension.sequence.revision != extension.revision:
                raise StepError(
                    f"the step is stale: sequence {extension.sequence.id} has changed since it was declared"
                )
        if positions is not self.positions:
            self._check_positions(positions)
        placement = self._place(self)
        self._is_placed = True
        return placement

    def _check_positions(self, positions: npt.ArrayLike) -> None:
        given = checked_integers(positions, "the positions of a step", PositionError)
        if given.shape != self.positions.shape:
            raise PositionError(f"the step has {self.positions.size} tokens, {given.size} positions were given")
        wrong = np.flatnonzero(given != self.positions)
        if wrong.size:
            token = int(wrong[0])
            raise PositionError(
                f"token {token} (sequence {self.sequences[token]}) was given position {given[token]}, "
                f"its sequence continues at {self.positions[token]}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """The cells and the read plan that a step got. Arrays are in batch order; they are not to be written to.

    `cells` are the pool rows to write, `extent` is one past the highest cell that the step reads or writes, padding
    included, and `reads` has one entry per window of the cache. Until it is committed, rewound or closed, the sequences
    of the step cannot be declared again.
    """

    sequences: npt.NDArray[np.int64]  # [n_tokens]
    positions: npt.NDArray[np.int32]  # [n_tokens]
    cells: npt.NDArray[np.int64]  # [n_tokens]
    extent: int
    reads: tuple[WindowRead, ...]
    rows_read: tuple[int, ...]  # how many rows of the pool each window reads, padding included
    held: tuple[SequenceCells, ...]
    _claim: object

    @property
    def n_rows(self) -> int:
        """How many rows all windows read."""
        return sum(self.rows_read)

    @property
    def sequence_ids(self) -> tuple[int, ...]:
        """The distinct sequences of the step, ascending."""
        return tuple(sequence.id for sequence in self.held)

    def commit(self) -> None:
        """Counts the placed tokens into the lengths of their sequences.

        Raises StepError, and commits nothing, when it was committed before or when one of its sequences was rewound or
        closed since: what is left of the step is then freed by rewinding or closing the others.
        """
        lost = [sequence.id for sequence in self.held if sequence.claim is not self._claim]
        if lost:
            raise StepError(
                f"the placement holds no claim on sequences {lost}: committed before, or rewound or closed since"
            )
        for sequence in self.held:
            sequence.length = sequence.n_cells
            sequence.claim = None
            sequence.revision += 1
