"""`NextToken`: a sequence that decodes alone goes on by one token, where its next cell follows the last one.

Nearly every decode step of one sequence is like that: nothing is planned anew then, and what the last step was given is
moved on by one. It comes to what `declare`, `place` and `plan_cells` would give, or is refused with nothing changed.
After a forward that filled the processor's caches with weights, what counts is how much code and memory is passed.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggml_engine.errors import StepError
from ggml_engine.pool.cell_plan import CellPlan
from ggml_engine.pool.cell_table import CellTable
from ggml_engine.pool.read_plan import WindowRead
from ggml_engine.pool.sequence_cells import SequenceCells
from ggml_engine.pool.step import Placement
from ggml_engine.pool.window import Window


class NextToken:
    """After a committed `placement` of one token, whose plans these are, one for each window: both become its own.

    `positions` i32 [1] and `cells` i64 [1], `position` and `cell`, and `plans` are those of the step that it was moved
    on to, and `n_rows` how many rows that reads through all windows.
    """

    __slots__ = (
        *("_claim", "_revision", "_sequence", "_table", "_windows"),
        *("cell", "cells", "n_rows", "plans", "position", "positions", "reads", "sequence"),
    )

    def __init__(
        self,
        placement: Placement,
        plans: Sequence[CellPlan],
        windows: Sequence[Window],
        sequence: SequenceCells,
        table: CellTable,
    ) -> None:
        self.positions, self.cells = placement.positions, placement.cells
        self.position, self.cell = self.positions.item(), self.cells.item()
        self.reads: tuple[WindowRead, ...] = ()  # what is read is told by the plans
        self.sequence = sequence.id
        self.n_rows = placement.n_rows
        self.plans = plans
        self._windows = windows
        self._sequence = sequence
        self._table = table
        self._claim = object()
        self._revision = sequence.revision

    def move_on(self) -> bool:
        """Claims the next cell for the next position; False, with nothing changed, where that is not so simple.

        So it is not where the sequence has changed since, or its cells were moved, or where a run ends or is taken.
        """
        sequence, table = self._sequence, self._table
        position, cell = self.position + 1, self.cell + 1
        if (
            sequence.revision != self._revision
            or sequence.last_cell != cell - 1
            or not cell % table.run
            or not table.is_free(cell)
        ):
            return False
        first_seen = [max(0, window.first_seen(position)) for window in self._windows]
        for plan, first in zip(self.plans, first_seen, strict=True):
            if not plan.can_move_on(first):
                return False
        sequence.reserve(1)
        table.claim_from(cell, position, 1)
        sequence.append(cell, 1)
        sequence.claim = self._claim
        sequence.revision += 1
        for plan, first in zip(self.plans, first_seen, strict=True):
            self.n_rows += plan.move_on(position, first)
        self.position, self.cell = position, cell
        self.positions[0], self.cells[0] = position, cell
        return True

    def commit(self) -> None:
        """Counts the token into its sequence's length, as `Placement.commit`; StepError where it was lost since."""
        sequence = self._sequence
        if sequence.claim is not self._claim:
            raise StepError(f"the placement holds no claim on sequence {sequence.id}: rewound or closed since")
        sequence.length = sequence.n_cells
        sequence.claim = None
        sequence.revision += 1
        self._revision = sequence.revision
