"""The plan of the compiled attention: every token gets the rows that it sees, each once, and nothing of another's."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import numpy as np
import pytest
from cell_walk import GEOMETRIES, Geometry, Walk, random_walk
from hypothesis import given, settings
from hypothesis import strategies as st

from ggml_engine.pool.cell_plan import CellPlan, plan_cells
from ggml_engine.pool.cells import CellCache
from ggml_engine.pool.read_plan import ReadKind
from ggml_engine.pool.step import Placement
from ggml_engine.pool.window import Window

EXACT = tuple(replace(geometry, reads=ReadKind.EXACT) for geometry in GEOMETRIES)


class Tile(NamedTuple):
    token: int
    n_tokens: int
    span: int
    n_spans: int


class Span(NamedTuple):
    row: int
    n_rows: int
    position: int
    token: int
    n_tokens: int


@dataclass(frozen=True)
class Decoded:
    """A plan as native/cell_attention.h lays it out."""

    until: list[int]
    first: list[int]
    tiles: list[tuple[Tile, list[Span]]]

    @classmethod
    def of(cls, plan: CellPlan, n_tokens: int) -> Decoded:
        numbers = plan.numbers.tolist()
        n_tiles, at_tiles, at_spans = numbers[:3]
        assert at_tiles == 3 + 2 * n_tokens
        assert at_spans == at_tiles + 4 * n_tiles
        spans = [Span(*numbers[i : i + 5]) for i in range(at_spans, len(numbers), 5)]
        tiles = [Tile(*numbers[i : i + 4]) for i in range(at_tiles, at_spans, 4)]
        assert [tile.span for tile in tiles] == np.cumsum([0, *(tile.n_spans for tile in tiles)])[:-1].tolist()
        assert sum(tile.n_spans for tile in tiles) == len(spans)
        until, first = numbers[3 : 3 + n_tokens], numbers[3 + n_tokens : at_tiles]
        return cls(until, first, [(tile, spans[tile.span : tile.span + tile.n_spans]) for tile in tiles])

    def rows_of(self, token: int) -> list[int]:
        """The rows that the kernel lets a token attend to, in its order."""
        found = []
        for tile, spans in self.tiles:
            if not tile.token <= token < tile.token + tile.n_tokens:
                continue
            for span in spans:
                if span.token <= token < span.token + span.n_tokens:
                    seen = range(span.position, span.position + span.n_rows)
                    found += [span.row + i for i, at in enumerate(seen) if self.first[token] <= at <= self.until[token]]
        return found

    def n_rows_named(self) -> int:
        return sum(span.n_rows for _, spans in self.tiles for span in spans)


class PlanWalk(Walk):
    """Every placement's plans are compared with what each token sees by definition."""

    n_checked = 0
    tokens_per_tile: tuple[int, ...] = (1, 3, 8)

    def _check_placement(self, placement: Placement, tokens: list[int], positions: list[int]) -> None:
        super()._check_placement(placement, tokens, positions)
        for read in placement.reads:
            window = (read.window.size, read.window.is_chunked)
            seen = [self.model.visible(s, p, *window) for s, p in zip(tokens, positions, strict=True)]
            for per_tile in self.tokens_per_tile:
                plan = plan_cells(read, per_tile)
                assert plan.capacity >= plan.numbers.size
                assert plan.capacity & (plan.capacity - 1) == 0
                decoded = Decoded.of(plan, len(tokens))
                self._check_tiles(decoded, tokens, per_tile, seen)
                assert decoded.until == positions
                for token, want in enumerate(seen):
                    assert sorted(decoded.rows_of(token)) == sorted(want)
                self.n_checked += 1

    def _check_tiles(self, decoded: Decoded, tokens: list[int], per_tile: int, seen: list[set[int]]) -> None:
        expected = [(at, min(per_tile, len(tokens) - at)) for at in range(0, len(tokens), per_tile)]
        assert [(tile.token, tile.n_tokens) for tile, _ in decoded.tiles] == expected
        for tile, spans in decoded.tiles:
            for span in spans:
                assert span.n_rows > 0
                assert tile.token <= span.token < span.token + span.n_tokens <= tile.token + tile.n_tokens
                holders = [self.model.owners[row] for row in range(span.row, span.row + span.n_rows)]
                for token in range(span.token, span.token + span.n_tokens):
                    assert all(bits >> tokens[token] & 1 for bits in holders), "rows of another sequence"
                positions = self.model.positions[span.row : span.row + span.n_rows]
                assert positions == list(range(span.position, span.position + span.n_rows))
            self._check_named_once(tile, spans, tokens, seen)

    def _check_named_once(self, tile: Tile, spans: list[Span], tokens: list[int], seen: list[set[int]]) -> None:
        """A row is named once for all sequences that stand side by side and see it."""
        named = Counter(row for span in spans for row in range(span.row, span.row + span.n_rows))
        members = range(tile.token, tile.token + tile.n_tokens)
        runs = [set().union(*(seen[t] for t in run)) for _, run in groupby(members, key=lambda t: tokens[t])]
        for row in set().union(*runs):
            sees = [row in run for run in runs]
            assert named.pop(row) == sum(each and not (i and sees[i - 1]) for i, each in enumerate(sees))
        assert not named, "rows that nobody sees"


