"""Moving the cells of one sequence together: which of them, and where to.

Owns: the choice of a move, as integers. A read that is one stretch of cells costs less than one in pieces.
Does not know: sequences as objects, tensors, and whether a move pays for itself (the executor weighs that).
Invariants: only cells with a single owner move, to free ones; every cell stays congruent to its position modulo the
run; the new cells ascend. A sequence shares its cells from its first position on, since only clones share: what it owns
alone is what comes last, and a move takes all of that from some position on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ggml_engine.pool.cell_table import CellTable
from ggml_engine.pool.read_plan import find_stretches

Cells = npt.NDArray[np.int64]
Piece = tuple[int, int, int]  # the first cell of a stretch before and after the move, and its number of cells

# A plan looks at the places where a sequence is broken; in one with more of them, at so many at equal distances.
_MAX_BEGINS = 32


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """Where the cells of a sequence's positions from `begin` on go. Made by `CellCache.plan_move` only.

    `old` and `new` are i64 [cells moved] in the order of positions, not to be written to; they have no cell in common.
    `n_stretches` is how many stretches of consecutive cells the sequence has, `n_saved` how many fewer it will have.
    `extent` is one past the highest new cell.
    """

    sequence: int
    begin: int
    old: Cells
    new: Cells
    n_stretches: int
    n_saved: int
    revision: int  # of the sequence when the move was planned

    @property
    def n_cells(self) -> int:
        """How many cells move."""
        return int(self.old.size)

    @property
    def extent(self) -> int:
        """One past the highest new cell."""
        return int(self.new[-1]) + 1

    def pieces(self) -> list[Piece]:
        """What can be copied at once: stretches of consecutive cells that stay consecutive."""
        breaks = (self.old[1:] - self.old[:-1] != 1) | (self.new[1:] - self.new[:-1] != 1)
        firsts = np.concatenate(([0], np.flatnonzero(breaks) + 1))
        lengths = np.diff(np.concatenate((firsts, [self.old.size])))
        return list(zip(self.old[firsts].tolist(), self.new[firsts].tolist(), lengths.tolist(), strict=True))


def plan_move(
    table: CellTable, read_block: int, sequence: int, cells: npt.NDArray[np.int32], revision: int
) -> Move | None:
    """The move that saves most stretches for each cell moved, and among such ones most; None when none saves any.

    `cells` are those of all positions of the sequence. A move that would take a sequence's long first part along for
    the sake of one stretch is left to a later plan, when the rest lies together.
    """
    where = cells.astype(np.int64)
    begins = np.concatenate(([0], np.flatnonzero(where[1:] - where[:-1] != 1) + 1))
    shared = np.flatnonzero(~table.have_one_owner(where))
    first_own = int(shared[-1]) + 1 if shared.size else 0
    if begins.size == 1 or first_own == where.size:
        return None
    free = _FreeRuns(table, read_block)
    found: tuple[int, int, Cells] | None = None  # cells moved, stretches saved, where to
    for begin in _candidates(begins, first_own):
        n_cells, n_kept = where.size - begin, int(np.searchsorted(begins, begin))
        new = free.find(begin, n_cells, int(where[begin - 1]) if begin else None)
        if new is None:
            continue
        n_after = n_kept + find_stretches(new)[0].size - int(begin > 0 and new[0] == where[begin - 1] + 1)
        n_saved = begins.size - n_after
        # ascending candidates: an equal one moves less and saves less
        if n_saved > 0 and (found is None or n_saved * found[0] > found[1] * n_cells):
            found = (n_cells, n_saved, new)
    if found is None:
        return None
    n_cells, n_saved, new = found
    old = where[where.size - n_cells :]
    for array in (old, new):
        array.setflags(write=False)
    return Move(sequence, where.size - n_cells, old, new, begins.size, n_saved, revision)


def _candidates(begins: Cells, first_own: int) -> list[int]:
    """Positions from which on cells may move, ascending."""
    later = begins[begins > first_own].tolist()
    step = -(-len(later) // _MAX_BEGINS)
    return [first_own, *(later[::step] if step else [])]


class _FreeRuns:
    """The runs that a move can go to: free to their ends, and all but the first of a stretch from their beginnings."""

    def __init__(self, table: CellTable, read_block: int) -> None:
        self._run = table.run
        self._tops = table.tops
        # A sequence that lies as it would alone modulo the block is read in as few rows as alone.
        self._runs_per_block = max(1, read_block // table.run)
        n_runs = self._tops.size
        taken = np.where(self._tops != 0, np.arange(n_runs), n_runs)
        following = np.minimum.accumulate(taken[::-1])[::-1] - np.arange(n_runs)
        self._n_free = np.concatenate((following, [0]))  # [runs + 1]: free runs from each on, without a gap

    def find(self, begin: int, n_cells: int, previous: int | None) -> Cells | None:
        """Cells for the positions from `begin` on, ascending, in as few stretches as there can be; None: no room.

        In order: right behind `previous`, the cell of the position before; one stretch above it, with room to go on for
        as long again, or for a run, or with none; such a one below; the longest stretches there are.
        """
        offset = begin % self._run
        n_runs = (begin + n_cells - 1) // self._run - begin // self._run + 1
        first = self._find_behind(offset, n_runs, previous)
        if first is None:
            above = 0 if previous is None else previous // self._run + 1
            first = self._find_stretch(begin, n_runs, above)
            if first is None:
                return self._find_pieces(offset, n_cells, n_runs, above)
        start = first * self._run + offset
        return np.arange(start, start + n_cells, dtype=np.int64)

    def _find_behind(self, offset: int, n_runs: int, previous: int | None) -> int | None:
        if previous is None:
            return None
        run = (previous + 1) // self._run
        if offset == 0:
            return run if self._n_free[run] >= n_runs else None
        return run if self._tops[run] == offset and self._n_free[run + 1] >= n_runs - 1 else None

    def _find_stretch(self, begin: int, n_runs: int, above: int) -> int | None:
        lengths = np.where(self._tops <= begin % self._run, self._n_free[1:] + 1, 0)
        runs = np.arange(lengths.size)
        aligned = np.where((runs - begin // self._run) % self._runs_per_block == 0, lengths, 0)
        for side in (slice(above, None), slice(0, above)):
            for lengths_there in (aligned[side], lengths[side]):
                for wanted in (2 * n_runs, n_runs + 1, n_runs):
                    fits = np.flatnonzero(lengths_there >= wanted)
                    if fits.size:
                        return int(runs[side][fits[0]])
        return None

    def _find_pieces(self, offset: int, n_cells: int, n_runs: int, above: int) -> Cells | None:
        starts = np.flatnonzero((self._n_free[:-1] > 0) & (np.concatenate(([0], self._n_free[:-2])) == 0))
        higher = starts[starts >= above]
        if self._n_free[higher].sum() >= n_runs:
            starts = higher
        lengths = self._n_free[starts]
        longest = np.argsort(-lengths, kind="stable")
        n_needed = int(np.searchsorted(np.cumsum(lengths[longest]), n_runs)) + 1
        if n_needed > starts.size:
            return None
        chosen = np.sort(longest[:n_needed])
        runs = np.concatenate([np.arange(s, s + n) for s, n in zip(starts[chosen], lengths[chosen], strict=True)])
        cells = (runs[:n_runs, None] * self._run + np.arange(self._run)).ravel()
        return cells[offset : offset + n_cells].astype(np.int64)
