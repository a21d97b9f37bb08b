"""Cells for sequences that come from outside: shared as their tables say, and taken whole or not at all."""

from __future__ import annotations

import numpy as np
import pytest
from cell_walk import state_of

from ggml_engine.errors import CacheError, InputError, PoolFullError, StepError, UnknownSequenceError
from ggml_engine.pool.adoption import adopt
from ggml_engine.pool.cells import CellCache
from ggml_engine.pool.sequence_cache import SequenceCache

TABLES = [[0, 1, 2, 3, 4, 5], [0, 1, 2, 6, 7, 8], [0, 1, 2, 3], [], [9, 10]]


def arrays(tables: list[list[int]]) -> list[np.ndarray]:
    return [np.array(table, np.int64) for table in tables]


def grown(cache: CellCache, sequence: int, n: int) -> None:
    step = cache.declare([sequence] * n)
    step.place(step.positions).commit()


@pytest.mark.parametrize("run", [1, 4])
def test_sequences_share_what_their_tables_share(run: int) -> None:
    cache = CellCache(48, run=run, read_block=8)
    live = cache.open()
    grown(cache, live, 3)
    adoption = adopt(cache, arrays(TABLES), 11)
    assert cache.used_cells == 3 + 11
    assert [cache.length(each) for each in adoption.sequences] == [0] * 5
    adoption.commit()
    assert [cache.length(each) for each in adoption.sequences] == [6, 6, 4, 0, 2]
    for sequence, table in zip(adoption.sequences, TABLES, strict=True):
        cells = cache.cells_of(sequence)
        assert cells.tolist() == adoption.cells[table].tolist()
        assert [int(cell) % run for cell in cells] == [p % run for p in range(len(table))]
        assert [cache.position_of(int(cell)) for cell in cells] == list(range(len(table)))
    assert len(cache.owners(int(adoption.cells[0]))) == 3
    assert adoption.extent == adoption.cells.max() + 1
    for sequence in (*adoption.sequences, live):
        grown(cache, sequence, 2)
        cache.rewind(sequence, 1)
        cache.close(sequence)
    assert cache.free_cells == cache.capacity


def test_they_lie_as_a_sequence_and_its_clones_would() -> None:
    cache, other = CellCache(512), CellCache(512)
    first = cache.open()
    grown(cache, first, 100)
    second = cache.clone(first, 70)
    grown(cache, second, 40)
    tables = [np.arange(100), np.concatenate((np.arange(70), np.arange(100, 140)))]
    adoption = adopt(other, tables, 140)
    for there, here in zip((first, second), adoption.sequences, strict=True):
        assert other.cells_of(here).tolist() == cache.cells_of(there).tolist()


def test_what_is_not_committed_is_in_no_step_and_can_be_closed() -> None:
    cache = CellCache(48, run=4, read_block=8)
    adoption = adopt(cache, arrays(TABLES), 11)
    with pytest.raises(StepError, match="not committed"):
        cache.declare([adoption.sequences[0]])
    for sequence in adoption.sequences:
        cache.close(sequence)
    assert cache.free_cells == cache.capacity
    with pytest.raises(UnknownSequenceError):
        adoption.commit()


BAD = {
    "a row beyond": ([[0, 1, 3]], 3),
    "a negative row": ([[0, -1]], 2),
    "twice in one": ([[0, 1, 0]], 2),
    "at two positions": ([[0, 1, 2], [1, 2]], 3),
    "after another row": ([[0, 1, 2], [3, 1, 2]], 4),
    "in the middle": ([[0, 1, 2], [3, 4, 2]], 5),
    "of nobody": ([[0, 1]], 3),
    "without sequences": ([], 1),
}


@pytest.mark.parametrize(("tables", "n_rows"), BAD.values(), ids=BAD)
def test_tables_that_no_sequences_have_change_nothing(tables: list[list[int]], n_rows: int) -> None:
    cache = CellCache(48, run=4, read_block=8)
    grown(cache, cache.open(), 5)
    before = state_of(cache)
    with pytest.raises(InputError):
        adopt(cache, arrays(tables), n_rows)
    assert state_of(cache) == before


def test_too_few_cells_change_nothing() -> None:
    cache = CellCache(12, run=4, read_block=8)
    for _ in range(3):
        grown(cache, cache.open(), 1)
    before = state_of(cache)
    with pytest.raises(PoolFullError, match="needs 5 more cells, 3 of 12 can be had"):
        adopt(cache, [np.arange(5)], 5)  # there are nine, but none for positions 0 and 4
    assert state_of(cache) == before


def test_a_cache_of_one_sequence_takes_one() -> None:
    cache = SequenceCache(16)
    with pytest.raises(CacheError, match="holds one sequence"):
        adopt(cache, arrays([[0, 1], [0, 2]]), 3)
    assert cache.free_cells == 16
    assert cache.open_sequences == ()
    adoption = adopt(cache, [np.arange(5)], 5)
    adoption.commit()
    assert cache.cells_of(adoption.sequences[0]).tolist() == list(range(5))
    with pytest.raises(CacheError, match="holds one sequence"):
        adopt(cache, [np.arange(2)], 2)
