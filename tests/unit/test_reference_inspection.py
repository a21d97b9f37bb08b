"""Rows and masks of a placement, and the naive cells' refusals. How both agree over random walks is in test_cell_walks."""

from __future__ import annotations

import numpy as np
import pytest

from ggml_engine.errors import CacheError
from ggml_engine.pool.cells import CellCache
from ggml_engine.reference.cells import NaiveCells
from ggml_engine.reference.inspection import mask_of, rows_of


def test_rows_and_mask_say_which_cells_each_token_sees() -> None:
    cache = CellCache(8, (0, 2), run=1, read_block=1)
    first, second = cache.open(), cache.open()
    step = cache.declare([first, second, first, first])
    placement = step.place(step.positions)
    whole, windowed = placement.reads
    cells = {sequence: cache.cells_of(sequence).tolist() for sequence in (first, second)}
    assert sorted(rows_of(whole)) == sorted(cells[first] + cells[second])
    seen = [rows_of(whole)[row == 0].tolist() for row in mask_of(whole)]
    assert seen == [cells[first][:1], cells[second], cells[first][:2], cells[first]]
    assert rows_of(windowed)[mask_of(windowed)[3] == 0].tolist() == cells[first][1:]
    assert set(np.unique(mask_of(whole))) == {0.0, -np.inf}


def test_naive_cells_refuse_what_they_trust_their_caller_not_to_do() -> None:
    cells = NaiveCells(3, 2)
    assert cells.capacity == 4
    cells.open(0)
    with pytest.raises(CacheError, match="open already"):
        cells.open(0)
    assert cells.place([0] * 4) == [0, 1, 2, 3]
    assert not cells.fits([4])
    with pytest.raises(CacheError, match="position 4"):
        cells.place([0])
    with pytest.raises(CacheError, match="not read"):
        cells.mask([0], [3], 0, [0, 1])


def test_naive_cells_share_by_a_bit_per_owner() -> None:
    cells = NaiveCells(4, 2)
    cells.open(0)
    cells.place([0, 0, 0])
    cells.commit(0)
    cells.clone(0, 2, 5)
    assert cells.owners == [0b100001, 0b100001, 1, 0]
    cells.close(0)
    assert cells.owners == [0b100000, 0b100000, 0, 0]
    assert (cells.used(), cells.visible(5, 1, 0), cells.visible(5, 1, 1)) == (2, {0, 1}, {1})
