"""`Text`: a string that knows which of its characters the template's author wrote.

Only those may be read as control tokens; whatever else is in a rendered prompt (contents, roles, tool names) came from
a caller and must stay text. The default is the safe one: a plain `str` is the caller's, so an operation that is not
taught about `Text` loses the mark and never gains it. Invariant: `_authored` holds ascending, disjoint, non-empty
ranges of characters. Knows nothing of Jinja.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, SupportsIndex

Ranges = tuple[tuple[int, int], ...]


class Segment(NamedTuple):
    """A stretch of a prompt, and whether the tokenizer may read control tokens in it."""

    text: str
    parse_special: bool


class Text(str):
    """A string with the ranges `[start, stop)` of it that the template's author wrote."""

    __slots__ = ("_authored",)
    _authored: Ranges

    def __new__(cls, text: str, authored: Ranges) -> Text:
        self = super().__new__(cls, text)
        self._authored = authored
        return self

    def __str__(self) -> Text:
        return self

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        found = super().__getitem__(key)
        if not isinstance(key, slice):
            key = slice(key, key.__index__() + 1 or None)
        start, stop, step = key.indices(len(self))
        return Text(found, _clip(self._authored, start, stop)) if step == 1 else found

    def __iter__(self) -> Iterator[str]:
        return (self[index] for index in range(len(self)))


def authored(text: str) -> Text:
    """`text`, all of it the template author's."""
    return Text(text, ((0, len(text)),) if text else ())


def ranges_of(text: str) -> Ranges:
    """The ranges that the template's author wrote; none for a plain string."""
    return text._authored if isinstance(text, Text) else ()


def joined(pieces: Sequence[str]) -> str:
    """The pieces in a row, each keeping its mark."""
    ranges: list[tuple[int, int]] = []
    position = 0
    for piece in pieces:
        for start, stop in ranges_of(piece):
            if ranges and ranges[-1][1] == start + position:
                ranges[-1] = (ranges[-1][0], stop + position)
            else:
                ranges.append((start + position, stop + position))
        position += len(piece)
    text = "".join(pieces)
    return Text(text, tuple(ranges)) if ranges else text


def stripped(text: str, strip: Callable[[str], str]) -> str:
    """`strip(text)`, which must only shorten at the ends, with the mark kept."""
    short = strip(text)
    if not isinstance(text, Text) or not short:
        return short
    start = text.index(short)
    return text[start : start + len(short)]


def _clip(ranges: Ranges, start: int, stop: int) -> Ranges:
    clipped = ((max(low, start) - start, min(high, stop) - start) for low, high in ranges)
    return tuple((low, high) for low, high in clipped if low < high)


class _Spellings:
    """Finds control tokens in a text: the longest at each place, looked up by first character and length."""

    def __init__(self, tokens: Iterable[str]) -> None:
        self._lengths: dict[str, list[int]] = {}
        self._tokens = {token for token in tokens if token}
        for token in self._tokens:
            lengths = self._lengths.setdefault(token[0], [])
            if len(token) not in lengths:
                lengths.append(len(token))
        for lengths in self._lengths.values():
            lengths.sort(reverse=True)

    def starts(self, text: str) -> list[int]:
        found: list[int] = []
        for first in self._lengths:
            place = text.find(first)
            while place >= 0:
                found.append(place)
                place = text.find(first, place + 1)
        return sorted(found)

    def length_at(self, text: str, place: int, stop: int) -> int:
        """Length of the longest control token that starts at `place` and ends by `stop`; 0 if there is none."""
        for length in self._lengths.get(text[place], ()):
            if place + length <= stop and text[place : place + length] in self._tokens:
                return length
        return 0


def segments(text: str, special_tokens: Iterable[str]) -> list[Segment]:
    """`text` cut so that exactly the control tokens that the template's author wrote may be parsed.

    A spelling counts as the author's only when every character of it is; any other becomes a segment of its own with
    `parse_special` False. Text is cut nowhere else, so that ordinary text is tokenised in one piece.
    """
    plain = "".join((text,))
    spellings = _Spellings(special_tokens)
    starts = spellings.starts(plain)
    stop_of = _authored_stops(ranges_of(text))
    stops = [stop_of(place) for place in starts]
    kept: list[tuple[int, int]] = []
    for place, stop in zip(starts, stops, strict=True):
        if (not kept or place >= kept[-1][1]) and (length := spellings.length_at(plain, place, stop)):
            kept.append((place, place + length))
    quoted: list[tuple[int, int]] = []
    for place, stop in zip(starts, stops, strict=True):
        end = place + spellings.length_at(plain, place, len(plain))
        if end > stop:
            quoted.append((place, end))
    return _cut(plain, _without(_merged(quoted), kept))


def _merged(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges in order of their starts, made disjoint."""
    merged: list[tuple[int, int]] = []
    for start, end in ranges:
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _without(ranges: list[tuple[int, int]], holes: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """What of `ranges` lies outside `holes`; both ascending and disjoint."""
    left: list[tuple[int, int]] = []
    waiting = deque(holes)
    for start, end in ranges:
        position = start
        while waiting and waiting[0][0] < end:
            hole_start, hole_end = waiting[0]
            if position < hole_start:
                left.append((position, hole_start))
            position = max(position, hole_end)
            if hole_end > end:
                break  # it may reach into the next range, too
            waiting.popleft()
        if position < end:
            left.append((position, end))
    return left


def _authored_stops(ranges: Ranges) -> Callable[[int], int]:
    """A function from ascending places to where the author's range around the place ends (the place, if in none)."""
    remaining = iter(ranges)
    current = next(remaining, None)

    def stop_of(place: int) -> int:
        nonlocal current
        while current is not None and current[1] <= place:
            current = next(remaining, None)
        return current[1] if current is not None and current[0] <= place else place

    return stop_of


def _cut(text: str, quoted: list[tuple[int, int]]) -> list[Segment]:
    parts: list[Segment] = []
    position = 0
    for start, end in quoted:
        if position < start:
            parts.append(Segment(text[position:start], True))
        parts.append(Segment(text[start:end], False))
        position = end
    if position < len(text):
        parts.append(Segment(text[position:], True))
    return parts
