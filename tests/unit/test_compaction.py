"""Moves of the cells of one sequence, for the part of the cache that knows no tensor: plans, refusals, who keeps what."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from cell_walk import n_stretches, refused, state_of

from ggml_engine.errors import StepError, UnknownSequenceError
from ggml_engine.pool.cells import CellCache
from ggml_engine.pool.compaction import Move
from ggml_engine.pool.sequence_cache import SequenceCache


def extend(cache: CellCache, sequence: int, n: int) -> None:
    length = cache.length(sequence)
    cache.declare(np.full(n, sequence)).place(np.arange(length, length + n)).commit()


def side_by_side(cache: CellCache, n_rounds: int, n: int = 4, n_others: int = 1) -> tuple[int, ...]:
    """Sequences that grow in turns, `n` cells each: nobody's runs lie together."""
    sequences = tuple(cache.open() for _ in range(1 + n_others))
    for _ in range(n_rounds):
        for sequence in sequences:
            extend(cache, sequence, n)
    return sequences


def planned(cache: CellCache, sequence: int) -> Move:
    before = state_of(cache)
    move = cache.plan_move(sequence)
    assert move is not None
    assert state_of(cache) == before, "a plan changes nothing"
    return move


def cells_of(cache: CellCache, sequence: int) -> list[int]:
    return cache.cells_of(sequence).tolist()


def roomy() -> tuple[CellCache, int, int]:
    """Two sequences of 16 and 15 cells in every other run of 4; 96 cells are free behind them."""
    cache = CellCache(128, run=4, read_block=8)
    sequence, other = side_by_side(cache, 4)
    cache.rewind(other, 15)
    return cache, sequence, other


