"""The plan that the compiled attention reads: which rows of the pool each token of a step sees, as integers.

Tokens are taken in tiles, whose queries are computed together: rows that sequences of a tile share are named, and read,
once for all of them, and the rows of one sequence for its own tokens only. Nothing is masked but the edges, where a
token sees less than the others of its sequence: for those every token has the positions between which it sees.
The layout is that of native/cell_attention.h. Does not know: layers, tensors, owners.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ggml_engine.pool.read_plan import Stretch, VisibleCells, WindowRead, find_stretches
from ggml_engine.pool.window import Window

_HEAD = 3  # numbers before the tokens' positions
_PER_TILE = 4
_PER_SPAN = 5
_LEAST_CAPACITY = 256

# Where the numbers of a plan of a single token stand: what it sees, and its first span.
_UNTIL, _FIRST_SEEN = _HEAD, _HEAD + 1
_SPAN = _HEAD + 2 + _PER_TILE
_N_ROWS, _POSITION = 1, 2


class TokenRun(NamedTuple):
    """Tokens [token, token + n_tokens) of a step, which belong to its sequence number `seq` and begin at `position`."""

    token: int
    n_tokens: int
    seq: int
    position: int


@dataclass(frozen=True, slots=True, eq=False)
class CellPlan:
    """What is to be attended to in a step through one window: i32 [n], and how many numbers a graph has room for."""

    numbers: npt.NDArray[np.int32]
    capacity: int

    def can_move_on(self, first_seen: int) -> bool:
        """Whether the plan of a single token can become that of the next one, which sees from `first_seen` on.

        Its last row is followed by that token's; in front a part of the first span at most is lost from sight.
        """
        return first_seen - self.numbers.item(_FIRST_SEEN) < self.numbers.item(_SPAN + _N_ROWS)

    def move_on(self, position: int, first_seen: int) -> int:
        """Make it that; how many rows more it names."""
        numbers = self.numbers.data
        n_lost = first_seen - numbers[_FIRST_SEEN]
        numbers[_UNTIL] = position
        if n_lost:
            numbers[_FIRST_SEEN] = first_seen
            numbers[_SPAN] += n_lost
            numbers[_SPAN + _N_ROWS] -= n_lost
            numbers[_SPAN + _POSITION] += n_lost
        numbers[len(numbers) - _PER_SPAN + _N_ROWS] += 1
        return 1 - n_lost


def plan_cells(read: WindowRead, tokens_per_tile: int) -> CellPlan:
    """The plan of one window's read, in tiles of at most so many tokens."""
    return _plan_token(read) if read.n_tokens == 1 else plan_tiles(read, tokens_per_tile)


def _plan_token(read: WindowRead) -> CellPlan:
    """What `plan_tiles` gives for the only token of a step: it sees all of what is visible, in a tile of its own.

    Every decode step of one sequence is so, and after a forward that filled the processor's caches with weights what
    counts is how much code is passed.
    """
    (seen,) = read.visible
    numbers = [1, 5, 9, seen.first_query, seen.first_seen, 0, 1, 0, len(seen.stretches)]
    for row, n_rows, position in seen.stretches:
        numbers += (row, n_rows, position, 0, 1)
    return CellPlan(np.array(numbers, np.int32), _capacity_for(len(numbers)))


