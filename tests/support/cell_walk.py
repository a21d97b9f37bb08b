"""Runs commands on a `CellCache` and on `NaiveCells` side by side, and compares all there is after every one."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np
import pytest
from naive_cells import NaiveCells

from ggml_engine.errors import CacheError, PoolFullError, PositionError, StepError
from ggml_engine.pool.cells import CellCache
from ggml_engine.pool.read_plan import ReadKind
from ggml_engine.pool.step import Placement
from ggml_engine.pool.window import Window


@dataclass(frozen=True)
class Geometry:
    capacity: int
    run: int
    read_block: int
    windows: tuple[int | Window, ...]
    reads: ReadKind = ReadKind.IN_BLOCKS

    def build(self) -> CellCache:
        return CellCache(self.capacity, self.windows, run=self.run, read_block=self.read_block, reads=self.reads)


def n_stretches(cells: Sequence[int]) -> int:
    """How many pieces of consecutive cells there are."""
    return sum(i == 0 or cell != cells[i - 1] + 1 for i, cell in enumerate(cells))


GEOMETRIES = (
    Geometry(24, 1, 1, (0, 1, 3, Window(3, True))),
    Geometry(40, 4, 1, (0, 3, Window(6, True))),
    Geometry(48, 4, 8, (1, 0, Window(1, True))),
    Geometry(61, 4, 256, (5, 3, 1, 0)),
    Geometry(30, 1, 8, (0, 5)),
    Geometry(200, 64, 8, (0, 3)),
    Geometry(256, 64, 256, (0, 5, Window(7, True))),
)


def state_of(cache: CellCache) -> tuple[object, ...]:
    """Every byte that the bookkeeping holds: equal before and after a refusal."""
    table = cache._table
    sequences = tuple(
        (s.id, s.length, s.n_cells, s.claim, s.revision, s.cells.tobytes()) for s in cache._sequences.values()
    )
    positions = np.where(table._n_owners != 0, table.positions, 0)  # a free cell has none
    tables = tuple(a.tobytes() for a in (positions, table._n_owners, table._n_free_by_residue, table._tops))
    return table.n_used, cache._next_id, sequences, tables


@contextmanager
def refused(cache: CellCache, error: type[CacheError], match: str | None = None) -> Iterator[None]:
    """The body is refused with `error`, and leaves the cache byte-equal."""
    before = state_of(cache)
    with pytest.raises(error, match=match):
        yield
    assert state_of(cache) == before


def mask_of(placement: Placement, index: int = 0, dtype: type = np.float32) -> np.ndarray:
    """The mask of one window, written over garbage."""
    read = placement.reads[index]
    out = np.full((placement.cells.size, read.n_rows), 7, dtype)
    read.fill_mask(out)
    return out


class Walk:
    """One cache and its model; each method is a command, checked in full."""

    def __init__(self, geometry: Geometry) -> None:
        self.geometry = geometry
        self.cache = geometry.build()
        self.model = NaiveCells(geometry.capacity, geometry.run)
        self.issued: set[int] = set()
        self.n_moves = 0

    @property
    def open_sequences(self) -> list[int]:
        return list(self.model.held)

    def is_claimed(self, sequence: int) -> bool:
        return len(self.model.held[sequence]) > self.model.committed[sequence]

    # Commands.

    def open(self) -> None:
        self._register(self.cache.open(), self.model.open)

    def close(self, sequence: int) -> None:
        self.cache.close(sequence)
        self.model.close(sequence)
        self.check()

    def clone(self, source: int, upto: int) -> None:
        free = self.cache.free_cells
        self._register(self.cache.clone(source, upto), lambda new: self.model.clone(source, upto, new))
        assert self.cache.free_cells == free

    def rewind(self, sequence: int, to: int) -> None:
        self.cache.rewind(sequence, to)
        self.model.rewind(sequence, to)
        self.check()

    def compact(self, sequence: int) -> None:
        """Moves a sequence's cells together, if that saves a stretch; the move is stale once it was made."""
        before = state_of(self.cache)
        move = self.cache.plan_move(sequence)
        assert state_of(self.cache) == before
        best = None if self.is_claimed(sequence) else self.model.best_move(sequence)
        if move is None:
            assert best is None
            return
        assert not self.is_claimed(sequence)
        assert best is None or move.n_saved * best[0] >= best[1] * move.n_cells
        cells = self.model.held[sequence]
        assert (move.sequence, move.old.tolist()) == (sequence, cells[move.begin :])
        assert n_stretches(cells) == move.n_stretches
        new = move.new.tolist()
        assert new == sorted(new)
        assert move.extent == new[-1] + 1 <= self.cache.capacity
        pieces = move.pieces()
        for index, cells_named in ((0, move.old), (1, move.new)):
            assert [piece[index] + i for piece in pieces for i in range(piece[2])] == cells_named.tolist()
        self.model.move(sequence, move.begin, new)
        self.cache.apply_move(move)
        assert n_stretches(cells) == move.n_stretches - move.n_saved < move.n_stretches
        self.check()
        self.n_moves += 1
        with refused(self.cache, StepError, match="stale"):
            self.cache.apply_move(move)

    def refuse_bad_numbers(self, sequence: int) -> None:
        length = self.model.committed[sequence]
        for bad in (-1, length + 1, 2**63, True, 1.0, None):
            with refused(self.cache, PositionError):
                self.cache.rewind(sequence, bad)  # type: ignore[arg-type]
            with refused(self.cache, PositionError):
                self.cache.clone(sequence, bad)  # type: ignore[arg-type]

    def step(self, tokens: list[int], outcome: str, bad_token: int = 0, bad_by: int = 1) -> None:
        """Declares and places `tokens`; `outcome`: "commit", "fail" (after placement) or "misplace" (bad positions)."""
        if any(self.is_claimed(s) for s in tokens):
            with refused(self.cache, StepError, match="rewind it"):
                self.cache.declare(np.array(tokens, np.int32))
            return
        positions = self._positions(tokens)
        if not self.model.fits(positions):
            with refused(self.cache, PoolFullError):
                self.cache.declare(np.array(tokens, np.int32))
            return
        before = state_of(self.cache)
        step = self.cache.declare(np.array(tokens, np.int32))
        assert state_of(self.cache) == before
        if outcome == "misplace":
            wrong = positions.copy()
            wrong[bad_token % len(tokens)] += bad_by
            with refused(self.cache, PositionError):
                step.place(wrong)
        placement = step.place(np.array(positions, np.int32))
        expected = self.model.place(tokens)
        assert placement.cells.tolist() == expected
        self._check_placement(placement, tokens, positions)
        self.check()
        with refused(self.cache, StepError, match="before"):
            step.place(positions)
        if outcome != "fail":
            placement.commit()
            for sequence in set(tokens):
                self.model.commit(sequence)
            self.check()
            with refused(self.cache, StepError):
                placement.commit()

    # Checks.

    def check(self) -> None:  # R74
        cache, model = self.cache, self.model
        assert cache.used_cells == model.used()
        assert cache.free_cells + cache.used_cells == cache.capacity == model.capacity
        assert list(cache.open_sequences) == list(model.held)
        for sequence, cells in model.held.items():
            assert cache.cells_of(sequence).tolist() == cells
            assert cache.length(sequence) == model.committed[sequence]
            assert len(set(cells)) == len(cells)
            assert all(cell % cache.run == position % cache.run for position, cell in enumerate(cells))  # R73
            self._check_admission(sequence)
        for n in (0, 1, cache.run, cache.free_cells):
            assert cache.can_extend(n) == model.fits(list(range(n)))
        for cell, bits in enumerate(model.owners):
            assert cache.owners(cell) == tuple(s for s in model.held if bits >> s & 1)
            if bits:
                assert cache.position_of(cell) == model.positions[cell]

    def _check_admission(self, sequence: int) -> None:
        length = self.model.committed[sequence]
        for n in (1, self.cache.free_cells):
            fits = self.model.fits(list(range(length, length + n)))
            assert self.cache.can_extend(n, sequence) == (fits and not self.is_claimed(sequence))

    def _check_placement(self, placement: Placement, tokens: list[int], positions: list[int]) -> None:
        assert placement.sequences.tolist() == tokens
        assert placement.positions.tolist() == positions
        assert placement.rows_read == tuple(read.n_rows for read in placement.reads)
        assert placement.extent <= self.cache.capacity
        highest = 0
        assert [read.window for read in placement.reads] == list(self.cache.windows)
        for asked, read in zip(self.geometry.windows, placement.reads, strict=True):
            window = (asked.size, asked.is_chunked) if isinstance(asked, Window) else (asked, False)
            assert (read.window.size, read.window.is_chunked) == window
            rows = read.rows().tolist()
            assert len(rows) == read.n_rows == sum(n for _, n in read.spans)
            assert rows == sorted(set(rows))
            queries = zip(tokens, positions, strict=True)
            seen = set[int]().union(*(self.model.visible(s, p, *window) for s, p in queries))
            assert read.n_visible == len(seen)
            for each in read.visible:
                stretches = [list(range(row, row + n)) for row, n, _ in each.stretches]
                assert list(chain.from_iterable(stretches)) == each.cells.tolist()
                assert all(left[-1] + 1 != right[0] for left, right in pairwise(stretches))
                offsets = [position - each.first_seen for *_, position in each.stretches]
                assert offsets == [sum(map(len, stretches[:i])) for i in range(len(stretches))]
            self._check_rows_read(read.n_rows, seen)
            highest = max(highest, rows[-1])
            expected = self.model.mask(tokens, positions, window[0], rows, window[1])
            for dtype in (np.float16, np.float32):
                out = np.full((len(tokens), read.n_rows), 7, dtype)
                read.fill_mask(out)
                assert np.array_equal(out, expected.astype(dtype))
            assert (expected == 0).any(axis=1).all()
        assert placement.extent == highest + 1 > max(placement.cells)

    def _check_rows_read(self, n_rows: int, seen: set[int]) -> None:
        """At most 1.25 rows per visible cell, plus one block per run of cells (issue B, point 4)."""
        block = self.geometry.read_block
        if block >= 2 * self.geometry.run or block == 1:
            n_runs = sum(cell - 1 not in seen for cell in seen)  # stretches of consecutive cells
        else:
            n_runs = len({cell // block for cell in seen})
        assert n_rows <= len(seen) * 5 // 4 + block * n_runs

    def _positions(self, tokens: list[int]) -> list[int]:
        following = {sequence: self.model.committed[sequence] for sequence in tokens}
        positions = []
        for sequence in tokens:
            positions.append(following[sequence])
            following[sequence] += 1
        return positions

    def _register(self, sequence: int, open_in_model: Callable[[int], None]) -> None:
        assert sequence not in self.issued  # R22
        self.issued.add(sequence)
        open_in_model(sequence)
        self.check()


def random_walk(
    geometry: Geometry, seed: int, n_commands: int, crowding: float = 0, moving: float = 0, walk_type: type[Walk] = Walk
) -> Walk:
    """A walk of random commands; the same seed gives the same walk.

    `crowding` is the chance that a command which would give up cells, or move some together, is replaced by one that
    takes some: a crowded pool is one where runs are broken into pieces. `moving` is the chance that after a command all
    sequences are moved together.
    """
    rng = random.Random(seed)
    walk = walk_type(geometry)
    walk.open()
    for _ in range(n_commands):
        _random_command(walk, rng, crowding)
        if moving and rng.random() < moving:
            for sequence in walk.open_sequences:
                walk.compact(sequence)
    return walk


def _random_command(walk: Walk, rng: random.Random, crowding: float) -> None:
    sequences = walk.open_sequences
    draw = rng.random()
    if (0.1 <= draw < 0.2 or 0.35 <= draw < 0.5 or 0.53 <= draw < 0.6) and rng.random() < crowding:
        draw = 0.9
    if not sequences or (draw < 0.1 and len(sequences) < 9):
        walk.open()
        return
    chosen = rng.choice(sequences)
    length = walk.model.committed[chosen]
    if draw < 0.2:
        walk.close(chosen)
    elif draw < 0.35:
        if len(sequences) < 9:
            walk.clone(chosen, rng.randint(0, length))
    elif draw < 0.5:
        walk.rewind(chosen, rng.randint(0, length))
    elif draw < 0.53:
        walk.refuse_bad_numbers(chosen)
    elif draw < 0.6:
        walk.compact(chosen)
    else:
        members = rng.sample(sequences, rng.randint(1, min(4, len(sequences))))
        longest = rng.choice((1, 1, 3, 8, walk.geometry.run + 3))
        tokens = [s for s in members for _ in range(rng.randint(1, longest))]
        if rng.random() < 0.3:
            rng.shuffle(tokens)
        outcome = rng.choices(("commit", "fail", "misplace"), (8, 1, 1))[0]
        walk.step(tokens, outcome, rng.randrange(99), rng.choice((-2, -1, 1, 5)))
