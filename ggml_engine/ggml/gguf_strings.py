"""Where the strings of an array begin in a GGUF: each behind its length, so that they are found one after the other.

A vocabulary has a hundred thousand of them. A length from 1 to 255 is a byte with seven zeros behind it, which texts
hardly ever hold: all such places are found at once, and are lengths as far as each leads to the next one. Elsewhere
every length is read by itself. Checks nothing else: what lies outside of the file is the caller's to refuse.
Once found, they are cut out at once, too.
"""

from __future__ import annotations

import struct
from array import array
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ggml_engine.ggml.gguf_source import FileBytes

_LENGTH: Final = struct.Struct("<Q")
_SHORT: Final = 256  # bytes
_MARKED: Final = 1 << 16  # bytes from which on a length has more than two that may not be 0
_MARK: Final = b"\xff"
_WINDOW_BYTES: Final = 1 << 15  # searched at once: some numpy calls, and memory of a few times as much
_WALKED: Final = 256  # strings read one by one where a search finds fewer: so it never costs much more than these


def find_strings(source: FileBytes, position: int, starts: array[int]) -> tuple[int, int]:
    """Fill `starts` with where each string's bytes begin, the first one's length being at `position`.

    How many were found, fewer than asked for where a length does not lie in the file, and where the last of them ends,
    which may be outside of the file.
    """
    n = len(starts)
    table = np.frombuffer(starts, f"u{starts.itemsize}") if n else np.empty(0, np.uint64)
    index = 0
    while index < n and position < source.n_bytes:  # a length may lead beyond what an i64 holds
        n_short = 0
        if n - index >= _WALKED:
            found, end = _find_short(source.view[position : position + _WINDOW_BYTES], n - index)
            n_short = found.size
            table[index : index + n_short] = found + position
            index, position = index + n_short, position + end
        if n_short < _WALKED:
            until = min(index + _WALKED, n)
            index, position = _walk(source, position, starts, index, until)
            if index < until:
                break
    return index, position


def split_strings(data: memoryview, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> list[bytes]:
    """The strings of an array whose bytes these are, lengths included; `starts` and `ends` are those of the strings."""
    n, sizes = starts.size, ends - starts
    if n and sizes.max() < _MARKED:
        # a length becomes one byte that no UTF-8 has; without the zeros that is all between two strings
        marked: NDArray[Any] = np.frombuffer(data, np.uint8).copy()
        marked[starts - 8] = marked[starts - 7] = 0
        marked[starts - 1] = _MARK[0]
        joined = marked.tobytes().translate(None, b"\0")
        del marked
        # else there are zeros in strings, or the mark is in some: what then is split could be many times as large
        if len(joined) == n + int(sizes.sum()) and joined.count(_MARK) == n:
            return joined.split(_MARK)[1:]
        del joined
    whole = data.tobytes()
    return [whole[start:end] for start, end in zip(starts.tolist(), ends.tolist(), strict=True)]


def _walk(source: FileBytes, position: int, starts: array[int], first: int, until: int) -> tuple[int, int]:
    """`find_strings` for those from `first` on, before `until`: the number of the next one, and where it begins."""
    memory, read_length = source.memory, _LENGTH.unpack_from
    index = first
    try:
        for index in range(first, until):
            starts[index] = position + 8
            position += 8 + read_length(memory, position)[0]
    except (struct.error, OverflowError):  # the string before leads to where no length can be read
        return index, position
    return until, position


def _find_short(window: memoryview, most: int) -> tuple[NDArray[np.int64], int]:
    """Where the first strings of a window begin in it, i64 [n], at most so many, and where the last of them ends.

    Up to the first one that is empty or has 256 bytes or more. The last one may go on behind the window.
    """
    if len(window) < _LENGTH.size or not 0 < _LENGTH.unpack_from(window)[0] < _SHORT:
        return np.empty(0, np.int64), 0
    data: NDArray[Any] = np.frombuffer(window, np.uint8)
    zeros = data == 0
    pairs = zeros[:-1] & zeros[1:]
    fours = pairs[:-2] & pairs[2:]
    sevens = fours[:-3] & fours[3:]
    lengths = np.flatnonzero(sevens[1:] > zeros[:-7])  # bytes other than 0 that seven zeros follow
    ends = lengths + data[lengths] + _LENGTH.size
    strange = np.flatnonzero(ends[:-1] != lengths[1:])
    n = min(int(strange[0]) + 1 if strange.size else lengths.size, most)
    return lengths[:n] + _LENGTH.size, int(ends[n - 1])
