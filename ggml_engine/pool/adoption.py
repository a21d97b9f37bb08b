"""Cells for sequences that come from outside, shared among them as their tables say.

Owns: which tables sequences of a cell cache can have, and the claim on their cells until K and V are there.
Does not know: tensors, and where the rows come from.
Invariants: a row has one position and one row before it, so what sequences share they share from their first position
on, as clones do; every row has a cell of its own, congruent to its position modulo the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import InputError, PoolFullError
from ggml_engine.pool.cells import CellCache


@dataclass(frozen=True, slots=True, eq=False)
class Adoption:
    """Sequences whose cells are taken: of length 0, and in no step, until they are committed.

    `cells` i64 [rows] is the cell of every row; `extent` is one past the highest of them.
    """

    sequences: tuple[int, ...]
    cells: npt.NDArray[np.int64]
    _cache: CellCache

    @property
    def extent(self) -> int:
        """One past the highest cell; 0 where there is none."""
        return int(self.cells.max()) + 1 if self.cells.size else 0

    def commit(self) -> None:
        """Let the sequences have all their positions. Raises UnknownSequenceError when one was closed since."""
        found = [self._cache._find(sequence) for sequence in self.sequences]
        for sequence in found:
            sequence.length = sequence.n_cells
            sequence.claim = None
            sequence.revision += 1


def positions_of_rows(tables: Sequence[npt.NDArray[np.int64]], n_rows: int) -> npt.NDArray[np.int64]:
    """The position of every row, i64 [rows]. Raises InputError for tables that no sequences of a cache can have."""
    positions = np.full(n_rows, -1, np.int64)
    before = np.full(n_rows, -2, np.int64)  # the row of the position before; -1 for none
    for table in tables:
        if table.size and not 0 <= table.min() <= table.max() < n_rows:
            raise InputError(f"a table names rows {table.min()} to {table.max()}, there are {n_rows}")
        previous = np.concatenate(([-1], table[:-1]))[: table.size]
        place = np.arange(table.size)
        is_seen = positions[table] >= 0
        if (positions[table[is_seen]] != place[is_seen]).any() or (before[table[is_seen]] != previous[is_seen]).any():
            raise InputError("a row is shared by sequences that are not the same up to it")
        positions[table] = place
        before[table] = previous
        if (positions[table] != place).any():
            raise InputError("a table names a row twice")
    if (positions < 0).any():
        raise InputError(f"{np.count_nonzero(positions < 0)} of {n_rows} rows belong to no sequence")
    return positions


def adopt(cache: CellCache, tables: Sequence[npt.NDArray[np.int64]], n_rows: int) -> Adoption:
    """Opens a sequence for each table and takes a cell for each row, or does nothing when it raises.

    Raises InputError as `positions_of_rows`, PoolFullError, and CacheError where the cache has no room for sequences.
    """
    positions = positions_of_rows(tables, n_rows)
    n_missing = cache._table.count_missing(positions)
    if n_missing:
        raise PoolFullError(n_rows, n_rows - n_missing, cache.capacity, "what is loaded")
    cells = np.full(n_rows, -1, np.int64)
    claim = object()
    opened: list[int] = []
    try:
        for table in tables:
            opened.append(cache.open())
            found = cache._find(opened[-1])
            found.claim = claim
            known = cells[table]
            shared = known[known >= 0].astype(np.int32)  # the first ones, see `positions_of_rows`
            found.reserve(table.size)
            cache._table.share(shared)
            found.begin_with(shared)
            cache._claim_cells(found, table.size - shared.size)
            cells[table] = found.cells
    except BaseException:
        for sequence in opened:
            cache.close(sequence)
        raise
    return Adoption(tuple(opened), cells, cache)
