"""Masks: every query sees its own sequence's earlier cells inside its window, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from cell_walk import mask_of
from numpy.typing import NDArray

from ggml_engine.errors import CacheError
from ggml_engine.pool.cells import CellCache
from ggml_engine.pool.step import Placement
from ggml_engine.pool.window import Window

WINDOWS = (1, 3, 5, 0, Window(1, True), Window(4, True), Window(64, True), Window(67, True))


def extend(cache: CellCache, tokens: list[int]) -> Placement:
    following = {sequence: cache.length(sequence) for sequence in tokens}
    positions = []
    for sequence in tokens:
        positions.append(following[sequence])
        following[sequence] += 1
    placement = cache.declare(tokens).place(positions)
    placement.commit()
    return placement


def sees(p: int, q: int, window: int | Window) -> bool:
    """Whether a query at p sees the position q, by definition."""
    if isinstance(window, Window) and window.is_chunked:
        return q <= p and q >= (p // window.size) * window.size
    return q <= p and (window == 0 or q > p - window)


def band(n_queries: int, first: int, window: int | Window) -> NDArray[np.bool_]:
    """Which positions a run of queries sees: [n_queries, first + n_queries]."""
    return np.array([[sees(p, q, window) for q in range(first + n_queries)] for p in range(first, first + n_queries)])


@pytest.mark.parametrize("window", WINDOWS, ids=str)
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
class TestOneSequence:
    @pytest.mark.parametrize("n", [1, 2, 20, 64, 200])
    def test_a_prefill_sees_itself_and_what_came_before(
        self, n: int, window: int | Window, dtype: type
    ) -> None:  # R71 R72
        cache = CellCache(256, windows=(window,))
        placement = extend(cache, [cache.open()] * n)
        mask = mask_of(placement, dtype=dtype)
        lo = placement.reads[0].spans[0][0]
        assert lo == 0
        assert mask.dtype == dtype
        assert np.array_equal(mask[:, :n] == 0, band(n, 0, window))
        assert np.isneginf(mask[mask != 0]).all()
        assert np.isneginf(mask[:, n:]).all()

    def test_a_chunk_and_a_decode_step_see_the_history(self, window: int | Window, dtype: type) -> None:  # R71 R72
        cache = CellCache(512, windows=(window,))
        sequence = cache.open()
        extend(cache, [sequence] * 130)
        for n in (70, 1):
            first = cache.length(sequence)
            placement = extend(cache, [sequence] * n)
            rows = placement.reads[0].rows()
            seen = mask_of(placement, dtype=dtype) == 0
            expected = band(n, first, window)
            for i in range(n):
                assert rows[seen[i]].tolist() == np.flatnonzero(expected[i]).tolist()


class TestManySequences:
    @pytest.mark.parametrize("window", WINDOWS, ids=str)
    def test_sequences_prefilled_apart_decode_together(self, window: int | Window) -> None:  # R72
        cache = CellCache(1024, windows=(window,))
        sequences = [cache.open() for _ in range(3)]
        for sequence, n in zip(sequences, (5, 70, 130), strict=True):
            extend(cache, [sequence] * n)
        placement = extend(cache, sequences)
        rows, mask = placement.reads[0].rows(), mask_of(placement)
        for i, sequence in enumerate(sequences):
            cells = cache.cells_of(sequence).tolist()
            expected = [cell for q, cell in enumerate(cells) if sees(len(cells) - 1, q, window)]
            assert rows[mask[i] == 0].tolist() == expected

    def test_no_query_sees_a_cell_of_another_sequence_though_it_shares_its_prefix(self) -> None:  # R71
        cache = CellCache(1024)
        source = cache.open()
        extend(cache, [source] * 100)
        child = cache.clone(source, 70)
        extend(cache, [source, child])
        placement = extend(cache, [child, source])
        rows, mask = placement.reads[0].rows(), mask_of(placement)
        for i, sequence in enumerate((child, source)):
            assert rows[mask[i] == 0].tolist() == sorted(cache.cells_of(sequence).tolist())

    def test_prefill_and_decode_mix_in_any_order_of_the_batch(self) -> None:  # R72
        cache = CellCache(1024, windows=(3,))
        a, b = cache.open(), cache.open()
        extend(cache, [a] * 9)
        tokens = [b, a, b, b, a, b]
        placement = extend(cache, tokens)
        rows, mask = placement.reads[0].rows(), mask_of(placement)
        for i, (sequence, position) in enumerate(zip(tokens, placement.positions.tolist(), strict=True)):
            expected = cache.cells_of(sequence)[max(0, position - 2) : position + 1]
            assert rows[mask[i] == 0].tolist() == expected.tolist()

    def test_each_window_has_its_own_rows_and_mask(self) -> None:  # R71
        cache = CellCache(4096, windows=(0, 512))
        sequence = cache.open()
        extend(cache, [sequence] * 1500)
        placement = extend(cache, [sequence])
        assert [read.window for read in placement.reads] == [Window(0), Window(512)]
        assert [read.n_visible for read in placement.reads] == [1501, 512]
        assert placement.rows_read == (1536, 768)
        assert (mask_of(placement, 1) == 0).sum() == 512

    def test_a_step_over_the_border_of_chunks_sees_both_each_query_its_own(self) -> None:
        cache = CellCache(64, windows=(Window(8, True), 0), run=1, read_block=1)
        sequence = cache.open()
        extend(cache, [sequence] * 14)
        over = extend(cache, [sequence] * 5)  # positions 14 to 18
        assert over.reads[0].rows().tolist() == list(range(8, 19))
        assert [(row == 0).nonzero()[0].tolist() for row in mask_of(over)] == [
            list(range(7)), list(range(8)), [8], [8, 9], [8, 9, 10],
        ]  # fmt: skip
        within = extend(cache, [sequence])
        assert within.reads[0].rows().tolist() == [16, 17, 18, 19]
        assert within.reads[1].n_rows == 20

    @pytest.mark.parametrize("window", [2**31, 2**40, 10_000, Window(2**40, True), Window(256, True)], ids=str)
    def test_a_window_wider_than_the_pool_sees_everything(self, window: int | Window) -> None:
        cache = CellCache(256, windows=(window, 0))
        placement = extend(cache, [cache.open()] * 200)
        assert np.array_equal(mask_of(placement, 0), mask_of(placement, 1))

    def test_a_mask_can_be_filled_after_the_sequences_moved_on(self) -> None:
        cache = CellCache(256)
        sequence = cache.open()
        placement = extend(cache, [sequence] * 5)
        before = mask_of(placement)
        cache.rewind(sequence, 0)
        extend(cache, [cache.open()] * 50)
        assert np.array_equal(mask_of(placement), before)


class TestTheArrayToWriteTo:
    @pytest.mark.parametrize(
        "out",
        [
            np.zeros((2, 256), np.float64),
            np.zeros((2, 256), np.int16),
            np.zeros((2, 255), np.float16),
            np.zeros((3, 256), np.float16),
            np.zeros(512, np.float16),
            np.zeros((256, 2), np.float16).T,
            np.zeros((2, 512), np.float16)[:, ::2],
            [[0.0] * 256] * 2,
        ],
    )
    def test_another_type_shape_or_order_is_refused(self, out: object) -> None:
        cache = CellCache(256)
        read = extend(cache, [cache.open()] * 2).reads[0]
        with pytest.raises(CacheError):
            read.fill_mask(out)  # type: ignore[arg-type]

    def test_a_read_only_array_is_refused(self) -> None:
        cache = CellCache(256)
        out = np.zeros((1, 256), np.float16)
        out.setflags(write=False)
        with pytest.raises(CacheError, match="writeable"):
            extend(cache, [cache.open()]).reads[0].fill_mask(out)

    def test_rows_of_a_larger_array_are_taken(self) -> None:
        cache = CellCache(256)
        padded = np.full((8, 256), 7, np.float16)
        extend(cache, [cache.open()] * 2).reads[0].fill_mask(padded[:2])
        assert (padded[2:] == 7).all()
        assert (padded[:2] == 0).sum() == 3
