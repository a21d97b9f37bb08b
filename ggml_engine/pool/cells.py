"""The cell cache: who owns which cell of the pool, and which cells a step gets.

Owns: per sequence a table of cells in position order, per cell a count of owners; declared, placed, committed steps.
Does not know: tensors, ggml, layers, token ids, threads (one thread at a time uses a cache).
Invariants: a cell is free exactly when no sequence owns it; free + used == capacity; a cell is congruent to its
position modulo the run; a clone copies no cell and a sliding window forgets none; a call that raises has changed
nothing; no cost grows with the number of open sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import (
    CacheError,
    OptionError,
    PoolFullError,
    PositionError,
    StepError,
    UnknownSequenceError,
)
from ggml_engine.pool.arguments import checked_count, checked_int, checked_integers, checked_option
from ggml_engine.pool.cell_plan import CellPlan
from ggml_engine.pool.cell_table import CellTable
from ggml_engine.pool.compaction import Move, plan_move
from ggml_engine.pool.next_token import NextToken
from ggml_engine.pool.read_plan import PLANNERS, ReadGeometry, ReadKind, VisibleCells
from ggml_engine.pool.sequence_cells import SequenceCells
from ggml_engine.pool.step import Extension, Placement, Step
from ggml_engine.pool.window import Window

# Cells are indices of rows, which ggml takes as i32.
_MAX_CELLS = 2**31 - 1


class BatchControl(Protocol):
    """The face of a cache that the control plane uses: lifecycle of sequences and admission, no tensors.

    Sequences are named by integers that are never issued twice. Positions count committed tokens. Every refusal is a
    `CacheError`, and has changed nothing.
    """

    @property
    def capacity(self) -> int:
        """How many cells there are."""

    @property
    def free_cells(self) -> int:
        """How many cells no sequence owns."""

    @property
    def used_cells(self) -> int:
        """How many cells some sequence owns; a shared cell counts once."""

    def open(self) -> int:
        """Opens an empty sequence and returns its id."""

    def close(self, sequence: int) -> None:
        """Closes a sequence; its cells become free where nobody else owns them."""

    def clone(self, source: int, upto: int) -> int:
        """Opens a sequence that shares the first `upto` committed cells of `source`, and returns its id."""

    def rewind(self, sequence: int, to: int) -> None:
        """Drops everything from position `to` on, claimed cells included."""

    def length(self, sequence: int) -> int:
        """How many positions of the sequence are committed."""

    def can_extend(self, n_tokens: int, sequence: int | None = None) -> bool:
        """Whether a step of `n_tokens` of this sequence (None: of a new one) would be admitted now."""


class CellCache:
    """Many sequences over one pool of cells, without a tensor: implements `BatchControl`, and plans steps.

    `capacity` is in cells and is rounded up to a whole run. `windows` are the distinct windows of the model's layers; a
    number is a sliding one of so many tokens, 0 for layers that see everything. `run` is the alignment of cells (a
    position's cell is congruent to it modulo `run`: that makes results independent of placement), `read_block` is what
    reads are rounded to; one of the two divides the other. `reads` is how a step's rows are chosen. Raises OptionError
    for values that are not possible, before anything is allocated.
    """

    clones_anywhere = True  # at every position of a sequence

    def __init__(
        self,
        capacity: int,
        windows: Sequence[int | Window] = (0,),
        *,
        run: int = 64,
        read_block: int = 256,
        reads: ReadKind = ReadKind.IN_BLOCKS,
    ) -> None:
        capacity = checked_option(capacity, "capacity", 1)
        run = checked_option(run, "run", 1)
        read_block = checked_option(read_block, "read_block", 1)
        self._windows = tuple(_checked_window(window) for window in windows)
        if not self._windows or len(set(self._windows)) < len(self._windows):
            raise OptionError(f"windows must be distinct and at least one, got {self._windows}")
        if run % read_block and read_block % run:
            raise OptionError(f"one of run and read_block must divide the other, got {run} and {read_block}")
        rounded = -(-capacity // run) * run
        if rounded > _MAX_CELLS:
            raise OptionError(f"capacity {capacity} in runs of {run} is {rounded} cells, at most {_MAX_CELLS} exist")
        self._table = CellTable(rounded, run)
        self._geometry = ReadGeometry(run, read_block, rounded)
        self._reads = reads
        self._sequences: dict[int, SequenceCells] = {}
        self._next_id = 0

    # The control plane's face.

    @property
    def capacity(self) -> int:
        """How many cells there are: the capacity asked for, rounded up to a whole run."""
        return self._table.capacity

    @property
    def free_cells(self) -> int:
        """How many cells no sequence owns."""
        return self._table.capacity - self._table.n_used

    @property
    def used_cells(self) -> int:
        """How many cells some sequence owns, claimed ones included; a shared cell counts once."""
        return self._table.n_used

    def open(self) -> int:
        """Opens an empty sequence and returns its id, which was never issued before."""
        return self._register(np.empty(0, np.int32))

    def close(self, sequence: int) -> None:
        """Closes a sequence; its cells, claimed ones included, become free where nobody else owns them.

        Raises UnknownSequenceError.
        """
        found = self._find(sequence)
        del self._sequences[found.id]
        found.revision += 1
        self._drop_from(found, 0)

    def clone(self, source: int, upto: int) -> int:
        """Opens a sequence that shares the cells of positions [0, upto) of `source`, and returns its id.

        Adds an owner to those cells: no K or V is copied and no free cell is needed. Raises UnknownSequenceError, and
        PositionError unless 0 <= upto <= length(source).
        """
        found = self._find(source)
        upto = _checked_position(upto, found)
        cells = found.cells[:upto].copy()
        self._table.share(cells)
        return self._register(cells)

    def rewind(self, sequence: int, to: int) -> None:
        """Drops the cells from position `to` on, claimed ones included; they become free where nobody else owns them.

        Raises UnknownSequenceError, and PositionError unless 0 <= to <= length(sequence).
        """
        found = self._find(sequence)
        to = _checked_position(to, found)
        if to != found.n_cells:
            found.revision += 1
            self._drop_from(found, to)

    def length(self, sequence: int) -> int:
        """How many positions of the sequence are committed. Raises UnknownSequenceError."""
        return self._find(sequence).length

    def can_extend(self, n_tokens: int, sequence: int | None = None) -> bool:
        """Whether `declare` would admit a step of `n_tokens` of this sequence now; None asks for a new sequence.

        False too when a step of the sequence was placed and not committed. Raises UnknownSequenceError, and StepError
        for a negative number of tokens.
        """
        n_tokens = checked_count(n_tokens)
        found = None if sequence is None else self._find(sequence)
        if n_tokens > self.free_cells or (found is not None and found.claim is not None):
            return False
        length = 0 if found is None else found.length
        return self._table.count_missing(np.arange(length, length + n_tokens)) == 0

    # The planner's face.

    @property
    def windows(self) -> tuple[Window, ...]:
        """The windows that every placement has a read for, in this order."""
        return self._windows

    @property
    def run(self) -> int:
        """How many cells a run has."""
        return self._table.run

    def declare(self, sequences: npt.ArrayLike) -> Step:
        """Admits a step; `sequences` is the sequence of every token in batch order, integers [n_tokens].

        Tokens of different sequences may interleave. What is admitted cannot fail for space. Changes nothing. Raises
        UnknownSequenceError, PoolFullError when the cells that these tokens need are not free, and StepError when the
        array is not a list of at least one integer, or when a sequence has cells of a step that was not committed.
        """
        ids = checked_integers(sequences, "the sequences of a step", StepError)
        if ids.size == 0:
            raise StepError("a step needs at least one token")
        extensions = []
        expected = np.empty(ids.size, np.int64)
        for sequence_id, tokens, n_tokens in _group_by_sequence(ids):
            found = self._find(sequence_id)
            if found.claim is not None:
                raise StepError(
                    f"sequence {found.id} holds {found.n_cells - found.length} cells of a step that was not committed: "
                    f"rewind it to {found.length} or less, or close it, before it is declared again"
                )
            extensions.append(Extension(found, tokens, n_tokens, found.revision))
            expected[tokens] = found.length if n_tokens == 1 else np.arange(found.length, found.length + n_tokens)
        n_missing = self._table.count_missing(expected)
        if n_missing:
            raise PoolFullError(ids.size, ids.size - n_missing, self.capacity)
        return Step(self._place, ids, expected, tuple(extensions))

    def next_token(self, placement: Placement, plans: Sequence[CellPlan]) -> NextToken:
        """What goes on from a committed placement of a single token, whose plans these are, in reads that are exact."""
        (sequence,) = placement.held
        return NextToken(placement, plans, self._windows, sequence, self._table)

    # Moving the cells of a sequence together.

    def plan_move(self, sequence: int) -> Move | None:
        """The move that saves most stretches of this sequence's cells for each cell that it moves; changes nothing.

        Only cells that nobody else owns move, to free ones. None when no move saves a stretch, for want of room too, or
        while a step of the sequence was placed and not committed. Raises UnknownSequenceError.
        """
        found = self._find(sequence)
        if found.claim is not None:
            return None
        return plan_move(self._table, self._geometry.read_block, found.id, found.cells, found.revision)

    def check_move(self, move: Move) -> None:
        """Raises StepError when the move is stale: when its sequence, or an owner of its cells, is not as planned."""
        found = self._sequences.get(move.sequence)
        is_as_planned = (
            found is not None
            and found.revision == move.revision  # so it has no claim, and its rows are those that were copied
            and np.array_equal(found.cells[move.begin :], move.old)
            and self._table.have_one_owner(move.old).all()
            and self._table.are_free(move.new).all()
        )
        if not is_as_planned:
            raise StepError(f"the move of {move.n_cells} cells of sequence {move.sequence} is stale: plan it again")

    def apply_move(self, move: Move) -> None:
        """Lets the sequence own its new cells in place of the old ones, which become free. Their K and V were copied.

        Steps that were declared before can still be placed. Raises StepError, and changes nothing, for a stale move.
        """
        self.check_move(move)
        moved = self._sequences[move.sequence]
        moved.cells[move.begin :] = move.new
        moved.find_breaks(move.begin)
        self._table.move(move.old, move.new)

    # For people who check engines.

    @property
    def open_sequences(self) -> tuple[int, ...]:
        """The ids of all open sequences, oldest first."""
        return tuple(self._sequences)

    def owners(self, cell: int) -> tuple[int, ...]:
        """The sequences that hold a cell, oldest first; looks at every open sequence. Raises CacheError for no cell."""
        cell = self._checked_cell(cell)
        position = int(self._table.positions[cell])
        return tuple(
            sequence.id
            for sequence in self._sequences.values()
            if sequence.n_cells > position and sequence.cells[position] == cell
        )

    def cells_of(self, sequence: int) -> npt.NDArray[np.int64]:
        """The cell of every position of a sequence, claimed ones included, i64. Raises UnknownSequenceError."""
        return self._find(sequence).cells.astype(np.int64)

    def count_cells(self, sequences: Iterable[int]) -> int:
        """How many distinct cells any of these sequences owns, claimed ones included. Raises UnknownSequenceError.

        A cell that several of them share counts once. Takes a byte for every cell of the capacity.
        """
        owned = np.zeros(self.capacity, np.bool_)
        for found in [self._find(sequence) for sequence in sequences]:
            owned[found.cells] = True
        return int(np.count_nonzero(owned))

    def position_of(self, cell: int) -> int:
        """The position that a used cell holds, the same for all owners. Raises CacheError for a free cell or none."""
        cell = self._checked_cell(cell)
        if self._table.is_free(cell):
            raise CacheError(f"cell {cell} is free and has no position")
        return int(self._table.positions[cell])

    # What the faces above are made of.

    def _checked_cell(self, cell: int) -> int:
        cell = checked_int(cell, "a cell", CacheError)
        if not 0 <= cell < self.capacity:
            raise CacheError(f"there is no cell {cell}, the pool has {self.capacity}")
        return cell

    def _find(self, sequence: int) -> SequenceCells:
        found = self._sequences.get(checked_int(sequence, "a sequence", UnknownSequenceError))
        if found is None:
            raise UnknownSequenceError(f"no open sequence has the id {sequence} ({len(self._sequences)} are open)")
        return found

    def _register(self, cells: npt.NDArray[np.int32]) -> int:
        sequence = SequenceCells(self._next_id, cells)
        self._sequences[sequence.id] = sequence
        self._next_id += 1
        return sequence.id

    def _drop_from(self, sequence: SequenceCells, to: int) -> None:
        """Gives up the cells from position `to` on (at most the committed length), and any claim with them."""
        sequence.claim = None
        dropped = sequence.cells[to:]
        if dropped.size:
            sequence.keep(to)
            self._table.release(dropped)

    def _place(self, step: Step) -> Placement:
        """Claims the cells of an admitted step whose positions were checked: all of them, or none when it raises."""
        n_missing = self._table.count_missing(step.positions)
        if n_missing:
            raise StepError(
                f"the step is stale: of the {step.positions.size} cells that it needs, {n_missing} were taken since "
                f"it was declared"
            )
        claim = object()
        for extension in step.extensions:
            extension.sequence.reserve(extension.n_tokens)
        begun = []
        try:
            for extension in step.extensions:
                begun.append(extension.sequence)
                extension.sequence.claim = claim
                self._claim_cells(extension.sequence, extension.n_tokens)
            placement = self._plan(step, claim)
        except BaseException:
            for sequence in begun:
                self._drop_from(sequence, sequence.length)
            raise
        for sequence in begun:
            sequence.revision += 1
        return placement

    def _claim_cells(self, sequence: SequenceCells, n_tokens: int) -> None:
        end = sequence.n_cells + n_tokens
        while sequence.n_cells < end:
            position = sequence.n_cells
            previous = int(sequence.cells[-1]) if position else None
            cell = self._table.find_cell(position, previous)
            n = self._table.claim_from(cell, position, end - position)
            sequence.append(cell, n)

    def _visible_cells(self, extension: Extension, window: Window) -> VisibleCells:
        sequence = extension.sequence
        first_seen = max(0, window.first_seen(sequence.length))
        if self._reads is ReadKind.BY_POSITION:
            first_seen -= first_seen % self.run  # so that a position's column does not depend on the step
        return VisibleCells(
            extension.tokens,
            extension.n_tokens,
            sequence.length,
            first_seen,
            sequence.cells[first_seen:],
            sequence.stretches(first_seen),
        )

    def _plan(self, step: Step, claim: object) -> Placement:
        cells = np.empty(step.positions.size, np.int64)
        for extension in step.extensions:
            cells[extension.tokens] = extension.sequence.cells[extension.sequence.length :]
        reads = []
        for window in self._windows:
            visible = [self._visible_cells(extension, window) for extension in step.extensions]
            reads.append(PLANNERS[self._reads](window, visible, cells.size, self._geometry))
        return Placement(
            sequences=step.sequences,
            positions=step.positions.astype(np.int32),
            cells=cells,
            extent=max([read.extent for read in reads]),
            reads=tuple(reads),
            rows_read=tuple([read.n_rows for read in reads]),
            held=tuple(extension.sequence for extension in step.extensions),
            _claim=claim,
        )


def _group_by_sequence(ids: npt.NDArray[np.int64]) -> list[tuple[int, slice | npt.NDArray[np.int64], int]]:
    """(sequence, its tokens in batch order, their number) for each sequence in a step, ascending by sequence."""
    if ids.size == 1 or (ids == ids[0]).all():
        return [(int(ids[0]), slice(0, ids.size), ids.size)]
    order = np.argsort(ids, kind="stable")
    ordered = ids[order]
    if (ordered[1:] != ordered[:-1]).all():  # a token of each, as sequences decode
        return [(each, slice(at, at + 1), 1) for each, at in zip(ordered.tolist(), order.tolist(), strict=True)]
    starts = [0, *(np.flatnonzero(ordered[1:] != ordered[:-1]) + 1).tolist(), ids.size]
    groups: list[tuple[int, slice | npt.NDArray[np.int64], int]] = []
    for start, stop in pairwise(starts):
        tokens = order[start:stop]
        first, n = int(tokens[0]), stop - start
        # A slice where the tokens stand together, which is nearly always: masks are then written in place.
        together = int(tokens[-1]) - first == n - 1
        groups.append((int(ordered[start]), slice(first, first + n) if together else tokens, n))
    return groups


def _checked_window(window: int | Window) -> Window:
    if isinstance(window, Window):
        checked_option(window.size, "a window", 1 if window.is_chunked else 0)
        return window
    return Window(checked_option(window, "a window", 0))


def _checked_position(position: int, sequence: SequenceCells) -> int:
    checked = checked_int(position, "a position", PositionError)
    if not 0 <= checked <= sequence.length:
        raise PositionError(
            f"position {checked} is outside of sequence {sequence.id}, which has {sequence.length} committed positions"
        )
    return checked
