"""`SequenceCells`: the cells of one sequence, in position order.

Does not know: other sequences, who else owns a cell, which cells are free.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from ggml_engine.pool.read_plan import Stretch


class SequenceCells:
    """A sequence's own cells in position order; those from `length` on are claimed by `claim`, not committed."""

    __slots__ = ("_breaks", "_table", "claim", "id", "length", "n_cells", "revision")

    def __init__(self, sequence_id: int, table: npt.NDArray[np.int32]) -> None:
        self.id = sequence_id
        self._table = table
        self._breaks: list[int] = []  # positions whose cell does not follow that of the position before
        self.n_cells = table.size
        self.length = table.size
        self.find_breaks(0)
        self.claim: object | None = None
        self.revision = 0  # changes whenever a step declared before can no longer be placed

    @property
    def cells(self) -> npt.NDArray[np.int32]:
        return self._table[: self.n_cells]

    @property
    def last_cell(self) -> int:
        """The cell of its last position; it has one."""
        return self._table.item(self.n_cells - 1)

    def reserve(self, n: int) -> None:
        """Makes room for `n` more cells; doubling keeps the cost of a decoded token constant."""
        needed = self.n_cells + n
        if needed > self._table.size:
            table = np.empty(max(needed, 2 * self._table.size, 64), np.int32)
            table[: self.n_cells] = self.cells
            self._table = table

    def begin_with(self, cells: npt.NDArray[np.int32]) -> None:
        """Makes these its first cells; it has none, and room was reserved."""
        self._table[: cells.size] = cells
        self.n_cells = cells.size
        self.find_breaks(0)

    def append(self, cell: int, n: int) -> None:
        """Adds the cells `cell`, `cell + 1`, ...; room was reserved."""
        if self.n_cells and cell != self._table[self.n_cells - 1] + 1:
            self._breaks.append(self.n_cells)
        self._table[self.n_cells : self.n_cells + n] = cell if n == 1 else np.arange(cell, cell + n, dtype=np.int32)
        self.n_cells += n

    def keep(self, n: int) -> None:
        """Forgets all but the first `n` cells, which are committed."""
        self.n_cells = self.length = n
        while self._breaks and self._breaks[-1] >= n:
            self._breaks.pop()

    def find_breaks(self, begin: int) -> None:
        """Looks for breaks from position `begin` on, where cells were changed."""
        del self._breaks[bisect_left(self._breaks, begin) :]
        cells = self.cells[max(begin - 1, 0) :]
        found = np.flatnonzero(cells[1:] != cells[:-1] + 1) + max(begin, 1)
        self._breaks += found.tolist()

    def stretches(self, begin: int) -> list[Stretch]:
        """Its cells from position `begin` on, those that follow each other together."""
        if not self._breaks or self._breaks[-1] <= begin:
            return [Stretch(int(self._table[begin]), self.n_cells - begin, begin)]
        borders = [begin, *self._breaks[bisect_right(self._breaks, begin) :], self.n_cells]
        return [Stretch(int(self._table[first]), last - first, first) for first, last in pairwise(borders)]