def plan_tiles(read: WindowRead, tokens_per_tile: int) -> CellPlan:
    """The plan of a step of any tokens."""
    stretches = [each.stretches for each in read.visible]
    tiles: list[int] = []
    spans: list[int] = []
    for runs in _tiles(_token_runs(read.visible), tokens_per_tile):
        first = len(spans) // _PER_SPAN
        for stretch, token, n_tokens in _spans_of(runs, stretches, read.window):
            spans += (*stretch, token, n_tokens)
        token = runs[0].token
        n_tokens = sum(run.n_tokens for run in runs)
        tiles += (token, n_tokens, first, len(spans) // _PER_SPAN - first)
    seen = _seen(read)
    begin = _HEAD + seen.size
    n = begin + len(tiles) + len(spans)
    numbers = np.empty(n, np.int32)
    numbers[:_HEAD] = (len(tiles) // _PER_TILE, begin, begin + len(tiles))
    numbers[_HEAD:begin] = seen
    numbers[begin:] = tiles + spans
    return CellPlan(numbers, _capacity_for(n))


def _capacity_for(n: int) -> int:
    """The next power of two: a graph serves every plan that fits, so a few sizes serve all."""
    return max(_LEAST_CAPACITY, 1 << (n - 1).bit_length())


def _seen(read: WindowRead) -> npt.NDArray[np.int32]:
    """For every token the last position that it sees, its own, then for every token the first one: i32 [2 * tokens]."""
    until = np.empty(read.n_tokens, np.int32)
    for each in read.visible:
        until[each.tokens] = np.arange(each.first_query, each.first_query + each.n_tokens, dtype=np.int32)
    window = read.window.bounded(int(until.max()) + 1)  # fits an i32, as positions do
    return np.concatenate((until, np.maximum(window.first_seen(until), 0)))


def _token_runs(visible: Sequence[VisibleCells]) -> list[TokenRun]:
    """The step's tokens in batch order, those of a sequence that follow each other as one."""
    runs = []
    for index, each in enumerate(visible):
        if isinstance(each.tokens, slice):
            runs.append(TokenRun(each.tokens.start, each.n_tokens, index, each.first_query))
            continue
        los, his = find_stretches(each.tokens)
        position = each.first_query
        for lo, hi in zip(los.tolist(), his.tolist(), strict=True):
            runs.append(TokenRun(lo, hi - lo, index, position))
            position += hi - lo
    runs.sort()
    return runs


def _tiles(runs: Sequence[TokenRun], tokens_per_tile: int) -> list[list[TokenRun]]:
    """The runs, cut where a tile is full."""
    tiles: list[list[TokenRun]] = [[]]
    room = tokens_per_tile
    for run in runs:
        token, n_left, index, position = run
        while n_left:
            if not room:
                tiles.append([])
                room = tokens_per_tile
            n = min(n_left, room)
            tiles[-1].append(TokenRun(token, n, index, position))
            token, n_left, position, room = token + n, n_left - n, position + n, room - n
    return tiles


def _spans_of(
    runs: Sequence[TokenRun], stretches: Sequence[Sequence[Stretch]], window: Window
) -> list[tuple[Stretch, int, int]]:
    """The rows that a tile's tokens see, with the tokens [token, token + n) that they are for."""
    seen = [_visible_part(run, stretches[run.seq], window) for run in runs]
    if len(runs) == 1:
        return [(stretch, runs[0].token, runs[0].n_tokens) for stretch in seen[0]]
    # Between two neighbouring borders of stretches, rows are seen wholly or not at all by each run's sequence. A row
    # has one position, whoever sees it.
    borders = sorted({border for each in seen for row, n, _ in each for border in (row, row + n)})
    index_of = {border: i for i, border in enumerate(borders)}
    seers: list[list[int]] = [[] for _ in borders]
    positions = [0] * len(borders)
    for i, each in enumerate(seen):
        for row, n, position in each:
            for piece in range(index_of[row], index_of[row + n]):
                seers[piece].append(i)
                positions[piece] = position + borders[piece] - row
    spans: list[tuple[Stretch, int, int]] = []
    for piece, found in enumerate(seers):
        row = borders[piece]
        for first, last in _consecutive(found):
            token = runs[first].token
            n_tokens = runs[last].token + runs[last].n_tokens - token
            spans.append((Stretch(row, borders[piece + 1] - row, positions[piece]), token, n_tokens))
    return spans


def _visible_part(run: TokenRun, stretches: Sequence[Stretch], window: Window) -> list[Stretch]:
    """What the run's first token sees, and those after it, up to the last one's own position."""
    begin = max(0, window.first_seen(run.position))
    end = run.position + run.n_tokens
    found = []
    for row, n, position in stretches:
        first, last = max(begin - position, 0), min(end - position, n)
        if first < last:
            found.append(Stretch(row + first, last - first, position + first))
    return found


def _consecutive(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as first and last of those that follow each other."""
    found: list[tuple[int, int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found
