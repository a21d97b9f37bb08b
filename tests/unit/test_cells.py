"""Rules R63-R74 of the contract, and the sizes of issue B, for the part of the cache that knows no tensor."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from cell_walk import mask_of, refused, state_of

from ggml_engine.errors import (
    CacheError,
    OptionError,
    PoolFullError,
    PositionError,
    StepError,
    UnknownSequenceError,
)
from ggml_engine.pool import cells
from ggml_engine.pool.cell_table import CellTable
from ggml_engine.pool.cells import BatchControl, CellCache
from ggml_engine.pool.read_plan import ReadKind
from ggml_engine.pool.step import Placement
from ggml_engine.pool.window import Window


def place(cache: CellCache, tokens: list[int]) -> Placement:
    """Places the next positions of each token's sequence."""
    following = {sequence: cache.length(sequence) for sequence in tokens}
    positions = []
    for sequence in tokens:
        positions.append(following[sequence])
        following[sequence] += 1
    return cache.declare(np.array(tokens, np.int32)).place(np.array(positions, np.int32))


def extend(cache: CellCache, sequence: int, n: int) -> Placement:
    placement = place(cache, [sequence] * n)
    placement.commit()
    return placement


def opened(cache: CellCache, n: int = 0) -> int:
    sequence = cache.open()
    if n:
        extend(cache, sequence, n)
    return sequence


