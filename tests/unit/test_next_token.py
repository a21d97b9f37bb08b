"""A step that is moved on by a token has what a step planned anew has, whatever came between."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from cell_walk import GEOMETRIES, Geometry
from hypothesis import given, settings
from hypothesis import strategies as st

from ggml_engine.errors import CacheError, StepError
from ggml_engine.pool.cell_plan import plan_cells
from ggml_engine.pool.cells import CellCache
from ggml_engine.pool.next_token import NextToken
from ggml_engine.pool.read_plan import ReadKind
from ggml_engine.pool.step import Placement

EXACT = [Geometry(g.capacity, g.run, g.read_block, g.windows, ReadKind.EXACT) for g in GEOMETRIES if g.run > 1]


def placed(cache: CellCache, tokens: Sequence[int]) -> Placement:
    step = cache.declare(np.array(tokens))
    return step.place(step.positions)


def next_of(cache: CellCache, placement: Placement) -> NextToken:
    return cache.next_token(placement, [plan_cells(read, 8) for read in placement.reads])


def inputs_of(step: Placement | NextToken) -> tuple[object, ...]:
    """All that a graph is filled with, and what is counted."""
    plans = step.plans if isinstance(step, NextToken) else [plan_cells(read, 8) for read in step.reads]
    numbers = [(plan.numbers.tolist(), plan.capacity) for plan in plans]
    return step.positions.tolist(), step.cells.tolist(), numbers, step.n_rows


def books_of(cache: CellCache) -> tuple[object, ...]:
    table = cache._table
    positions = np.where(table._n_owners != 0, table.positions, 0)
    arrays = [each.tobytes() for each in (positions, table._n_owners, table._n_free_by_residue, table._tops)]
    sequences = [(s.id, s.length, s.n_cells, s.cells.tolist(), s.stretches(0)) for s in cache._sequences.values() if
                 s.n_cells]  # fmt: skip
    return table.n_used, arrays, sequences


class Pair:
    """The same commands for two caches, of which one moves steps on wherever it can."""

    def __init__(self, geometry: Geometry, seed: int) -> None:
        self.moving, self.plain = geometry.build(), geometry.build()
        self.random = random.Random(seed)
        self.kept: NextToken | None = None
        self.n_moved = 0

    def both(self, name: str, *arguments: int) -> object:
        found = []
        for cache in (self.moving, self.plain):
            try:
                found.append(getattr(cache, name)(*arguments))
            except CacheError as error:
                found.append(type(error))
        assert found[0] == found[1]
        return found[0]

    def step(self, tokens: list[int], *, commits: bool) -> None:
        kept, self.kept = self.kept, None
        try:
            expected = placed(self.plain, tokens)
        except CacheError:
            assert kept is None or tokens != [kept.sequence] or not kept.move_on()
            return
        step: Placement | NextToken
        if kept is not None and tokens == [kept.sequence] and kept.move_on():
            step = kept
            self.n_moved += 1
        else:
            step = placed(self.moving, tokens)
        assert inputs_of(step) == inputs_of(expected)
        assert books_of(self.moving) == books_of(self.plain)
        if not commits:
            sequence = self.random.choice(tokens)
            self.both("rewind", sequence, self.random.randint(0, self.plain.length(sequence)))
            for each in set(tokens) - {sequence}:
                self.both("rewind", each, self.plain.length(each))
            with pytest.raises(StepError):
                step.commit()
            return
        for each in (step, expected):
            each.commit()
        if isinstance(step, NextToken):
            self.kept = step
        elif len(tokens) == 1:
            self.kept = next_of(self.moving, step)

    def command(self) -> None:
        chance = self.random.random()
        sequences = self.plain.open_sequences
        if not sequences or chance < 0.04:
            self.both("open")
            return
        sequence = self.kept.sequence if self.kept is not None and chance < 0.8 else self.random.choice(sequences)
        if sequence not in sequences:
            sequence = self.random.choice(sequences)
        length = self.plain.length(sequence)
        if chance < 0.72:
            self.step([sequence], commits=self.random.random() < 0.95)
        elif chance < 0.78:
            self.step([sequence] * self.random.randint(1, 5), commits=True)
        elif chance < 0.82:
            self.step(self.random.sample(sequences, min(2, len(sequences))), commits=True)
        elif chance < 0.9:
            self.both("rewind", sequence, self.random.randint(max(0, length - 6), length))
        elif chance < 0.95:
            self.both("clone", sequence, self.random.randint(0, length))
        else:
            self.both("close", sequence)
        assert books_of(self.moving) == books_of(self.plain)


@given(geometry=st.sampled_from(EXACT), seed=st.integers(0, 2**32))
@settings(max_examples=120, deadline=None)
def test_moved_on_steps_and_planned_ones_are_the_same_over_random_histories(geometry: Geometry, seed: int) -> None:
    pair = Pair(geometry, seed)
    for _ in range(60):
        pair.command()


def test_the_histories_do_move_steps_on() -> None:
    for geometry in EXACT:
        pair = Pair(geometry, 5)
        for _ in range(300):
            pair.command()
        sees_itself_alone = 1 in geometry.windows  # such a window loses its only span with every token
        assert (pair.n_moved == 0) if sees_itself_alone else (pair.n_moved > 30), geometry


def decoding(cache: CellCache, n: int) -> NextToken:
    sequence = cache.open()
    if n > 1:
        placed(cache, [sequence] * (n - 1)).commit()
    placement = placed(cache, [sequence])
    placement.commit()
    return next_of(cache, placement)


def cells(windows: tuple[int, ...] = (0,)) -> CellCache:
    return CellCache(1024, windows, run=64, read_block=64, reads=ReadKind.EXACT)


def test_a_sequence_moves_on_to_the_end_of_its_run() -> None:
    kept = decoding(cells(), 60)
    for position in (60, 61, 62, 63):
        assert kept.move_on()
        assert kept.positions.tolist() == kept.cells.tolist() == [position]
        kept.commit()
    assert not kept.move_on()


def test_it_is_planned_anew_where_a_clone_took_the_next_cell() -> None:
    cache = cells()
    kept = decoding(cache, 10)
    clone = cache.clone(kept.sequence, 10)
    placed(cache, [clone]).commit()
    assert not kept.move_on()
    assert placed(cache, [kept.sequence]).cells.tolist() != [10]


def test_it_is_planned_anew_where_its_cells_were_moved() -> None:
    cache = cells()
    stranger = cache.open()
    placed(cache, [stranger] * 64).commit()
    kept = decoding(cache, 70)  # 64 cells after the stranger's, and 6 after those
    cache.close(stranger)
    other = cache.open()
    placed(cache, [other] * 10).commit()
    sequence = kept.sequence
    cache.rewind(sequence, 64)  # a break is made by what others take
    blocker = cache.open()
    placed(cache, [blocker] * 70).commit()
    placement = placed(cache, [sequence])
    placement.commit()
    kept = next_of(cache, placement)
    cache.close(blocker)
    cache.close(other)
    move = cache.plan_move(sequence)
    assert move is not None
    cache.apply_move(move)
    assert not kept.move_on()


def test_a_window_that_loses_its_first_span_is_planned_anew() -> None:
    kept = decoding(cells((1,)), 10)
    assert not kept.move_on()
    kept = decoding(cells((3, 0)), 10)
    assert kept.move_on()
    assert [plan.numbers.tolist()[9:] for plan in kept.plans] == [[8, 3, 8, 0, 1], [0, 11, 0, 0, 1]]