class TestPlans:
    def test_all_of_a_sequence_goes_to_one_stretch_with_room_behind_it(self) -> None:  # R73
        cache, sequence, _ = roomy()
        move = planned(cache, sequence)
        assert (move.begin, move.n_cells, move.n_stretches, move.n_saved) == (0, 16, 4, 3)
        assert move.old.tolist() == cells_of(cache, sequence)
        assert move.new.tolist() == list(range(32, 48))
        assert move.extent == 48
        assert move.pieces() == [(0, 32, 4), (8, 36, 4), (16, 40, 4), (24, 44, 4)]

    def test_it_lies_modulo_the_block_of_reads_as_it_would_alone(self) -> None:
        cache = CellCache(256, run=4, read_block=16)
        sequence, _, _ = side_by_side(cache, 3, n_others=2)
        assert planned(cache, sequence).new[0] == 48, "36 is the lowest free cell"

    def test_a_sequence_in_one_stretch_stays(self) -> None:
        cache = CellCache(64, run=4, read_block=8)
        sequence = cache.open()
        assert cache.plan_move(sequence) is None
        for n in (1, 3, 20):
            extend(cache, sequence, n)
            assert cache.plan_move(sequence) is None

    def test_a_place_with_room_to_go_on_is_taken_before_one_that_fits(self) -> None:
        cache = CellCache(256, run=4, read_block=4)
        sequence, other = side_by_side(cache, 4)
        gap, wall = cache.open(), cache.open()
        extend(cache, gap, 16)  # 32 to 47: as many as the sequence has
        extend(cache, wall, 4)
        cache.close(gap)
        assert planned(cache, sequence).new[0] == 52
        cache.close(other)
        filler = cache.open()
        extend(cache, filler, cache.free_cells - 16 - 12)
        assert n_stretches(planned(cache, sequence).new.tolist()) == 1

    def test_what_is_long_stays_and_what_is_broken_goes(self) -> None:
        cache = CellCache(1024, run=4, read_block=8)
        sequence = cache.open()
        extend(cache, sequence, 400)
        other = cache.open()
        for _ in range(4):
            extend(cache, other, 4)
            extend(cache, sequence, 4)
        move = planned(cache, sequence)
        assert (move.begin, move.n_cells, move.n_stretches, move.n_saved) == (400, 16, 5, 3)
        cache.apply_move(move)
        rest = planned(cache, sequence)  # then the long part, for the last stretch
        assert (rest.begin, rest.n_cells, rest.n_saved) == (0, 416, 1)

    def test_cells_right_behind_the_rest_are_taken_where_they_are_free(self) -> None:
        cache = CellCache(256, run=4, read_block=8)
        sequence = cache.open()
        extend(cache, sequence, 18)
        clone = cache.clone(sequence, 18)
        extend(cache, clone, 10)  # 18 and 19 first, then the runs behind
        extend(cache, sequence, 10)
        cache.close(clone)
        assert cells_of(cache, sequence)[17:19] != [17, 18]
        move = planned(cache, sequence)
        assert (move.begin, move.new.tolist()) == (18, list(range(18, 28)))
        cache.apply_move(move)
        assert cells_of(cache, sequence) == list(range(28))

    def test_the_longest_stretches_are_taken_where_no_single_one_is_long_enough(self) -> None:
        cache = CellCache(128, run=4, read_block=4)
        sequence, other = side_by_side(cache, 6)  # 48 cells, every other run
        parked = []
        for n in (12, 4, 12, 4, 48):  # 48 to 59 | wall | 64 to 75 | wall | the rest
            parked.append(cache.open())
            extend(cache, parked[-1], n)
        assert cache.free_cells == 0
        assert cache.plan_move(sequence) is None
        cache.close(parked[0])
        cache.close(parked[2])
        move = planned(cache, sequence)
        assert move.new.tolist() == [*range(48, 60), *range(64, 76)]
        assert (move.n_stretches, move.n_saved) == (6, 4)
        assert other in cache.open_sequences

    def test_without_room_there_is_no_move(self) -> None:
        cache = CellCache(32, run=4, read_block=8)
        sequence, other = side_by_side(cache, 4)
        assert cache.free_cells == 0
        assert cache.plan_move(sequence) is None
        cache.rewind(other, 12)  # one run is free: nothing is gained by it
        assert cache.plan_move(sequence) is None

    def test_a_sequence_with_a_step_under_way_stays(self) -> None:
        cache, sequence, _ = roomy()
        placement = cache.declare([sequence]).place([16])
        assert cache.plan_move(sequence) is None
        placement.commit()
        assert planned(cache, sequence).n_cells == 17

    def test_an_unknown_sequence_is_refused(self) -> None:
        cache, sequence, _ = roomy()
        cache.close(sequence)
        for unknown in (sequence, -1, 99, None):
            with refused(cache, UnknownSequenceError):
                cache.plan_move(unknown)  # type: ignore[arg-type]

    def test_the_only_sequence_of_the_other_layout_stays(self) -> None:
        cache = SequenceCache(64)
        sequence = cache.open()
        extend(cache, sequence, 40)
        cache.rewind(sequence, 7)
        extend(cache, sequence, 9)
        assert cache.plan_move(sequence) is None


class TestSharedCells:
    def test_what_a_clone_shares_stays_where_it_is(self) -> None:  # R63 R64
        cache = CellCache(256, run=4, read_block=8)
        sequence, _ = side_by_side(cache, 3)
        clone = cache.clone(sequence, 10)
        shared = cells_of(cache, clone)
        for _ in range(2):
            extend(cache, clone, 4)
            extend(cache, sequence, 4)
        for moved in (sequence, clone):
            move = planned(cache, moved)
            assert move.begin >= 10
            cache.apply_move(move)
            assert cells_of(cache, moved)[:10] == shared
        assert cells_of(cache, clone)[:10] == shared
        assert all(cache.owners(cell) == (sequence, clone) for cell in shared)
        assert cache.used_cells == 12 + 10 + 20 - 2

    def test_a_sequence_that_owns_nothing_alone_stays(self) -> None:
        cache, sequence, _ = roomy()
        clone = cache.clone(sequence, 16)
        assert cache.plan_move(sequence) is None
        assert cache.plan_move(clone) is None
        cache.close(sequence)
        assert planned(cache, clone).n_cells == 16


