"""The values of a GGUF's key-value section: scalars, text and arrays, each with the type that the file gave it.

Text and arrays are only located when a file is opened, and decoded when they are asked for: a vocabulary of
262,144 entries costs nothing to a caller who does not read it. Text may hold NUL and bad UTF-8 (replaced by U+FFFD).
They read from the file's memory, so after it was closed they raise ClosedError; scalars stay.

Knows no key: what a value must be, and what it means, is for the reader of that key. The typed getters of `Metadata`
tell a missing value from one of a wrong type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import IntEnum
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np

from ggml_engine.errors import HyperparameterError
from ggml_engine.ggml.gguf_strings import split_strings

if TYPE_CHECKING:
    from array import array
    from typing import Any

    from numpy.typing import NDArray

    from ggml_engine.ggml.gguf_source import FileBytes


class GGUFType(IntEnum):
    """The type of a metadata value; the value is its number in the file (`enum gguf_type` in gguf.h)."""

    UINT8 = 0
    INT8 = 1
    UINT16 = 2
    INT16 = 3
    UINT32 = 4
    INT32 = 5
    FLOAT32 = 6
    BOOL = 7
    STRING = 8
    ARRAY = 9
    UINT64 = 10
    INT64 = 11
    FLOAT64 = 12

    @property
    def is_integer(self) -> bool:
        return self in _INTEGERS

    @property
    def is_float(self) -> bool:
        return self in (GGUFType.FLOAT32, GGUFType.FLOAT64)


_INTEGERS: Final = frozenset(
    {
        GGUFType.UINT8,
        GGUFType.INT8,
        GGUFType.UINT16,
        GGUFType.INT16,
        GGUFType.UINT32,
        GGUFType.INT32,
        GGUFType.UINT64,
        GGUFType.INT64,
    }
)

# The little-endian element type of arrays of numbers.
NUMPY_TYPES: Final[dict[GGUFType, np.dtype[Any]]] = {
    GGUFType.UINT8: np.dtype("u1"),
    GGUFType.INT8: np.dtype("i1"),
    GGUFType.UINT16: np.dtype("<u2"),
    GGUFType.INT16: np.dtype("<i2"),
    GGUFType.UINT32: np.dtype("<u4"),
    GGUFType.INT32: np.dtype("<i4"),
    GGUFType.FLOAT32: np.dtype("<f4"),
    GGUFType.BOOL: np.dtype("?"),
    GGUFType.UINT64: np.dtype("<u8"),
    GGUFType.INT64: np.dtype("<i8"),
    GGUFType.FLOAT64: np.dtype("<f8"),
}


class GGUFArray:
    """An array value, left in the file. `kind` is the type of its elements, `offset` where the first one begins.

    `starts` (text only) holds where each string's bytes begin, found while the file was checked; the length field of
    the next string ends the one before it.
    """

    __slots__ = ("_end", "_n", "_source", "_starts", "kind", "offset")

    def __init__(
        self, source: FileBytes, kind: GGUFType, n: int, offset: int, end: int, starts: array[int] | None = None
    ) -> None:
        self.kind = kind
        self.offset = offset
        self._source = source
        self._n = n
        self._end = end
        self._starts = starts

    def __len__(self) -> int:
        return self._n

    def __repr__(self) -> str:
        return f"GGUFArray({self.kind.name}, {self._n} elements at byte {self.offset})"

    def numpy(self) -> NDArray[Any]:
        """The numbers as a read-only array [len] over the file's own memory; TypeError for an array of strings.

        The file places arrays anywhere, so the result may be unaligned: copy it before handing its address to C.
        """
        if self.kind is GGUFType.STRING:
            raise TypeError("an array of strings has no numbers; use strings() or text()")
        dtype = NUMPY_TYPES[self.kind]
        window = self._source.view[self.offset : self._end]
        return np.frombuffer(window, dtype) if self._n else _read_only_empty(dtype)

    def strings(self) -> list[bytes]:
        """All strings as they are in the file; TypeError for an array of numbers."""
        starts, ends = self.bounds()
        return split_strings(self._source.view[self.offset : self._end], starts - self.offset, ends - self.offset)

    def bounds(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where each string begins and ends in the file, i64 [len] each; TypeError for an array of numbers."""
        starts = self._text_starts()
        if not self._n:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        first = np.frombuffer(starts, f"u{starts.itemsize}").astype(np.int64)
        return first, np.append(first[1:] - 8, self._end)

    def raw(self, index: int) -> bytes:
        """String `index` as it is in the file; IndexError outside 0 to len - 1."""
        starts = self._text_starts()
        if not 0 <= index < self._n:
            raise IndexError(f"string {index} of an array of {self._n}")
        end = starts[index + 1] - 8 if index + 1 < self._n else self._end
        return self._source.memory[starts[index] : end]

    def text(self, index: int) -> str:
        """String `index`, with U+FFFD for what is not UTF-8; IndexError outside 0 to len - 1."""
        return self.raw(index).decode("utf-8", "replace")

    def _text_starts(self) -> array[int]:
        if self._starts is None:
            raise TypeError(f"an array of {self.kind.name} has no strings; use numpy()")
        return self._starts