class TestConstruction:
    @pytest.mark.parametrize(
        ("capacity", "options"),
        [
            (0, {}),
            (-1, {}),
            (True, {}),
            (64.0, {}),
            ("64", {}),
            (None, {}),
            (64, {"windows": ()}),
            (64, {"windows": (0, 0)}),
            (64, {"windows": (4, 0, 4)}),
            (64, {"windows": (-1,)}),
            (64, {"windows": (False,)}),
            (64, {"windows": (4.0,)}),
            (64, {"windows": (Window(-1),)}),
            (64, {"windows": (Window(4.0),)}),  # type: ignore[arg-type]
            (64, {"windows": (Window(0, True),)}),
            (64, {"windows": (4, Window(4))}),
            (64, {"run": 0}),
            (64, {"run": -64}),
            (64, {"read_block": 0}),
            (64, {"read_block": True}),
            (64, {"run": 64, "read_block": 96}),
        ],
    )
    def test_impossible_options_are_refused(self, capacity: int, options: dict[str, object]) -> None:
        with pytest.raises(OptionError):
            CellCache(capacity, **options)  # type: ignore[arg-type]

    @pytest.mark.parametrize("capacity", [2**31, 2**50, 2**31 - 1])
    def test_a_capacity_that_no_row_index_reaches_is_refused_before_anything_is_allocated(
        self, capacity: int
    ) -> None:  # R50
        tracemalloc.start()
        try:
            with pytest.raises(OptionError, match=str(capacity)):
                CellCache(capacity)
            assert tracemalloc.get_traced_memory()[1] < 2**20
        finally:
            tracemalloc.stop()

    @pytest.mark.parametrize(("asked", "run", "given"), [(1, 64, 64), (64, 64, 64), (65, 64, 128), (7, 1, 7)])
    def test_the_capacity_is_rounded_up_to_a_whole_run(self, asked: int, run: int, given: int) -> None:  # R73
        cache = CellCache(asked, run=run)
        assert (cache.capacity, cache.free_cells, cache.used_cells) == (given, given, 0)

    def test_every_cell_of_the_capacity_can_be_used(self) -> None:
        cache = CellCache(130)
        opened(cache, 192)
        assert (cache.free_cells, cache.used_cells) == (0, 192)

    def test_it_has_the_face_that_the_control_plane_uses(self) -> None:
        face: BatchControl = CellCache(64)
        names = [name for name in vars(BatchControl) if not name.startswith("_")]
        assert len(names) == 9
        assert all(hasattr(face, name) for name in names)

    def test_the_import_loads_nothing_native(self) -> None:
        code = (
            "import sys, ggml_engine.pool.cells\n"
            "native = ('cffi', '_cffi_backend', 'llama_cpp', 'ggml_engine.ggml', 'gguf')\n"
            "sys.exit(', '.join(name for name in native if name in sys.modules) or 0)"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr


class TestClone:
    def test_a_clone_shares_cells_and_takes_none(self) -> None:  # R63
        cache = CellCache(256)
        source = opened(cache, 100)
        free = cache.free_cells
        child = cache.clone(source, 80)
        assert cache.free_cells == free
        assert cache.length(child) == 80
        assert cache.cells_of(child).tolist() == cache.cells_of(source)[:80].tolist()
        assert cache.owners(79) == (source, child)
        assert cache.owners(80) == (source,)

    def test_a_clone_needs_no_free_cell(self) -> None:  # R63
        cache = CellCache(64)
        source = opened(cache, 64)
        assert cache.length(cache.clone(source, 64)) == 64

    @pytest.mark.parametrize("upto", [0, 1, 63, 64, 65, 100])
    def test_a_clone_stands_at_any_committed_position(self, upto: int) -> None:
        cache = CellCache(256)
        child = cache.clone(opened(cache, 100), upto)
        assert extend(cache, child, 1).positions.tolist() == [upto]

    def test_a_cell_is_free_only_when_its_last_owner_is_gone(self) -> None:  # R64
        cache = CellCache(256)
        source = opened(cache, 100)
        child = cache.clone(source, 80)
        grandchild = cache.clone(child, 10)
        cache.close(source)
        assert (cache.used_cells, cache.owners(5)) == (80, (child, grandchild))
        cache.close(child)
        assert cache.used_cells == 10
        cache.close(grandchild)
        assert cache.free_cells == cache.capacity

    def test_a_source_and_its_clone_write_to_cells_of_their_own(self) -> None:  # R64
        cache = CellCache(512)
        source = opened(cache, 100)
        child = cache.clone(source, 100)
        first, second = extend(cache, child, 1), extend(cache, source, 1)
        assert first.cells[0] != second.cells[0]
        assert cache.owners(int(first.cells[0])) == (child,)
        assert cache.owners(int(second.cells[0])) == (source,)

    def test_a_prefix_outlives_a_rewind_of_its_source(self) -> None:
        cache = CellCache(256)
        source = opened(cache, 100)
        child = cache.clone(source, 80)
        kept = cache.cells_of(child).tolist()
        cache.rewind(source, 10)
        assert cache.used_cells == 80
        written = extend(cache, source, 30).cells.tolist()
        assert not set(written) & set(kept)
        assert cache.cells_of(child).tolist() == kept

    def test_closing_and_opening_again_cannot_touch_a_clone(self) -> None:  # R73 R22
        cache = CellCache(256)
        for _ in range(3):
            cache.open()
        source = opened(cache, 70)
        assert source == 3
        child = cache.clone(source, 70)
        kept = cache.cells_of(child).tolist()
        cache.close(source)
        again = opened(cache, 100)
        assert again not in (source, child)
        assert cache.cells_of(child).tolist() == kept
        assert not set(cache.cells_of(again).tolist()) & set(kept)

    def test_an_id_is_never_issued_twice(self) -> None:  # R22
        cache = CellCache(64)
        ids = []
        for _ in range(500):
            ids += [cache.open(), cache.clone(ids[-1] if ids else cache.open(), 0)]
            cache.close(ids[-2])
        assert len(set(ids)) == 1000

    @pytest.mark.parametrize("upto", [-1, 6, 2**63, True, 3.0, "3", None])
    def test_a_boundary_outside_of_what_is_committed_is_refused(self, upto: object) -> None:
        cache = CellCache(64)
        source = opened(cache, 5)
        place(cache, [source])  # claimed, not committed: not a boundary
        with refused(cache, PositionError):
            cache.clone(source, upto)  # type: ignore[arg-type]

    def test_numpy_integers_are_integers(self) -> None:
        cache = CellCache(64)
        source = opened(cache, 5)
        assert cache.length(cache.clone(np.int32(source), np.int64(4))) == 4  # type: ignore[arg-type]


class TestUnknownSequences:
    @pytest.mark.parametrize("sequence", [-1, 2, 2**70, True, 0.0, "0", None])
    def test_every_call_refuses_them(self, sequence: object) -> None:
        cache = CellCache(64)
        opened(cache, 3)
        cache.close(cache.open())
        calls = (
            lambda: cache.close(sequence),  # type: ignore[arg-type]
            lambda: cache.clone(sequence, 0),  # type: ignore[arg-type]
            lambda: cache.rewind(sequence, 0),  # type: ignore[arg-type]
            lambda: cache.length(sequence),  # type: ignore[arg-type]
            lambda: cache.cells_of(sequence),  # type: ignore[arg-type]
        )
        for call in calls:
            with refused(cache, UnknownSequenceError):
                call()

    def test_a_closed_one_is_unknown(self) -> None:
        cache = CellCache(64)
        sequence = opened(cache, 3)
        cache.close(sequence)
        for call in (cache.close, cache.length, cache.cells_of):
            with refused(cache, UnknownSequenceError, match=f"id {sequence}"):
                call(sequence)
        with refused(cache, UnknownSequenceError):
            cache.declare([sequence])
        with refused(cache, UnknownSequenceError):
            cache.can_extend(1, sequence)


class TestRewind:
    def test_history_outside_of_the_window_is_kept_and_comes_back(self) -> None:  # R65
        cache, cold = CellCache(64, windows=(4,)), CellCache(64, windows=(4,))
        sequence, fresh = opened(cache, 20), opened(cold, 6)
        cache.rewind(sequence, 6)
        again, reference = extend(cache, sequence, 1), extend(cold, fresh, 1)
        assert again.cells.tolist() == reference.cells.tolist()
        assert again.reads[0].spans == reference.reads[0].spans
        assert np.array_equal(mask_of(again), mask_of(reference))

    def test_cells_of_others_stay_and_own_cells_go(self) -> None:  # R104
        cache = CellCache(256)
        source = opened(cache, 100)
        cache.clone(source, 60)
        cache.rewind(source, 20)
        assert cache.used_cells == 60

    @pytest.mark.parametrize("to", [-1, 6, 2**63, True, 3.0, "3", None])
    def test_a_position_outside_of_what_is_committed_is_refused(self, to: object) -> None:  # R101
        cache = CellCache(64)
        sequence = opened(cache, 5)
        place(cache, [sequence])
        with refused(cache, PositionError):
            cache.rewind(sequence, to)  # type: ignore[arg-type]


class TestSteps:
    def test_declaring_changes_nothing(self) -> None:  # R67
        cache = CellCache(64)
        sequence = cache.open()
        before = state_of(cache)
        cache.declare([sequence] * 64)
        assert state_of(cache) == before

    @pytest.mark.parametrize(
        "sequences",
        [[], [[0]], [0.0], [True], ["0"], [None], [2**70], [[0], [0, 0]], 0, None, np.zeros((1, 1), np.int32)],
    )
    def test_a_step_that_is_no_list_of_sequences_is_refused(self, sequences: object) -> None:  # R67
        cache = CellCache(64)
        cache.open()
        with refused(cache, StepError):
            cache.declare(sequences)  # type: ignore[arg-type]

    @pytest.mark.parametrize("position", [4, 6, 0, -1, 2**40])
    def test_a_position_that_does_not_continue_its_sequence_is_refused(self, position: int) -> None:  # R68
        cache = CellCache(64)
        sequence = opened(cache, 5)
        step = cache.declare([sequence])
        with refused(cache, PositionError, match=f"position {position}, its sequence continues at 5"):
            step.place([position])
        assert step.place([5]).cells.tolist() == [5]

    @pytest.mark.parametrize(
        "positions", [[], [0], [0, 1, 2], [1, 0], [0, 0], [0.0, 1.0], [[0, 1]], [False, True], None]
    )
    def test_positions_of_another_shape_or_order_are_refused(self, positions: object) -> None:  # R68
        cache = CellCache(64)
        step = cache.declare([cache.open()] * 2)
        with refused(cache, PositionError):
            step.place(positions)  # type: ignore[arg-type]

    def test_one_wrong_position_refuses_the_whole_batch(self) -> None:  # R68 R73
        cache = CellCache(256)
        a, b = opened(cache, 3), opened(cache, 70)
        with refused(cache, PositionError, match=f"token 2 .sequence {b}. was given position 71"):
            cache.declare([a, a, b]).place([3, 4, 71])

    def test_a_step_is_placed_once(self) -> None:  # R67
        cache = CellCache(64)
        sequence = cache.open()
        step = cache.declare([sequence])
        step.place([0]).commit()
        for positions in ([0], [1]):
            with refused(cache, StepError, match="placed before"):
                step.place(positions)

    @pytest.mark.parametrize(
        "change", ["close", "close_empty", "rewind", "rewind_and_return", "place", "claim", "fail"]
    )
    def test_a_step_is_stale_once_a_sequence_of_it_has_changed(self, change: str) -> None:  # R67
        cache = CellCache(256)
        a, b = opened(cache, 3), opened(cache, 0 if change == "close_empty" else 5)
        step = cache.declare([a, b])
        if change.startswith("close"):
            cache.close(b)
        elif change.startswith("rewind"):
            cache.rewind(b, 2)
            if change == "rewind_and_return":
                extend(cache, b, 3)
        elif change == "place":
            extend(cache, b, 1)
        else:
            place(cache, [b])
            if change == "fail":
                cache.rewind(b, 5)
        with refused(cache, StepError, match=f"sequence {b} has changed"):
            step.place([3, 5])

    def test_a_step_is_stale_once_its_cells_were_taken(self) -> None:
        cache = CellCache(64)
        a, b = cache.open(), cache.open()
        step = cache.declare([a] * 40)
        extend(cache, b, 30)
        with refused(cache, StepError, match=r"40 cells .*, 30 were taken"):
            step.place(np.arange(40))

    def test_what_does_not_concern_a_step_leaves_it_good(self) -> None:
        cache = CellCache(256)
        a, b = opened(cache, 3), opened(cache, 5)
        step = cache.declare([a])
        extend(cache, b, 10)
        cache.close(b)
        cache.clone(a, 3)
        cache.rewind(a, 3)
        assert step.place([3]).cells.tolist() == [3]

    def test_a_step_that_fails_after_placement_leaves_its_cells_claimed_and_nothing_more(self) -> None:  # R69
        cache = CellCache(256)
        a, b = opened(cache, 3), opened(cache, 5)
        used = cache.used_cells
        place(cache, [a, a, b])
        assert cache.used_cells == used + 3
        assert (cache.length(a), cache.length(b)) == (3, 5)
        for sequences in ([a], [b], [cache.open(), a]):
            with refused(cache, StepError, match="was not committed: rewind it to"):
                cache.declare(sequences)
        assert not cache.can_extend(1, a)
        cache.rewind(a, 3)
        assert cache.used_cells == used + 1
        cache.close(b)
        assert cache.used_cells == 3
        assert extend(cache, a, 1).positions.tolist() == [3]

    def test_a_refused_placement_claims_nothing(self) -> None:  # R69
        cache = CellCache(64)
        step = cache.declare([cache.open()] * 3)
        with refused(cache, PositionError):
            step.place([0, 1, 3])
        assert cache.used_cells == 0

    def test_a_placement_that_dies_in_planning_claims_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:  # R69 R73
        def plan_read(*_: object) -> None:
            raise MemoryError

        cache = CellCache(256)
        a, b = opened(cache, 3), opened(cache, 70)
        step = cache.declare([a, b, b])
        with monkeypatch.context() as patch:
            patch.setitem(cells.PLANNERS, ReadKind.IN_BLOCKS, plan_read)
            before = state_of(cache)
            with pytest.raises(MemoryError):
                step.place([3, 70, 71])
            assert state_of(cache) == before
        assert step.place([3, 70, 71]).cells.tolist() == [3, 134, 135]

    def test_a_claim_can_be_rewound_further_than_where_it_began(self) -> None:  # R69
        cache = CellCache(64)
        sequence = opened(cache, 9)
        place(cache, [sequence] * 4)
        cache.rewind(sequence, 2)
        assert (cache.used_cells, cache.length(sequence)) == (2, 2)
        assert extend(cache, sequence, 1).cells.tolist() == [2]

    def test_a_clone_of_a_sequence_with_a_claim_has_only_what_is_committed(self) -> None:
        cache = CellCache(64)
        sequence = opened(cache, 9)
        placement = place(cache, [sequence] * 4)
        child = cache.clone(sequence, 9)
        assert cache.cells_of(child).tolist() == list(range(9))
        placement.commit()
        assert (cache.length(sequence), cache.length(child)) == (13, 9)

    @pytest.mark.parametrize("end", ["commit", "rewind", "close", "replace"])
    def test_a_placement_is_committed_once_and_only_while_it_holds_its_claims(self, end: str) -> None:
        cache = CellCache(256)
        a, b = opened(cache, 3), opened(cache, 5)
        placement = place(cache, [a, b])
        if end == "commit":
            placement.commit()
        elif end == "close":
            cache.close(b)
        else:
            cache.rewind(b, 5)
            if end == "replace":
                place(cache, [b])
        with refused(cache, StepError, match=rf"\[.*{b}\]"):
            placement.commit()

    def test_arrays_of_any_integer_type_and_any_interleaving_are_taken(self) -> None:
        cache = CellCache(256)
        a, b = cache.open(), cache.open()
        placement = cache.declare(np.array([b, a, b, a, a], np.uint8)).place(np.array([0, 0, 1, 1, 2], np.int64))
        assert placement.cells.tolist() == [64, 0, 65, 1, 2]
        assert (placement.cells.dtype, placement.positions.dtype) == (np.int64, np.int32)
        placement.commit()
        assert (cache.length(a), cache.length(b)) == (3, 2)

    def test_changing_an_array_that_was_given_changes_no_step(self) -> None:
        cache = CellCache(256)
        a, b = cache.open(), cache.open()
        sequences, positions = np.array([a, b]), np.array([0, 0])
        step = cache.declare(sequences)
        sequences[:] = 99
        placement = step.place(positions)
        positions[:] = 99
        assert (placement.sequences.tolist(), placement.positions.tolist()) == ([a, b], [0, 0])


class TestAdmission:
    def test_the_refusal_names_the_cells_that_could_be_had(self) -> None:
        cache = CellCache(128)
        a = opened(cache, 100)
        with pytest.raises(PoolFullError) as caught:
            cache.declare([a] * 40)
        assert (caught.value.needed, caught.value.free, caught.value.capacity) == (40, 28, 128)

    def test_a_free_cell_of_another_residue_does_not_help(self) -> None:  # R73
        cache = CellCache(8, run=4, read_block=1)
        a = opened(cache, 5)  # cells 0-3 and 4: residue 0 is used up
        assert cache.free_cells == 3
        assert not cache.can_extend(1)
        with pytest.raises(PoolFullError) as caught:
            cache.declare([cache.open()])
        assert (caught.value.needed, caught.value.free) == (1, 0)
        assert cache.can_extend(3, a)
        assert not cache.can_extend(4, a)

    def test_room_is_told_before_a_sequence_is_opened(self) -> None:
        cache = CellCache(128)
        opened(cache, 64)
        assert cache.can_extend(64)
        assert not cache.can_extend(65)
        assert cache.can_extend(0)
        assert not cache.can_extend(2**62)

    @pytest.mark.parametrize("n_tokens", [-1, True, 1.0, None])
    def test_a_number_of_tokens_that_is_none_is_refused(self, n_tokens: object) -> None:
        cache = CellCache(64)
        with refused(cache, StepError):
            cache.can_extend(n_tokens)  # type: ignore[arg-type]


class TestPlacement:
    def test_a_single_sequence_gets_the_cells_of_its_positions(self) -> None:  # R73
        cache = CellCache(512)
        sequence = cache.open()
        for n in (1, 7, 100, 64, 1, 300):
            placement = extend(cache, sequence, n)
            assert placement.cells.tolist() == placement.positions.tolist()

    def test_a_new_sequence_takes_the_lowest_wholly_free_run(self) -> None:  # R73
        cache = CellCache(512)
        a, b = opened(cache, 3), opened(cache, 3)
        c = cache.open()
        cache.close(a)
        assert cache.cells_of(b).tolist() == [64, 65, 66]
        assert extend(cache, c, 1).cells.tolist() == [0]

    def test_sequences_side_by_side_ascend_in_runs_of_their_own(self) -> None:  # R73
        cache = CellCache(512)
        a, b = cache.open(), cache.open()
        for _ in range(130):
            place(cache, [a, b]).commit()
        assert (cache.cells_of(a)[::64] // 64).tolist() == [0, 2, 4]
        assert (cache.cells_of(b)[::64] // 64).tolist() == [1, 3, 5]

    def test_a_clone_whose_next_cell_is_taken_goes_to_a_free_run_above_at_the_same_offset(self) -> None:  # R73
        cache = CellCache(512)
        source = opened(cache, 37)
        child = cache.clone(source, 37)
        extend(cache, source, 1)
        assert extend(cache, child, 30).cells.tolist() == [*range(64 + 37, 128), *range(128, 131)]

    def test_a_wholly_free_run_is_taken_before_the_rest_of_one_that_another_grows_in(self) -> None:  # R73
        cache = CellCache(256)
        source = opened(cache, 40)
        child = cache.clone(source, 30)
        opened(cache, 5)  # run 1: free from offset 5 on, but its owner will grow there
        assert extend(cache, child, 1).cells.tolist() == [128 + 30]

    def test_the_rest_of_a_run_above_is_taken_before_a_free_run_below(self) -> None:  # R73
        cache = CellCache(192)
        low, source = opened(cache, 64), opened(cache, 40)
        opened(cache, 5)
        child = cache.clone(source, 30)
        cache.close(low)
        assert extend(cache, child, 1).cells.tolist() == [128 + 30]

    def test_a_sequence_goes_below_when_nothing_above_is_free(self) -> None:  # R73
        cache = CellCache(192)
        low, high = opened(cache, 64), opened(cache, 128)
        cache.close(low)
        assert extend(cache, high, 3).cells.tolist() == [0, 1, 2]

    def test_pieces_of_runs_are_taken_when_no_run_is_free_to_its_end(self) -> None:  # R73
        cache = CellCache(12, run=4, read_block=1)
        source = opened(cache, 12)
        low, high = cache.clone(source, 6), cache.clone(source, 5)
        cache.rewind(source, 2)  # free: 2, 3 (but owned by both clones), 5-7 partly, and the last run
        extend(cache, low, 1)
        extend(cache, high, 1)
        assert (cache.cells_of(low)[-1], cache.cells_of(high)[-1]) == (6, 9)
        third = cache.clone(source, 1)
        # Offset 1 is free nowhere as far as the end of a run, nor in the first two runs: nothing is left for it.
        assert not cache.can_extend(1, third)
        # Offset 2 is free in the last run only, and that run is free from there on.
        assert extend(cache, source, 2).cells.tolist() == [10, 11]
        # Offset 0 is free in the last run, whose offset 1 is taken: a piece of one cell.
        assert extend(cache, cache.open(), 1).cells.tolist() == [8]

    @pytest.mark.parametrize(
        ("taken", "previous", "chosen"),
        [
            # The longest piece above: 2 cells in run 2, 4 in run 3, 4 in run 4.
            (["XXXXXXXX", "XXXXXX.X", "XXXX..XX", "XXX....X", "XX.....X"], 9, 28),
            # Above before below, though the piece below is longer.
            (["XXX....X", "XXXXXX.X", "XXXX..XX"], 9, 20),
            # Below where nothing above is free.
            (["XXXX..XX", "XXX....X", "XXXXXXXX", "XXXXXXXX"], 17, 12),
        ],
    )
    def test_the_piece_of_a_broken_run_is_the_longest_above_else_below(
        self, taken: list[str], previous: int, chosen: int
    ) -> None:  # R73
        table = CellTable(8 * len(taken), 8)
        for cell, mark in enumerate("".join(taken)):
            if mark == "X":
                table.claim_from(cell, cell % 8, 1)
        assert table.find_cell(4, previous) == chosen

    def test_a_piece_ends_where_a_cell_is_taken(self) -> None:  # R73
        table = CellTable(16, 8)
        for cell in (0, 6, *range(8, 16)):
            table.claim_from(cell, cell % 8, 1)
        assert table.claim_from(3, 3, 5) == 3
        assert table.n_used == 13

    def test_no_free_cell_that_fits_is_wasted(self) -> None:  # R73
        cache = CellCache(64, run=8, read_block=8)
        trunk = opened(cache, 5)
        children = [cache.clone(trunk, n) for n in (1, 2, 3, 4, 5, 1, 2, 3, 4, 5)]
        n = 0
        while any(cache.can_extend(1, child) for child in children):
            for child in children:
                if cache.can_extend(1, child):
                    extend(cache, child, 1)
                    n += 1
        residues = {cache.length(child) % 8 for child in children}
        free = [cell for cell in range(64) if not cache.owners(cell)]
        assert n + 5 + len(free) == 64
        assert not {cell % 8 for cell in free} & residues

    def test_a_pool_that_is_short_by_one_run_refuses_and_stays_byte_equal(self) -> None:  # R73
        cache = CellCache(256)
        a, b = opened(cache, 100), cache.open()
        with refused(cache, PoolFullError):
            cache.declare([b] * 70 + [a] * 100)
        place(cache, [b] * 64 + [a] * 92).commit()
        assert cache.free_cells == 0

    def test_a_sequence_comes_back_to_its_own_run_after_a_rewind(self) -> None:  # R73
        cache = CellCache(512)
        sequence = opened(cache, 200)
        cache.rewind(sequence, 70)
        assert extend(cache, sequence, 130).cells.tolist() == list(range(70, 200))


class TestExtent:
    def test_it_covers_what_is_read_and_written_and_stays_small(self) -> None:  # R70
        cache = CellCache(4096)
        sequence = cache.open()
        extents = [extend(cache, sequence, n).extent for n in (1, 254, 1, 1, 255, 1)]
        assert extents == [256, 256, 256, 512, 512, 768]

    def test_it_is_exact_when_reads_are(self) -> None:  # R70
        cache = CellCache(4096, run=1, read_block=1)
        sequence = cache.open()
        assert [extend(cache, sequence, n).extent for n in (1, 1, 2, 4, 100)] == [1, 2, 4, 8, 108]

    def test_it_never_passes_the_capacity(self) -> None:  # R70
        cache = CellCache(320)
        assert extend(cache, cache.open(), 300).extent == 320


class TestInspection:
    def test_owners_and_positions_of_cells_can_be_asked_for(self) -> None:
        cache = CellCache(256)
        a, b = opened(cache, 3), opened(cache, 70)
        assert (cache.owners(1), cache.owners(65), cache.owners(3)) == ((a,), (b,), ())
        assert (cache.position_of(65), cache.position_of(133)) == (1, 69)
        assert cache.open_sequences == (a, b)

    def test_a_free_cell_has_no_position(self) -> None:
        cache = CellCache(64)
        cache.rewind(opened(cache, 3), 2)
        with refused(cache, CacheError, match="cell 2 is free"):
            cache.position_of(2)

    @pytest.mark.parametrize("cell", [-1, 64, True, 1.0, None])
    def test_what_is_no_cell_is_refused(self, cell: object) -> None:
        cache = CellCache(64)
        opened(cache, 64)
        for call in (cache.owners, cache.position_of):
            with refused(cache, CacheError):
                call(cell)  # type: ignore[arg-type]

    def test_a_shared_cell_is_counted_once(self) -> None:  # R43
        cache = CellCache(4096)
        source = opened(cache, 1000)
        clone, other = cache.clone(source, 1000), opened(cache, 10)
        assert cache.count_cells([]) == 0
        assert cache.count_cells([source]) == cache.count_cells([source, clone]) == 1000
        assert cache.count_cells([source, source]) == 1000
        extend(cache, clone, 1)
        assert cache.count_cells([source, clone]) == 1001
        assert cache.count_cells(iter([clone, other])) == 1011
        place(cache, [other] * 3)  # claimed
        assert cache.count_cells(cache.open_sequences) == cache.used_cells == 1014
        with refused(cache, UnknownSequenceError, match="id 99"):
            cache.count_cells([source, 99])

    def test_what_is_given_out_is_a_copy(self) -> None:
        cache = CellCache(64)
        sequence = opened(cache, 3)
        cache.cells_of(sequence)[:] = 9
        assert cache.cells_of(sequence).tolist() == [0, 1, 2]


class TestScale:
    def test_ten_thousand_sequences_are_open_and_a_step_is_the_same_beside_them(self) -> None:
        cache, alone = CellCache(4096, windows=(0, 512)), CellCache(4096, windows=(0, 512))
        trunk, single = opened(cache, 2048), opened(alone, 2048)
        parked = [cache.clone(trunk, 1 + i % 2048) for i in range(10_000)]
        assert cache.used_cells == 2048
        beside, reference = extend(cache, trunk, 1), extend(alone, single, 1)
        assert beside.cells.tolist() == reference.cells.tolist()
        for i in range(2):
            assert beside.reads[i].spans == reference.reads[i].spans
            assert np.array_equal(mask_of(beside, i), mask_of(reference, i))
        cache.close(trunk)
        for sequence in parked:
            cache.close(sequence)
        assert cache.free_cells == cache.capacity

    def test_a_step_looks_at_no_sequence_but_its_own(self) -> None:
        class Watched(dict):  # type: ignore[type-arg]
            looked_up: list[int]

            def get(self, key: int, default: object = None) -> object:
                self.looked_up.append(key)
                return super().get(key, default)

            def __iter__(self) -> object:  # type: ignore[override]
                raise AssertionError("a step went through all sequences")

            values = items = keys = __iter__  # type: ignore[assignment]

        cache = CellCache(1024)
        sequences = [opened(cache, 3) for _ in range(10)]
        watched = Watched(cache._sequences)
        watched.looked_up = []
        cache._sequences = watched
        cache.declare([sequences[4], sequences[7]]).place([3, 3]).commit()
        assert watched.looked_up == [sequences[4], sequences[7]]
