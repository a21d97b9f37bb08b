"""Read plans: a step pays for what its queries see, and its shapes stay put."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from cell_walk import mask_of

from ggml_engine.pool.cells import CellCache
from ggml_engine.pool.read_plan import (
    Comb,
    ReadGeometry,
    Span,
    find_stretches,
    group_spans,
    merge_stretches,
    plan_spans,
)
from ggml_engine.pool.step import Placement


def extend(cache: CellCache, sequences: list[int], n: int = 1) -> Placement:
    tokens = np.repeat(np.array(sequences, np.int32), n)
    positions = np.concatenate([np.arange(n) + cache.length(sequence) for sequence in sequences])
    placement = cache.declare(tokens).place(positions)
    placement.commit()
    return placement


def plan(
    *stretches: Span, run: int = 64, read_block: int = 256, capacity: int = 8192, max_spans: int = 32
) -> tuple[Span, ...]:
    los, his = (np.array(column, np.int64) for column in zip(*stretches, strict=True))
    return plan_spans(los, his, ReadGeometry(run, read_block, capacity, max_spans))


class TestStretches:
    def test_they_are_the_pieces_of_consecutive_cells_in_the_order_given(self) -> None:
        los, his = find_stretches(np.array([7, 8, 9, 20, 3, 4]))
        assert (los.tolist(), his.tolist()) == ([7, 20, 3], [10, 21, 5])

    def test_one_cell_is_a_stretch(self) -> None:
        los, his = find_stretches(np.array([5]))
        assert (los.tolist(), his.tolist()) == ([5], [6])

    @pytest.mark.parametrize(
        ("stretches", "union"),
        [
            ([(0, 5)], [(0, 5)]),
            ([(8, 9), (0, 5)], [(0, 5), (8, 9)]),
            ([(0, 5), (5, 7)], [(0, 7)]),
            ([(0, 50), (3, 7), (9, 11), (60, 61)], [(0, 50), (60, 61)]),
            ([(0, 5), (0, 9), (0, 2)], [(0, 9)]),
        ],
    )
    def test_their_union_ascends_without_touching(self, stretches: list[Span], union: list[Span]) -> None:
        los, his = merge_stretches(*(np.array(column, np.int64) for column in zip(*stretches, strict=True)))
        assert list(zip(los.tolist(), his.tolist(), strict=True)) == union


class TestSpans:
    @pytest.mark.parametrize(
        ("stretches", "spans"),
        [
            (((0, 1),), ((0, 256),)),
            (((0, 257),), ((0, 512),)),
            (((700, 1500),), ((512, 1024),)),
            # Two borders of blocks would cost too much: runs, filled up to a block.
            (((700, 1300),), ((640, 768),)),
            # Dense enough: the gap is less than a quarter of what is seen and a block.
            (((0, 512), (640, 1024)), ((0, 1024),)),
            # Far apart: runs, filled up to a block by growing the last.
            (((0, 10), (4096, 4106)), ((0, 64), (4096, 192))),
            (((0, 128), (4096, 4224)), ((0, 128), (4096, 128))),
            # Filled up by closing the gap first.
            (((0, 10), (128, 138), (4096, 4106)), ((0, 192), (4096, 64))),
            # At the end of the pool it grows downwards.
            (((1024, 1034), (8128, 8192)), ((896, 192), (8128, 64))),
        ],
    )
    def test_they_are_rounded_so_that_shapes_stay_put(
        self, stretches: tuple[Span, ...], spans: tuple[Span, ...]
    ) -> None:
        assert plan(*stretches) == spans

    def test_a_narrow_window_across_the_border_of_a_block_does_not_read_two_blocks(self) -> None:
        assert plan((254, 259)) == ((192, 256),)

    def test_the_capacity_bounds_them(self) -> None:
        assert plan((0, 300), capacity=320) == ((0, 320),)

    def test_a_block_of_one_is_exact(self) -> None:
        assert plan((3, 7), (100, 105), run=1, read_block=1) == ((3, 4), (100, 5))

    def test_random_stretches_stay_within_the_bound(self) -> None:
        rng = np.random.default_rng(7)
        for _ in range(500):
            borders = np.unique(rng.integers(0, 8192, 2 * rng.integers(1, 40)))
            borders = borders[: borders.size // 2 * 2]
            if not borders.size:
                continue
            los, his = borders[::2], borders[1::2]
            spans = plan_spans(los, his, ReadGeometry(64, 256, 8192))
            n_visible = int((his - los).sum())
            assert len(spans) <= 32
            assert sum(n for _, n in spans) <= 1.25 * n_visible + 256 * los.size
            ends = [lo + n for lo, n in spans]
            assert ends[-1] <= 8192
            assert all(lo % 64 == 0 and n % 64 == 0 and n > 0 for lo, n in spans)
            assert all(end < lo for end, (lo, _) in zip(ends, spans[1:], strict=False))
            assert all(any(a <= lo and hi <= a + n for a, n in spans) for lo, hi in zip(los, his, strict=True))


class TestManyStretches:
    """A span is a few nodes in every layer: beyond `max_spans` the smallest gaps are read too."""

    def test_the_smallest_gaps_are_closed_first_and_the_shape_stays_whole_blocks(self) -> None:
        # gaps of 1984, 960 and 1984 rows between runs of 64: the one of 960 goes
        stretches = ((0, 64), (2048, 2112), (3072, 3136), (5120, 5184))
        assert plan(*stretches, max_spans=3) == ((0, 64), (2048, 1088), (5120, 128))
        assert len(plan(*stretches)) == 4

    @pytest.mark.parametrize("max_spans", [1, 2, 5])
    def test_there_are_never_more_than_the_most(self, max_spans: int) -> None:
        rng = np.random.default_rng(max_spans)
        n_capped = 0
        for _ in range(200):
            borders = np.unique(rng.integers(0, 8192, 30))
            borders = borders[: borders.size // 2 * 2]
            los, his = borders[::2], borders[1::2]
            spans = plan_spans(los, his, ReadGeometry(64, 256, 8192, max_spans))
            assert len(spans) <= max_spans
            n_capped += len(spans) == max_spans
            ends = [lo + n for lo, n in spans]
            assert ends[-1] <= 8192
            assert all(lo % 64 == 0 and n % 64 == 0 and n > 0 for lo, n in spans)
            assert all(end < lo for end, (lo, _) in zip(ends, spans[1:], strict=False))
            assert all(any(a <= lo and hi <= a + n for a, n in spans) for lo, hi in zip(los, his, strict=True))
        assert n_capped > 100

    @pytest.mark.parametrize(("n_runs", "n_spans"), [(32, 32), (33, 32), (60, 32)])
    def test_a_sequence_in_many_distant_runs_reads_at_most_thirty_two_spans(self, n_runs: int, n_spans: int) -> None:
        cache = CellCache(65_536)
        sequence, others = cache.open(), [cache.open() for _ in range(11)]
        for _ in range(n_runs - 1):
            extend(cache, [sequence, *others], 64)
        placement = extend(cache, [sequence])
        read = placement.reads[0]
        assert len(read.spans) == n_spans
        assert read.n_visible == 64 * (n_runs - 1) + 1
        if n_runs == n_spans:
            assert read.n_rows <= 1.25 * read.n_visible + 256 * n_runs
        else:  # every gap that was closed is the runs of eleven others
            assert read.n_rows <= read.n_visible + (n_runs - n_spans) * 11 * 64 + 256
        assert read.rows()[mask_of(placement)[0] == 0].tolist() == cache.cells_of(sequence).tolist()


class TestParkedCells:
    @pytest.mark.parametrize("where", ["below", "above", "between"])
    @pytest.mark.parametrize("n_live", [1, 4])
    def test_a_step_reads_no_cells_of_parked_sessions(self, where: str, n_live: int) -> None:
        # Issue B, point 4: at most 1.25 times what the step's own sequences see, and one block per run of cells.
        cache = CellCache(32_768, windows=(0, 512))
        live, parked = [], []
        if where == "below":
            parked = [cache.open() for _ in range(16)]
            extend(cache, parked, 512)
        live = [cache.open() for _ in range(n_live)]
        if where == "between":
            parked = [cache.open() for _ in range(16)]
            for _ in range(8):
                extend(cache, live, 64)
                extend(cache, parked, 64)
        else:
            extend(cache, live, 512)
        if where == "above":
            parked = [cache.open() for _ in range(16)]
            extend(cache, parked, 512)
        assert cache.used_cells == 8192 + 512 * n_live if where != "between" else True
        for _ in range(70):
            placement = extend(cache, live)
            for read in placement.reads:
                seen = np.concatenate([cache.cells_of(s)[-(read.window.size or 10**6) :] for s in live])
                assert read.n_visible == seen.size
                n_runs = int((np.diff(np.sort(seen)) != 1).sum()) + 1
                assert read.n_rows <= 1.25 * read.n_visible + 256 * n_runs
                # Nothing like the eight thousand cells that are parked.
                assert read.n_rows <= read.n_visible + 512

    def test_the_same_rows_are_read_beside_parked_cells_as_alone(self) -> None:
        alone, beside = CellCache(16_384, windows=(0, 512)), CellCache(16_384, windows=(0, 512))
        a, b = alone.open(), beside.open()
        for _ in range(10):  # parked sessions take every other run
            extend(alone, [a], 64)
            extend(beside, [b], 64)
            extend(beside, [beside.open()], 64)
        for _ in range(64):
            assert extend(alone, [a]).rows_read[0] == extend(beside, [b]).rows_read[0] == 768

    def test_a_prefix_that_sequences_share_is_read_once(self) -> None:
        cache = CellCache(16_384)
        trunk = cache.open()
        extend(cache, [trunk], 2048)
        children = [cache.clone(trunk, 2048) for _ in range(16)]
        read = extend(cache, children).reads[0]
        assert read.n_visible == 2048 + 16
        assert read.n_rows <= 2048 + 16 * 64 + 256


class TestStability:
    def test_the_shape_of_a_decoding_sequence_changes_once_in_a_block(self) -> None:
        cache = CellCache(4096, windows=(0, 512))
        sequence = cache.open()
        plans = [extend(cache, [sequence]).reads for _ in range(1280)]
        assert [len({p[0].spans for p in plans[:n]}) for n in (256, 512, 1280)] == [1, 2, 5]
        assert {p[0].spans[0][0] for p in plans} == {0}
        # A window slides over blocks: one span, whose length takes the value between two borders, and another on one.
        assert {len(p[1].spans) for p in plans} == {1}
        assert {p[1].n_rows for p in plans[768:]} == {512, 768}
        assert len({p[1].spans for p in plans[768:]}) <= 2 * (1280 - 768) // 256 + 2

    def test_the_width_of_a_batch_apart_changes_once_in_a_block(self) -> None:
        cache = CellCache(65_536)
        sequences = [cache.open() for _ in range(8)]
        for i, sequence in enumerate(sequences):
            extend(cache, [sequence], 100 + 7 * i)
        parked = cache.open()
        extend(cache, [parked], 6000)
        widths = [extend(cache, sequences).reads[0].n_rows for _ in range(200)]
        assert all(width % 256 == 0 for width in widths)
        assert sum(a != b for a, b in pairwise(widths)) <= 200 * 8 // 256 + 2

    def test_mask_columns_are_congruent_to_cells_and_positions(self) -> None:  # R73
        cache = CellCache(16_384)
        a, b, c = (cache.open() for _ in range(3))
        for _ in range(20):
            extend(cache, [a, b, c], 37)
        placement = extend(cache, [a, c])
        rows = placement.reads[0].rows()
        assert len(placement.reads[0].spans) > 1
        assert (np.arange(rows.size) % 64 == rows % 64).all()
        for i, sequence in enumerate((a, c)):
            seen = rows[mask_of(placement)[i] == 0]
            assert seen.tolist() == cache.cells_of(sequence).tolist()  # ascending along the sequence


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([(0, 64)], [Comb(0, 64)]),
        ([(0, 64), (128, 64)], [Comb(0, 64), Comb(128, 64)]),
        ([(64, 64), (256, 64), (448, 64)], [Comb(64, 64, 3, 192)]),
        ([(0, 64), (256, 64), (512, 64), (768, 256)], [Comb(0, 64, 3, 256), Comb(768, 256)]),
        ([(0, 32), (128, 64), (256, 64), (384, 64), (640, 64)], [Comb(0, 32), Comb(128, 64, 3, 128), Comb(640, 64)]),
        ([(0, 64), (0, 64), (0, 64)], [Comb(0, 64)] * 3),
        ([(512, 64), (256, 64), (0, 64)], [Comb(512, 64), Comb(256, 64), Comb(0, 64)]),
        ([(0, 64), (32, 64), (64, 64)], [Comb(0, 64), Comb(32, 64), Comb(64, 64)]),
    ],
)
def test_equally_spaced_spans_are_read_as_one_comb(spans: list[Span], expected: list[Comb]) -> None:
    assert group_spans(spans) == expected


def test_combs_hold_the_spans_in_their_order() -> None:
    rng = np.random.default_rng(5)
    for _ in range(500):
        los = np.cumsum(rng.choice([64, 128, 128, 128, 256], rng.integers(1, 12)))
        spans = [(int(lo), int(rng.choice([32, 64, 64, 64]))) for lo in los]
        combs = group_spans(spans)
        assert [(c.lo + i * c.stride, c.n_rows) for c in combs for i in range(c.n_teeth)] == spans