class TestAMoveThatWasMade:
    def test_the_sequence_owns_the_new_cells_and_the_old_ones_are_free(self) -> None:  # R74
        cache, sequence, other = roomy()
        move = planned(cache, sequence)
        kept, used = cells_of(cache, other), cache.used_cells
        cache.apply_move(move)
        assert cells_of(cache, sequence) == move.new.tolist()
        assert cells_of(cache, other) == kept
        assert (cache.used_cells, cache.length(sequence)) == (used, 16)
        assert all(cache.owners(int(cell)) == () for cell in move.old)
        assert all(cache.owners(int(cell)) == (sequence,) for cell in move.new)
        assert [cache.position_of(int(cell)) for cell in move.new] == list(range(16))
        assert cache.plan_move(sequence) is None

    def test_it_goes_on_right_behind_and_the_freed_cells_are_given_out(self) -> None:
        cache, sequence, _ = roomy()
        cache.apply_move(planned(cache, sequence))
        extend(cache, sequence, 6)
        assert cells_of(cache, sequence) == list(range(32, 54))
        newcomer = cache.open()
        extend(cache, newcomer, 8)
        assert cells_of(cache, newcomer) == [0, 1, 2, 3, 8, 9, 10, 11]

    def test_clones_and_rewinds_go_on_from_it(self) -> None:  # R63 R65
        cache, sequence, _ = roomy()
        cache.apply_move(planned(cache, sequence))
        free = cache.free_cells
        clone = cache.clone(sequence, 10)
        assert cache.free_cells == free
        assert cells_of(cache, clone) == list(range(32, 42))
        cache.rewind(sequence, 3)
        assert cache.free_cells == free + 6
        extend(cache, sequence, 4)
        cache.close(clone)
        cache.close(sequence)
        for other in cache.open_sequences:
            cache.close(other)
        assert cache.free_cells == cache.capacity

    def test_a_step_that_was_declared_before_can_be_placed_after_it(self) -> None:
        cache, sequence, _ = roomy()
        move, step = planned(cache, sequence), cache.declare([sequence] * 3)
        cache.apply_move(move)
        assert step.place([16, 17, 18]).cells.tolist() == [48, 49, 50]

    def test_a_placement_of_another_sequence_is_committed_after_it(self) -> None:
        cache, sequence, other = roomy()
        placement = cache.declare([other]).place([15])
        cache.apply_move(planned(cache, sequence))
        placement.commit()
        assert cache.length(other) == 16

    def test_an_id_that_a_clone_had_is_not_touched_by_it(self) -> None:  # R22 R73
        cache, sequence, _ = roomy()
        clone = cache.clone(sequence, 8)
        kept = cells_of(cache, clone)
        cache.close(sequence)
        again = cache.open()
        assert again not in (sequence, clone)
        extend(cache, again, 40)
        if (move := cache.plan_move(again)) is not None:
            cache.apply_move(move)
        assert cells_of(cache, clone) == kept


def rewound(cache: CellCache, sequence: int) -> None:
    cache.rewind(sequence, 15)


def extended(cache: CellCache, sequence: int) -> None:
    extend(cache, sequence, 1)


def rewound_and_extended(cache: CellCache, sequence: int) -> None:
    """The same cells again, with other K and V than those that were copied."""
    cells = cells_of(cache, sequence)
    cache.rewind(sequence, 15)
    extend(cache, sequence, 1)
    assert cells_of(cache, sequence) == cells


def cloned(cache: CellCache, sequence: int) -> None:
    cache.clone(sequence, 1)


def closed(cache: CellCache, sequence: int) -> None:
    cache.close(sequence)


def placed(cache: CellCache, sequence: int) -> None:
    cache.declare([sequence]).place([16])


def target_taken(cache: CellCache, sequence: int) -> None:
    other = cache.open()
    extend(cache, other, 8)


CHANGES = [rewound, extended, rewound_and_extended, cloned, closed, placed, target_taken]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_move_is_stale_once_its_sequence_or_its_cells_changed(
    change: Callable[[CellCache, int], None],
) -> None:
    cache, sequence, _ = roomy()
    move = planned(cache, sequence)
    change(cache, sequence)
    for attempt in (cache.check_move, cache.apply_move):
        with refused(cache, StepError, match="stale"):
            attempt(move)


def test_a_move_of_another_sequence_leaves_a_move_as_planned() -> None:
    cache, sequence, other = roomy()
    move = planned(cache, sequence)
    cache.rewind(other, 2)
    cache.apply_move(move)
    assert n_stretches(cells_of(cache, sequence)) == 1
