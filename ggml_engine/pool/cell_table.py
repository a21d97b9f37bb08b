"""The table of cells: how many owners each has, and where a sequence may continue.

Owns: the count of owners and the position of every cell, and what is derived from them (used cells, free cells per
residue, the top of every run). The placement rule is here.
Does not know: sequences; it is told which cells gain or lose an owner.
Invariants: a position is only ever given a cell congruent to it modulo the run, so residues never compete: a step fits
exactly when, for each residue, it needs no more cells than are free; `count_missing` is that test, and is exact.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import CacheError


class CellTable:
    """`capacity` cells, all free, in runs of `run` (which divides the capacity)."""

    def __init__(self, capacity: int, run: int) -> None:
        self.capacity = capacity
        self.run = run
        self.n_used = 0
        # Zeroed pages are given out by the system only when they are written: a large table costs nothing until used.
        self.positions = np.zeros(capacity, np.int32)  # of used cells
        self._n_owners = np.zeros(capacity, np.int32)
        self._n_free_by_residue = np.full(run, capacity // run, np.int64)
        self._tops = np.zeros(capacity // run, np.int32)  # per run: one past the highest used offset in it, 0 if none
        # the same for single numbers, which Python gets and sets sooner than numpy does
        self._position, self._owners = self.positions.data, self._n_owners.data
        self._free_of_residue, self._top = self._n_free_by_residue.data, self._tops.data

    def is_free(self, cell: int) -> bool:
        """Whether a cell has no owner."""
        return not self._owners[cell]

    def count_missing(self, positions: npt.NDArray[np.int64]) -> int:
        """How many of these positions could get no cell; the positions may belong to several sequences."""
        if positions.size == 1:  # every decode step of one sequence
            return int(self._free_of_residue[int(positions[0]) % self.run] == 0)
        needed = np.bincount(positions % self.run, minlength=self.run)
        return int(np.maximum(needed - self._n_free_by_residue, 0).sum())

    def share(self, cells: npt.NDArray[np.int32]) -> None:
        """Gives one more owner to used cells, none of them named twice."""
        self._n_owners[cells] += 1

    def release(self, cells: npt.NDArray[np.int32]) -> None:
        """Takes one owner from used cells, none of them named twice; those without any become free."""
        self._n_owners[cells] -= 1
        freed = cells[self._n_owners[cells] == 0]
        if not freed.size:
            return
        self.n_used -= freed.size
        self._n_free_by_residue += np.bincount(freed % self.run, minlength=self.run)
        self._find_tops(freed)

    def move(self, old: npt.NDArray[np.int64], new: npt.NDArray[np.int64]) -> None:
        """Gives the positions of `old`, cells of a single owner, to free cells `new`, congruent one by one."""
        self.positions[new] = self.positions[old]
        self._n_owners[new] = 1
        self._n_owners[old] = 0
        for cells in (old, new):
            self._find_tops(cells)

    def have_one_owner(self, cells: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of these cells have exactly one owner."""
        single: npt.NDArray[np.bool_] = self._n_owners[cells] == 1
        return single

    def are_free(self, cells: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which of these cells have no owner."""
        free: npt.NDArray[np.bool_] = self._n_owners[cells] == 0
        return free

    @property
    def tops(self) -> npt.NDArray[np.int32]:
        """Per run one past the highest used offset in it, 0 for a free one; not to be written to."""
        return self._tops

    def _find_tops(self, cells: npt.NDArray[np.integer[Any]]) -> None:
        """Counts the runs of these cells anew."""
        runs = cells // self.run
        runs = runs[np.concatenate(([True], runs[1:] != runs[:-1]))]
        used = self._n_owners.reshape(-1, self.run)[runs] != 0
        self._tops[runs] = np.where(used.any(axis=1), self.run - used[:, ::-1].argmax(axis=1), 0)

    def claim_from(self, cell: int, position: int, at_most: int) -> int:
        """Takes the free `cell` for `position`, and those after it in its run while they are free; returns how many."""
        run, offset = divmod(cell, self.run)
        if at_most == 1:
            self._owners[cell] = 1
            self._position[cell] = position
            self._top[run] = max(self._top[run], offset + 1)
            self._free_of_residue[offset] -= 1
            self.n_used += 1
            return 1
        n = min(at_most, self.run - offset)
        if self._tops[run] > offset:
            n = self._count_free(cell, n)
        self._n_owners[cell : cell + n] = 1
        self.positions[cell : cell + n] = position if n == 1 else np.arange(position, position + n, dtype=np.int32)
        self._tops[run] = max(int(self._tops[run]), offset + n)
        self._n_free_by_residue[offset : offset + n] -= 1
        self.n_used += n
        return n

    def find_cell(self, position: int, previous: int | None) -> int:
        """The free cell that `position` gets, when `previous` is the cell of the position before (None for the first).

        In order: the next cell of the same run; a run above in which everything from this offset on is free, rather one
        that is wholly free (a sequence that grows in the rest of it is not cut short); such a run below; any run where
        this one cell is free, above before below, the longest stretch first. Ascending wherever possible, since kernels
        add up in the order of cells. The caller knows by `count_missing` that there is a cell.
        """
        offset = position % self.run
        if previous is not None and offset and self.is_free(previous + 1):
            return previous + 1
        above = 0 if previous is None else previous // self.run + 1
        run = self._find_open_run(offset, above)
        if run is None:
            run = self._find_broken_run(offset, above)
        return run * self.run + offset

    def _count_free(self, cell: int, n: int) -> int:
        taken = np.flatnonzero(self._n_owners[cell : cell + n])
        return int(taken[0]) if taken.size else n

    def _find_open_run(self, offset: int, above: int) -> int | None:
        """The run to take among those that are free from `offset` to their end, if there is one."""
        for first, tops in ((above, self._tops[above:]), (0, self._tops[:above])):
            for top in (0, offset):
                fits = tops <= top
                if fits.size:
                    run = int(fits.argmax())
                    if fits[run]:
                        return first + run
        return None

    def _find_broken_run(self, offset: int, above: int) -> int:
        """The run to take among those where the cell at `offset` is free and one after it is not."""
        used = self._n_owners.reshape(-1, self.run)
        runs = np.flatnonzero(used[:, offset] == 0)
        higher = runs[runs >= above]
        candidates = higher if higher.size else runs
        if not candidates.size:
            raise CacheError(f"no cell with residue {offset} is free: the step was not admitted")
        stretches = (used[candidates, offset:] != 0).argmax(axis=1)
        return int(candidates[stretches.argmax()])
