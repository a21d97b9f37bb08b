"""Read plans: which rows of the pool a step reads, per window.

Owns: the choice of spans. A step pays for what its queries see, not for what is parked in the pool, and yet its shapes
and offsets stay put while it decodes and while a window slides.
Does not know: sequences as objects, owners, free cells; it gets the visible cells of each sequence as integers.
Invariants (by cell): spans ascend, are disjoint and do not touch; they hold every visible cell; with B = read_block
they hold at most 1.25 * visible + B * (stretches of consecutive visible cells) rows, for runs of at most B / 2 cells
and up to `max_spans` spans (beyond it the smallest gaps are read too, and the bound no longer holds); every span begins
on a multiple of min(run, B), so that a mask column is congruent to its cell.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ggml_engine.pool.masks import MaskArray, QueryGroup, check_mask_array, fill_mask
from ggml_engine.pool.window import Window

Cells = npt.NDArray[np.int64]
Span = tuple[int, int]


class ReadKind(Enum):
    """How the rows of a step are chosen; see the function that does it."""

    IN_BLOCKS = "in_blocks"  # plan_read: few spans of whole blocks, and a mask
    BY_POSITION = "by_position"  # plan_read_by_position: the same, not depending on where cells lie
    EXACT = "exact"  # plan_read_exactly: the visible rows alone


class Comb(NamedTuple):
    """Equally long spans at equal distances: `n_teeth` of `n_rows` rows, the first at `lo`, `stride` rows apart.

    What sequences that grow side by side leave: each takes a run in turn. A span is a comb of one tooth.
    """

    lo: int
    n_rows: int
    n_teeth: int = 1
    stride: int = 0


@dataclass(frozen=True, slots=True)
class ReadGeometry:
    """How spans are rounded: `run` and `read_block` (one divides the other), and the capacity that bounds them.

    A span is a few nodes of a graph in every layer, so there are at most `max_spans` in a plan by cell.
    """

    run: int
    read_block: int
    capacity: int
    max_spans: int = 32

    @property
    def grain(self) -> int:
        """The finer of the two: what the borders of a plan of several spans are rounded to."""
        return min(self.run, self.read_block)


class Stretch(NamedTuple):
    """Rows [row, row + n_rows), which hold the positions from `position` on."""

    row: int
    n_rows: int
    position: int


class VisibleCells(NamedTuple):
    """What the tokens of one sequence in a step see through one window; `cells` are in position order, no gap.

    `stretches` are the same cells, those that follow each other together.
    """

    tokens: slice | npt.NDArray[np.int64]
    n_tokens: int
    first_query: int
    first_seen: int
    cells: npt.NDArray[np.int32]
    stretches: Sequence[Stretch]


@dataclass(frozen=True, slots=True, eq=False)
class WindowRead:
    """The rows that the layers of one window read in a step, and the mask over them.

    `spans` are (lowest cell, number of rows), ascending; `n_rows` is their sum and the width of the mask; `n_visible`
    of those rows are seen by some query, the others are padding: masked, and possibly never written, so the pool must
    hold finite numbers there. `visible` are the step's sequences, in the order that they were given in.
    """

    window: Window
    spans: tuple[Span, ...]
    n_rows: int
    n_visible: int
    n_tokens: int
    visible: tuple[VisibleCells, ...]
    _columns: Callable[[], Sequence[Cells]]  # of each sequence's cells
    _mask_window: Window
    _is_one_stretch: bool = False  # each sequence's columns follow each other

    @property
    def _groups(self) -> list[QueryGroup]:
        return [
            QueryGroup(each.tokens, each.n_tokens, each.first_query, each.first_seen, columns, self._is_one_stretch)
            for each, columns in zip(self.visible, self._columns(), strict=True)
        ]

    @property
    def extent(self) -> int:
        """One past the highest row; spans need not ascend."""
        if len(self.spans) == 1:
            return self.spans[0][0] + self.n_rows
        return max(lo + n for lo, n in self.spans)

    def rows(self) -> Cells:
        """The cell of every mask column, i64 [n_rows], ascending."""
        return np.concatenate([np.arange(lo, lo + n, dtype=np.int64) for lo, n in self.spans])

    def count_own_spans(self) -> list[int]:
        """For each sequence of the step, ascending, how many spans hold visible cells of no other one."""
        ends = np.cumsum([n for _, n in self.spans])
        touched = np.zeros((len(self.visible), ends.size), np.bool_)
        for row, columns in zip(touched, self._columns(), strict=True):
            row[np.searchsorted(ends, columns, side="right")] = True
        own: list[int] = (touched & (touched.sum(axis=0) == 1)).sum(axis=1).tolist()
        return own

    def fill_mask(self, out: MaskArray) -> None:
        """Writes the mask to `out` [n_tokens, n_rows], float16 or float32: 0 where visible, -inf elsewhere.

        Raises CacheError when `out` has another shape or type, or is not C-contiguous and writeable.
        """
        check_mask_array(out, self.n_tokens, self.n_rows)
        fill_mask(out, self._groups, self._mask_window)


def plan_read(window: Window, sequences: Sequence[VisibleCells], n_tokens: int, geometry: ReadGeometry) -> WindowRead:
    """Plans the read of one window for a step of `n_tokens` over `sequences` (at least one)."""
    if len(sequences) == 1 and (read := _plan_one_stretch(window, sequences[0], n_tokens, geometry)) is not None:
        return read
    cells = np.concatenate([sequence.cells for sequence in sequences], dtype=np.int64)
    los, his = find_stretches(cells)
    distinct_los, distinct_his = merge_stretches(los, his)
    spans = plan_spans(distinct_los, distinct_his, geometry)
    columns = cells + np.repeat(_column_offsets(los, spans), his - los)
    ends = np.cumsum([sequence.cells.size for sequence in sequences])
    return WindowRead(
        window=window,
        spans=spans,
        n_rows=sum(n for _, n in spans),
        n_visible=int((distinct_his - distinct_los).sum()),
        n_tokens=n_tokens,
        visible=tuple(sequences),
        _columns=partial(np.split, columns, ends[:-1]),
        # positions are below the capacity, and this one fits an i32
        _mask_window=window.bounded(geometry.capacity),
    )


def plan_read_exactly(
    window: Window, sequences: Sequence[VisibleCells], n_tokens: int, geometry: ReadGeometry
) -> WindowRead:
    """Plans a read of the visible rows and no others, for a kernel that skips what it is not told of."""
    if len(sequences) == 1 and len(sequences[0].stretches) == 1:
        row, n_rows, _ = sequences[0].stretches[0]
        spans: tuple[Span, ...] = ((row, n_rows),)
    else:
        spans = _joined_spans(sorted((row, n) for sequence in sequences for row, n, _ in sequence.stretches))
        n_rows = sum(n for _, n in spans)

    def columns() -> list[Cells]:
        return [sequence.cells + _column_offsets(sequence.cells, spans) for sequence in sequences]

    return WindowRead(
        window=window,
        spans=spans,
        n_rows=n_rows,
        n_visible=n_rows,
        n_tokens=n_tokens,
        visible=tuple(sequences),
        _columns=columns,
        _mask_window=window.bounded(geometry.capacity),
    )


def _joined_spans(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The union of spans that ascend: as `merge_stretches`, for the few of a decoding step, where numpy costs more."""
    joined = [spans[0]]
    for row, n in spans[1:]:
        last, n_last = joined[-1]
        if row > last + n_last:
            joined.append((row, n))
        else:
            joined[-1] = (last, max(n_last, row + n - last))
    return tuple(joined)


