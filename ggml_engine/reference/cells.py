"""A cell cache by definition: owner bitsets, one Python loop per cell, nothing remembered that can be computed.

What `ggml_engine.pool.cells` is compared with: it states as plainly as possible which cells a step gets, who owns them
and who sees them, and shares no code with the engine. Slow on purpose. It trusts its caller: ids are given to it, and
a step is only placed after `fits` said yes; what breaks that is a CacheError.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import CacheError


class NaiveCells:
    """`owners[cell]` has bit s set when sequence s holds the cell; `held[s]` lists its cells in position order.

    `capacity` in cells is rounded up to a whole `run`. `positions[cell]` is the last position that the cell was given,
    `committed[s]` the length of s without a step that is placed and not committed.
    """

    def __init__(self, capacity: int, run: int) -> None:
        self.capacity = -(-capacity // run) * run
        self.run = run
        self.owners = [0] * self.capacity
        self.positions: list[int | None] = [None] * self.capacity
        self.held: dict[int, list[int]] = {}
        self.committed: dict[int, int] = {}
        self.n_pieces = 0  # how often a cell was taken from a run that is not free to its end

    # Lifecycle; the engine chooses the ids.

    def open(self, sequence: int) -> None:
        """A new, empty sequence of that id."""
        if sequence in self.held:
            raise CacheError(f"sequence {sequence} is open already")
        self.held[sequence] = []
        self.committed[sequence] = 0

    def clone(self, source: int, upto: int, sequence: int) -> None:
        """A new sequence that owns the first `upto` cells of `source`, too."""
        self.open(sequence)
        for cell in self.held[source][:upto]:
            self.owners[cell] |= 1 << sequence
            self.held[sequence].append(cell)
        self.committed[sequence] = upto

    def rewind(self, sequence: int, to: int) -> None:
        """Give up the cells from position `to` on."""
        for cell in self.held[sequence][to:]:
            self.owners[cell] &= ~(1 << sequence)
        del self.held[sequence][to:]
        self.committed[sequence] = min(to, self.committed[sequence])

    def close(self, sequence: int) -> None:
        """Give up all cells, and the id."""
        self.rewind(sequence, 0)
        del self.held[sequence]
        del self.committed[sequence]

    def commit(self, sequence: int) -> None:
        """Count placed cells into the sequence's length."""
        self.committed[sequence] = len(self.held[sequence])

    # Moves.

    def move(self, sequence: int, begin: int, cells: list[int]) -> None:
        """Lets the positions from `begin` on, all of them, hold these cells in place of those that they hold."""
        held = self.held[sequence]
        if len(cells) != len(held) - begin:
            raise CacheError(f"{len(cells)} cells for positions {begin} to {len(held)}")
        for position, cell in enumerate(cells, begin):
            if not self.is_free(cell) or cell % self.run != position % self.run:
                raise CacheError(f"cell {cell} cannot be position {position}")
            if self.owners[held[position]] != 1 << sequence:
                raise CacheError(f"cell {held[position]} of position {position} is shared")
        for position, cell in enumerate(cells, begin):
            self.owners[held[position]] = 0
            self.owners[cell] = 1 << sequence
            self.positions[cell] = position
            held[position] = cell

    def best_move(self, sequence: int) -> tuple[int, int] | None:
        """(cells moved, stretches saved) of the best move to one stretch whose runs are free to their ends.

        Best is the most stretches for a cell, then the most stretches; None when none saves any.
        """
        held = self.held[sequence]
        best = None
        for begin in range(len(held)):
            if any(self.owners[cell] != 1 << sequence for cell in held[begin:]):
                continue
            for first in range(begin % self.run, self.capacity, self.run):
                last = first + len(held) - begin - 1
                end = last - last % self.run + self.run
                if end > self.capacity or not all(self.is_free(cell) for cell in range(first, end)):
                    continue
                moved = [*held[:begin], *range(first, last + 1)]
                n_cells, n_saved = len(held) - begin, _n_stretches(held) - _n_stretches(moved)
                if n_saved > 0 and (best is None or (n_saved / n_cells, n_saved) > (best[1] / best[0], best[1])):
                    best = (n_cells, n_saved)
        return best

    # Admission and placement.

    def is_free(self, cell: int) -> bool:
        """Whether nobody owns the cell."""
        return self.owners[cell] == 0

    def used(self) -> int:
        """How many cells somebody owns."""
        return sum(bits != 0 for bits in self.owners)

    def fits(self, positions: list[int]) -> bool:
        """Whether there is a cell for each of these positions: congruent to it modulo the run."""
        room = [0] * self.run
        for cell in range(self.capacity):
            room[cell % self.run] += self.is_free(cell)
        for position in positions:
            room[position % self.run] -= 1
        return min(room) >= 0

    def place(self, tokens: list[int]) -> list[int]:
        """Claims a cell for every token (named by its sequence); sequences are served in ascending order."""
        cells: dict[int, list[int]] = {}
        for sequence in sorted(set(tokens)):
            cells[sequence] = [self._place_next(sequence) for _ in range(tokens.count(sequence))]
        return [cells[sequence].pop(0) for sequence in tokens]

    def _place_next(self, sequence: int) -> int:
        held = self.held[sequence]
        cell = self._choose(len(held), held[-1] if held else None)
        if not self.is_free(cell):
            raise CacheError(f"cell {cell} has an owner: the step does not fit")
        self.owners[cell] |= 1 << sequence
        self.positions[cell] = len(held)
        held.append(cell)
        return cell

    def _choose(self, position: int, previous: int | None) -> int:
        offset = position % self.run
        if previous is not None and offset and self.is_free(previous + 1):
            return previous + 1
        runs = range(self.capacity // self.run)
        above = [r for r in runs if previous is None or r > previous // self.run]
        below = [r for r in runs if r not in above]
        for side in (above, below):
            for begin in (0, offset):  # wholly free runs first
                for r in side:
                    if all(self.is_free(r * self.run + i) for i in range(begin, self.run)):
                        return r * self.run + offset
        for side in (above, below):
            stretches = {r: self._free_stretch(r, offset) for r in side}
            longest = max(stretches.values(), default=0)
            if longest:
                self.n_pieces += 1
                return min(r for r in side if stretches[r] == longest) * self.run + offset
        raise CacheError(f"no cell for position {position}: the step does not fit")

    def _free_stretch(self, r: int, offset: int) -> int:
        n = 0
        while offset + n < self.run and self.is_free(r * self.run + offset + n):
            n += 1
        return n

    # What queries see.

    def visible(self, sequence: int, position: int, window: int, is_chunked: bool = False) -> set[int]:
        """The cells that a query of `sequence` at `position` sees, by definition.

        `window` is in positions, 0 for all of them; with `is_chunked` it does not slide, but is one of chunks.
        """
        seen = set()
        for cell in range(self.capacity):
            at = self.positions[cell]
            owned = self.owners[cell] >> sequence & 1
            if not owned or at is None or at > position:
                continue
            if window == 0 or (at // window == position // window if is_chunked else at > position - window):
                seen.add(cell)
        return seen

    def mask(
        self, tokens: list[int], positions: list[int], window: int, rows: list[int], is_chunked: bool = False
    ) -> npt.NDArray[np.float64]:
        """[tokens, rows] for tokens named by their sequences: 0 where the cell of a row is seen, else -inf.

        Raises CacheError when a query sees a cell that is not among `rows`.
        """
        mask = np.full((len(tokens), len(rows)), -np.inf)
        for i, (sequence, position) in enumerate(zip(tokens, positions, strict=True)):
            seen = self.visible(sequence, position, window, is_chunked)
            if not seen <= set(rows):
                raise CacheError(f"sequence {sequence} at {position} sees cells that are not read: {seen - set(rows)}")
            for j, cell in enumerate(rows):
                if cell in seen:
                    mask[i, j] = 0
        return mask


def _n_stretches(cells: list[int]) -> int:
    return sum(i == 0 or cells[i] != cells[i - 1] + 1 for i in range(len(cells)))