@given(geometry=st.sampled_from(EXACT), seed=st.integers(0, 2**32), crowding=st.sampled_from((0.0, 0.7)))
@settings(max_examples=60, deadline=None)
def test_every_token_gets_what_it_sees_each_row_once(geometry: Geometry, seed: int, crowding: float) -> None:
    random_walk(geometry, seed, 25, crowding, 0.1, PlanWalk)


def test_the_walks_do_check_plans() -> None:
    walk = random_walk(EXACT[0], 3, 60, walk_type=PlanWalk)
    assert isinstance(walk, PlanWalk)
    assert walk.n_checked > 100


# ---- steps by hand


def extend(cache: CellCache, tokens: list[int]) -> Placement:
    following = {sequence: cache.length(sequence) for sequence in tokens}
    positions = []
    for sequence in tokens:
        positions.append(following[sequence])
        following[sequence] += 1
    placement = cache.declare(np.array(tokens, np.int32)).place(np.array(positions, np.int32))
    placement.commit()
    return placement


def cells(capacity: int = 4096, windows: tuple[int | Window, ...] = (0,), run: int = 64) -> CellCache:
    return CellCache(capacity, windows, run=run, read_block=run, reads=ReadKind.EXACT)


def decoded(placement: Placement, per_tile: int = 8, index: int = 0) -> Decoded:
    return Decoded.of(plan_cells(placement.reads[index], per_tile), placement.cells.size)


def test_rows_that_sequences_share_are_named_once_and_own_ones_for_their_sequence() -> None:
    cache = cells()
    trunk = cache.open()
    extend(cache, [trunk] * 512)
    clones = [cache.clone(trunk, 512) for _ in range(8)]
    for _ in range(4):
        placement = extend(cache, clones)
    plan = decoded(placement)
    ((tile, spans),) = plan.tiles
    assert tile[:2] == (0, 8)
    assert [span for span in spans if span.n_tokens > 1] == [Span(0, 512, 0, 0, 8)]
    assert sorted((span.token, span.n_tokens, span.n_rows) for span in spans if span.n_tokens == 1) == [
        (token, 1, 4) for token in range(8)
    ]
    assert plan.n_rows_named() == 512 + 8 * 4 == placement.reads[0].n_rows


def test_a_sequence_between_those_that_share_has_no_part_in_it() -> None:
    cache = cells(run=4)
    trunk, stranger = cache.open(), cache.open()
    extend(cache, [trunk] * 8 + [stranger] * 8)
    clone = cache.clone(trunk, 8)
    plan = decoded(extend(cache, [trunk, stranger, clone]))
    ((_, spans),) = plan.tiles
    shared = [span for span in spans if span.row == 0]
    assert shared == [Span(0, 8, 0, 0, 1), Span(0, 8, 0, 2, 1)]


def test_a_prompt_is_cut_into_tiles_that_read_up_to_their_last_token() -> None:
    cache = cells()
    sequence = cache.open()
    plan = decoded(extend(cache, [sequence] * 20))
    assert [spans for _, spans in plan.tiles] == [
        [Span(0, 8, 0, 0, 8)], [Span(0, 16, 0, 8, 8)], [Span(0, 20, 0, 16, 4)],
    ]  # fmt: skip
    assert plan.until == list(range(20))
    assert plan.first == [0] * 20


@pytest.mark.parametrize(
    ("window", "first"),
    [
        (Window(1), [10, 11, 12, 13]),
        (Window(3), [8, 9, 10, 11]),
        (Window(12), [0, 0, 1, 2]),
        (Window(6, True), [6, 6, 12, 12]),
        (Window(1, True), [10, 11, 12, 13]),
        (Window(40), [0, 0, 0, 0]),
        (Window(2**40), [0, 0, 0, 0]),  # beyond an i32, as files may have it
        (Window(2**40, True), [0, 0, 0, 0]),
    ],
    ids=str,
)
def test_a_window_hides_what_is_before_it(window: Window, first: list[int]) -> None:
    cache = cells(windows=(window,))
    sequence = cache.open()
    extend(cache, [sequence] * 10)
    plan = decoded(extend(cache, [sequence] * 4))
    assert (plan.first, plan.until) == (first, [10, 11, 12, 13])
    ((_, spans),) = plan.tiles
    assert spans == [Span(first[0], 14 - first[0], first[0], 0, 4)], "rows before the window are not read"


def test_plans_of_five_hundred_steps_have_two_or_three_sizes() -> None:
    for n_sequences, sizes in ((1, {256}), (8, {256, 512, 1024})):
        cache = cells(8192)
        sequences = [cache.open() for _ in range(n_sequences)]  # grown side by side: each takes a run in turn
        found = [plan_cells(extend(cache, sequences).reads[0], 8).capacity for _ in range(500)]
        assert set(found) <= sizes
        assert found == sorted(found)


def test_a_clone_reads_nothing_twice() -> None:
    cache = cells()
    trunk = cache.open()
    extend(cache, [trunk] * 100)
    clone = cache.clone(trunk, 90)
    placement = extend(cache, [clone])
    plan = decoded(placement)
    rows = plan.rows_of(0)
    assert len(rows) == len(set(rows)) == 91 == plan.n_rows_named()
    assert rows[:90] == list(range(90))