def _plan_one_stretch(
    window: Window, sequence: VisibleCells, n_tokens: int, geometry: ReadGeometry
) -> WindowRead | None:
    """What `plan_read` plans where the cells of one sequence are one stretch and one span holds them, else None.

    Nearly every decode step of one sequence is like that. It takes a few calls of numpy in place of some thirty, each
    of which is slow after a forward that has filled the processor's caches with weights.
    """
    cells = sequence.cells
    first, n, block = int(cells[0]), cells.size, geometry.read_block
    lo = first // block * block
    hi = min(-(-(first + n) // block) * block, geometry.capacity)
    if len(sequence.stretches) > 1 or hi - lo > n * 5 // 4 + block:
        return None
    return WindowRead(
        window=window,
        spans=((lo, hi - lo),),
        n_rows=hi - lo,
        n_visible=n,
        n_tokens=n_tokens,
        visible=(sequence,),
        _columns=lambda: [np.arange(first - lo, first - lo + n)],
        _is_one_stretch=True,
        _mask_window=window.bounded(geometry.capacity),
    )


def plan_read_by_position(
    window: Window, sequences: Sequence[VisibleCells], n_tokens: int, geometry: ReadGeometry
) -> WindowRead:
    """Plans a read whose columns follow positions, not cells, so that sums do not depend on where the cells lie.

    Every sequence has a section of its own, in position order, filled up to a whole number of blocks; its first column
    belongs to a position that is a multiple of the run (the caller's `first_seen` is). What sequences share is read
    once for each of them. Spans may overlap and need not ascend.
    """
    spans: list[Span] = []
    columns: list[Cells] = []
    n_rows = n_visible = 0
    for sequence in sequences:
        los, his = find_stretches(sequence.cells.astype(np.int64))
        section = list(zip(los.tolist(), (his - los).tolist(), strict=True))
        columns.append(np.arange(n_rows, n_rows + sequence.cells.size, dtype=np.int64))
        _fill_section(section, -sequence.cells.size % geometry.read_block, geometry.capacity)
        spans += section
        n_rows += sum(n for _, n in section)
        n_visible += sequence.cells.size
    return WindowRead(
        window=window,
        spans=tuple(spans),
        n_rows=n_rows,
        n_visible=n_visible,
        n_tokens=n_tokens,
        visible=tuple(sequences),
        _columns=lambda: columns,
        _mask_window=window.bounded(geometry.capacity),
    )


PLANNERS: dict[ReadKind, Callable[[Window, Sequence[VisibleCells], int, ReadGeometry], WindowRead]] = {
    ReadKind.IN_BLOCKS: plan_read,
    ReadKind.BY_POSITION: plan_read_by_position,
    ReadKind.EXACT: plan_read_exactly,
}


def _fill_section(section: list[Span], padding: int, capacity: int) -> None:
    """Adds masked rows: those after the last span, as far as the pool goes, then any from the pool's beginning."""
    lo, n = section[-1]
    above = min(padding, capacity - lo - n)
    section[-1] = (lo, n + above)
    padding -= above
    while padding:
        section.append((0, min(padding, capacity)))
        padding -= section[-1][1]


def find_stretches(cells: npt.NDArray[np.integer[Any]]) -> tuple[Cells, Cells]:
    """The pieces of consecutive cells, in the order given: their lowest cells, and one past their highest."""
    breaks = np.flatnonzero(cells[1:] - cells[:-1] != 1)
    firsts = np.concatenate(([0], breaks + 1))
    lasts = np.concatenate((breaks, [cells.size - 1]))
    return cells[firsts].astype(np.int64), cells[lasts].astype(np.int64) + 1


def merge_stretches(los: Cells, his: Cells) -> tuple[Cells, Cells]:
    """The union of stretches, ascending: those that overlap or touch become one."""
    if los.size == 1:
        return los, his
    order = np.argsort(los, kind="stable")
    los = los[order]
    his = np.maximum.accumulate(his[order])
    apart = los[1:] > his[:-1]
    return los[np.concatenate(([True], apart))], his[np.concatenate((apart, [True]))]


def plan_spans(los: Cells, his: Cells, geometry: ReadGeometry) -> tuple[Span, ...]:
    """Chooses the spans for visible stretches that ascend and do not touch.

    One span over everything, rounded to the read block, where that stays within 1.25 rows per visible one and a block.
    Else the stretches rounded to the grain, their sum filled up to a whole number of blocks so that the shapes of a
    decoding batch change once in a block and not whenever one of its sequences enters another run. More than
    `max_spans` stretches are merged across their smallest gaps, whatever that reads.
    """
    block = geometry.read_block
    dense_rows = int((his - los).sum()) * 5 // 4
    lo = int(los[0]) // block * block
    hi = min(-(-int(his[-1]) // block) * block, geometry.capacity)
    if hi - lo <= dense_rows + block:
        return ((lo, hi - lo),)
    grain = geometry.grain
    n_stretches = los.size
    los, his = merge_stretches(los // grain * grain, -(-his // grain) * grain)
    is_capped = los.size > geometry.max_spans
    if is_capped:
        los, his = _merge_to(los, his, geometry.max_spans)
    n_rows = int((his - los).sum())
    padding = -n_rows % block
    if is_capped or n_rows + padding <= dense_rows + block * n_stretches:
        los, his = _pad(los, his, padding, geometry.capacity)
    return tuple(zip(los.tolist(), (his - los).tolist(), strict=True))


def group_spans(spans: Sequence[Span], least_teeth: int = 3) -> list[Comb]:
    """`spans` in their order as combs; fewer than `least_teeth` in a row stay single spans."""
    combs: list[Comb] = []
    start = 0
    while start < len(spans):
        stop = _comb_end(spans, start)
        lo, n_rows = spans[start]
        if stop - start < least_teeth:
            combs.append(Comb(lo, n_rows))
            start += 1
        else:
            combs.append(Comb(lo, n_rows, stop - start, spans[start + 1][0] - lo))
            start = stop
    return combs


def _comb_end(spans: Sequence[Span], start: int) -> int:
    """One past the last span that is as long as the one at `start`, and as far from its neighbour as the next one."""
    lo, n_rows = spans[start]
    stop = start + 1
    stride = spans[stop][0] - lo if stop < len(spans) else 0
    if stride < n_rows:  # spans may also overlap or descend
        return stop
    while stop < len(spans) and spans[stop] == (lo + (stop - start) * stride, n_rows):
        stop += 1
    return stop


def _merge_to(los: Cells, his: Cells, n: int) -> tuple[Cells, Cells]:
    """At most `n` of more stretches: closes the smallest gaps, the lowest first among equals."""
    closed = np.argsort(los[1:] - his[:-1], kind="stable")[: los.size - n]
    return np.delete(los, closed + 1), np.delete(his, closed)


def _pad(los: Cells, his: Cells, padding: int, capacity: int) -> tuple[Cells, Cells]:
    """Adds `padding` rows, or as many as the pool has room for: closes gaps, smallest first, then grows the ends."""
    gaps = los[1:] - his[:-1]
    by_size = np.argsort(gaps, kind="stable")
    closed = by_size[np.cumsum(gaps[by_size]) <= padding]
    padding -= int(gaps[closed].sum())
    los = np.delete(los, closed + 1)
    his = np.delete(his, closed)
    above = min(padding, capacity - int(his[-1]))
    his[-1] += above
    los[0] -= min(padding - above, int(los[0]))
    return los, his


def _column_offsets(cells: npt.NDArray[np.integer[Any]], spans: tuple[Span, ...]) -> Cells:
    """What to add to each of `cells`, all inside `spans`, to get its mask column."""
    table = np.array(spans, dtype=np.int64)
    first_columns = np.cumsum(table[:, 1]) - table[:, 1]
    span = np.searchsorted(table[:, 0], cells, side="right") - 1
    offsets: Cells = (first_columns - table[:, 0])[span]
    return offsets