def _read_only_empty(dtype: np.dtype[Any]) -> NDArray[Any]:
    result = np.empty(0, dtype)
    result.flags.writeable = False
    return result


GGUFValue: TypeAlias = int | float | bool | str | GGUFArray


class TextPlace(NamedTuple):
    """Where a text lies in the file: its first byte and its length."""

    offset: int
    n_bytes: int


class Metadata(Mapping[str, GGUFValue]):
    """Key to value, in file order: a read-only mapping, and getters that check the type.

    A getter `x(key)` raises HyperparameterError when the key is missing or of another type; `find_x(key)`
    returns None when it is missing, and raises for another type just the same.
    """

    def __init__(
        self, source: FileBytes, entries: dict[str, tuple[GGUFType, int | float | TextPlace | GGUFArray]]
    ) -> None:
        self._source = source
        self._entries = entries

    def __getitem__(self, key: str) -> GGUFValue:
        value = self._entries[key][1]
        if isinstance(value, TextPlace):
            return self._bytes(value).decode("utf-8", "replace")
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: object) -> bool:
        # The inherited one would decode a text to see whether it is there.
        return key in self._entries

    def __repr__(self) -> str:
        return f"Metadata({len(self._entries)} keys)"

    def kind(self, key: str) -> GGUFType:
        """The type that the file gives `key`; KeyError if it is missing."""
        return self._entries[key][0]

    def raw(self, key: str) -> bytes:
        """A text as it is in the file, for those who must see NUL and bad UTF-8."""
        return _present(key, self._find_raw(key))

    def find_integer(self, key: str) -> int | None:
        """An integer of any width and sign (never a bool)."""
        if key not in self._entries:
            return None
        kind, value = self._entries[key]
        if not kind.is_integer or not isinstance(value, int):
            raise self._wrong(key, "an integer")
        return value

    def find_number(self, key: str) -> float | None:
        """A float of either width; it may be NaN or infinite."""
        if key not in self._entries:
            return None
        kind, value = self._entries[key]
        if not kind.is_float or not isinstance(value, float):
            raise self._wrong(key, "a float")
        return value

    def find_flag(self, key: str) -> bool | None:
        """A bool."""
        if key not in self._entries:
            return None
        value = self._entries[key][1]
        if not isinstance(value, bool):
            raise self._wrong(key, "a bool")
        return value

    def find_text(self, key: str) -> str | None:
        """A string, with U+FFFD for what is not UTF-8."""
        raw = self._find_raw(key)
        return None if raw is None else raw.decode("utf-8", "replace")

    def find_array(self, key: str, *kinds: GGUFType) -> GGUFArray | None:
        """An array whose elements are of one of `kinds` (of any type when none is named)."""
        if key not in self._entries:
            return None
        value = self._entries[key][1]
        if not isinstance(value, GGUFArray) or (kinds and value.kind not in kinds):
            names = " or ".join(kind.name for kind in kinds)
            raise self._wrong(key, f"an array of {names}" if kinds else "an array")
        return value

    def integer(self, key: str) -> int:
        """As `find_integer`, but the key must be there."""
        return _present(key, self.find_integer(key))

    def number(self, key: str) -> float:
        """As `find_number`, but the key must be there."""
        return _present(key, self.find_number(key))

    def flag(self, key: str) -> bool:
        """As `find_flag`, but the key must be there."""
        return _present(key, self.find_flag(key))

    def text(self, key: str) -> str:
        """As `find_text`, but the key must be there."""
        return _present(key, self.find_text(key))

    def array(self, key: str, *kinds: GGUFType) -> GGUFArray:
        """As `find_array`, but the key must be there."""
        return _present(key, self.find_array(key, *kinds))

    def _find_raw(self, key: str) -> bytes | None:
        if key not in self._entries:
            return None
        value = self._entries[key][1]
        if not isinstance(value, TextPlace):
            raise self._wrong(key, "a string")
        return self._bytes(value)

    def _wrong(self, key: str, wanted: str) -> HyperparameterError:
        kind, value = self._entries[key]
        found = f"an array of {value.kind.name}" if isinstance(value, GGUFArray) else kind.name
        return HyperparameterError(key, f"must be {wanted}, the file has {found}")

    def _bytes(self, place: TextPlace) -> bytes:
        return self._source.memory[place.offset : place.offset + place.n_bytes]


_T = TypeVar("_T")


def _present(key: str, value: _T | None) -> _T:
    if value is None:
        raise HyperparameterError(key, "is missing from the file")
    return value
