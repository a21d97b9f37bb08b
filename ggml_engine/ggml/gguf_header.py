"""Reads the header of one GGUF part: its metadata, and where each tensor lies. Strict; see `gguf` for what is refused.

Owns the layout of versions 2 and 3 (docs/gguf.md of ggml-org/ggml) and every structural check. Knows no key but
general.alignment, and opens nothing.

Nothing is allocated for a count or a length before that many elements are known to fit in what is left of the file;
all arithmetic is on Python ints, so nothing wraps. The caps bound the time and the objects that a header can cost.
"""

from __future__ import annotations

import struct
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ggml_engine.errors import GGUFError
from ggml_engine.ggml.gguf_magic import describe_head
from ggml_engine.ggml.gguf_metadata import NUMPY_TYPES, GGUFArray, GGUFType, Metadata, TextPlace
from ggml_engine.ggml.gguf_strings import find_strings
from ggml_engine.ggml.tensor_types import TYPES_BY_NUMBER, TensorType, describe_refusal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ggml_engine.ggml.gguf_source import FileBytes

MAX_KEYS: Final = 65_536
MAX_TENSORS: Final = 65_536
MAX_STRINGS: Final = 1 << 22  # in all arrays of strings of one part; the largest vocabularies with merges have a tenth
MAX_KEY_BYTES: Final = 65_535
MAX_NAME_BYTES: Final = 63  # ggml keeps 64 with the NUL
MAX_DIMS: Final = 4
MIN_ALIGNMENT: Final = 8  # the format asks for a multiple of 8
MAX_ALIGNMENT: Final = 1 << 20
DEFAULT_ALIGNMENT: Final = 32
ALIGNMENT_KEY: Final = "general.alignment"

# The smallest possible entry: a key of one byte with a value of one byte; a name of one byte with one dimension.
_MIN_KEY_ENTRY: Final = 8 + 1 + 4 + 1
_MIN_TENSOR_ENTRY: Final = 8 + 1 + 4 + 8 + 4 + 8

_U32: Final = struct.Struct("<I")
_U64: Final = struct.Struct("<Q")
_SCALARS: Final = {
    GGUFType.UINT8: struct.Struct("<B"),
    GGUFType.INT8: struct.Struct("<b"),
    GGUFType.UINT16: struct.Struct("<H"),
    GGUFType.INT16: struct.Struct("<h"),
    GGUFType.UINT32: struct.Struct("<I"),
    GGUFType.INT32: struct.Struct("<i"),
    GGUFType.FLOAT32: struct.Struct("<f"),
    GGUFType.UINT64: struct.Struct("<Q"),
    GGUFType.INT64: struct.Struct("<q"),
    GGUFType.FLOAT64: struct.Struct("<d"),
}
_TYPES: Final = {int(member): member for member in GGUFType}
_BOOL_PIECE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor as the file describes it.

    `shape` is in GGUF order (ne0, the contiguous axis, first) and has 1 to 4 entries; `offset` is in bytes from the
    start of part number `part`, `n_bytes` the exact size of the data there.
    """

    name: str
    shape: tuple[int, ...]
    type: TensorType
    n_bytes: int
    offset: int
    part: int


@dataclass(frozen=True, slots=True)
class Header:
    """What one part says. Its tensor data begin at `data_offset` and end at `data_end`, the last padding included."""

    version: int
    alignment: int
    metadata: Metadata
    tensors: dict[str, TensorInfo]
    data_offset: int
    data_end: int


def read_header(source: FileBytes, part: int = 0) -> Header:
    """Parse and check all of `source` but the tensors' values; GGUFError says what is wrong, and where."""
    cursor = _Cursor(source)
    version = _read_version(cursor)
    n_tensors = cursor.count("n_tensors", _MIN_TENSOR_ENTRY, MAX_TENSORS, "tensors")
    n_keys = cursor.count("n_kv", _MIN_KEY_ENTRY, MAX_KEYS, "keys")
    entries, alignment = _read_entries(cursor, n_keys)
    places = _read_tensors(cursor, n_tensors)
    data_offset = _pad(cursor.position, alignment)
    tensors: dict[str, TensorInfo] = {}
    end = data_offset
    for name, (shape, kind, offset, at) in places.items():
        info = _place_tensor(cursor, name, shape, kind, (data_offset, offset, end, at), part)
        tensors[name] = info
        end = _pad(info.offset + info.n_bytes - data_offset, alignment) + data_offset
    return Header(version, alignment, Metadata(source, entries), tensors, data_offset, end)


def _pad(n: int, alignment: int) -> int:
    return -(-n // alignment) * alignment


class _Cursor:
    """Reads forward through the file, and knows how to complain."""

    __slots__ = ("memory", "n_strings", "path", "position", "size", "source")

    def __init__(self, source: FileBytes) -> None:
        self.source = source
        self.path = source.path
        self.memory = source.memory
        self.size = source.n_bytes
        self.position = 0
        self.n_strings = 0

    def error(self, code: str, field: str, reason: str, at: int | None = None) -> GGUFError:
        return GGUFError(code, self.path, self.position if at is None else at, field, reason)

    def need(self, n_bytes: int, field: str) -> int:
        """Step over `n_bytes`; their offset."""
        start = self.position
        if n_bytes > self.size - start:
            raise self.error("truncated", field, f"{n_bytes} bytes are needed, the file has {self.size - start} left")
        self.position = start + n_bytes
        return start

    def u32(self, field: str) -> int:
        value: int = _U32.unpack_from(self.memory, self.need(4, field))[0]
        return value

    def u64(self, field: str) -> int:
        value: int = _U64.unpack_from(self.memory, self.need(8, field))[0]
        return value

    def count(self, field: str, min_bytes: int, limit: int, what: str) -> int:
        """A u64 count of entries of at least `min_bytes` each."""
        at = self.position
        n = self.u64(field)
        room = self.size - self.position
        if n * min_bytes > room:
            raise self.error("truncated", field, f"{n} {what} cannot fit in the {room} bytes that are left", at)
        if n > limit:
            raise self.error("too-many", field, f"{n} {what}, at most {limit} are read", at)
        return n

    def text_place(self, field: str) -> TextPlace:
        """Step over a string."""
        at = self.position
        n_bytes = self.u64(field)
        room = self.size - self.position
        if n_bytes > room:
            raise self.error("truncated", field, f"a string of {n_bytes} bytes, the file has {room} left", at)
        place = TextPlace(self.position, n_bytes)
        self.position += n_bytes
        return place

    def short_text(self, field: str, limit: int, code: str) -> bytes:
        """A string of 1 to `limit` bytes."""
        at = self.position
        n_bytes = self.u64(field)
        if not 1 <= n_bytes <= limit:
            raise self.error(code, field, f"has {n_bytes} bytes, allowed are 1 to {limit}", at)
        start = self.need(n_bytes, field)
        return self.memory[start : start + n_bytes]


def _read_version(cursor: _Cursor) -> int:
    head = cursor.memory[:512]
    if head[:4] != b"GGUF"[: len(head)]:
        raise cursor.error("bad-magic", "magic", f"is not a GGUF file but {describe_head(head)}")
    cursor.need(4, "magic")
    version = cursor.u32("version")
    if version in (2, 3):
        return version
    if 0 < int.from_bytes(version.to_bytes(4, "little"), "big") < 1 << 16:
        raise cursor.error("big-endian", "version", "is a big-endian GGUF, only little-endian ones can be read", 4)
    advice = "; convert it again with a current converter" if version == 1 else ""
    raise cursor.error("bad-version", "version", f"is GGUF version {version}, 2 and 3 can be read{advice}", 4)


_Entries = dict[str, "tuple[GGUFType, int | float | TextPlace | GGUFArray]"]


def _read_entries(cursor: _Cursor, n_keys: int) -> tuple[_Entries, int]:
    entries: _Entries = {}
    alignment = DEFAULT_ALIGNMENT
    for number in range(n_keys):
        at = cursor.position
        key = _read_key(cursor, f"key {number}")
        if key in entries:
            raise cursor.error("duplicate-key", f"key {number}", f"the key {key!r} is there twice", at)
        at = cursor.position
        kind = _read_type(cursor, key)
        entries[key] = kind, _read_value(cursor, key, kind)
        if key == ALIGNMENT_KEY:
            alignment = _check_alignment(cursor, *entries[key], at)
    return entries, alignment


def _read_key(cursor: _Cursor, field: str) -> str:
    at = cursor.position
    raw = cursor.short_text(field, MAX_KEY_BYTES, "bad-key")
    key = raw.decode("latin-1")
    if not (key.isascii() and key.isprintable()):
        raise cursor.error("bad-key", field, f"the key {raw[:64]!r} is not printable ASCII", at)
    return key


def _read_type(cursor: _Cursor, key: str) -> GGUFType:
    number = cursor.u32(key)
    kind = _TYPES.get(number)
    if kind is None:
        raise cursor.error("bad-value-type", key, f"{number} is not a type of value", cursor.position - 4)
    return kind


def _read_value(cursor: _Cursor, key: str, kind: GGUFType) -> int | float | TextPlace | GGUFArray:
    if kind is GGUFType.STRING:
        return cursor.text_place(key)
    if kind is GGUFType.ARRAY:
        return _read_array(cursor, key)
    if kind is GGUFType.BOOL:
        _check_bools(cursor, key, cursor.need(1, key))
        return cursor.memory[cursor.position - 1] == 1
    scalar = _SCALARS[kind]
    value: int | float = scalar.unpack_from(cursor.memory, cursor.need(scalar.size, key))[0]
    return value


def _read_array(cursor: _Cursor, key: str) -> GGUFArray:
    at = cursor.position
    kind = _read_type(cursor, key)
    if kind is GGUFType.ARRAY:
        raise cursor.error("nested-array", key, "is an array of arrays", at)
    at = cursor.position
    n = cursor.u64(key)
    element_bytes = 8 if kind is GGUFType.STRING else NUMPY_TYPES[kind].itemsize
    room = cursor.size - cursor.position
    if n * element_bytes > room:
        reason = f"{n} elements of {kind.name} cannot fit in the {room} bytes that are left"
        raise cursor.error("truncated", key, reason, at)
    if kind is GGUFType.STRING:
        return _read_strings(cursor, key, n, at)
    start = cursor.need(n * element_bytes, key)
    if kind is GGUFType.BOOL:
        _check_bools(cursor, key, start)
    return GGUFArray(cursor.source, kind, n, start, cursor.position)


def _read_strings(cursor: _Cursor, key: str, n: int, at: int) -> GGUFArray:
    cursor.n_strings += n
    if cursor.n_strings > MAX_STRINGS:
        reason = f"{cursor.n_strings} strings in arrays, at most {MAX_STRINGS} are read"
        raise cursor.error("too-many", key, reason, at)
    begin = cursor.position
    # Four or eight bytes for a string that takes at least eight in the file.
    starts = array("I" if cursor.size < 1 << 32 else "Q", (0,)) * n
    n_found, position = find_strings(cursor.source, begin, starts)
    if n_found < n or position > cursor.size:
        raise _string_error(cursor, key, starts, n_found - 1)
    cursor.position = position
    return GGUFArray(cursor.source, GGUFType.STRING, n, begin, position, starts)


def _string_error(cursor: _Cursor, key: str, starts: array[int], index: int) -> GGUFError:
    at = starts[index] - 8
    n_bytes: int = _U64.unpack_from(cursor.memory, at)[0]
    room = cursor.size - at - 8
    if n_bytes > room:
        reason = f"string {index} of {len(starts)} has {n_bytes} bytes, the file has {room} left"
        return cursor.error("truncated", key, reason, at)
    reason = f"string {index + 1} of {len(starts)} has no room for its length, the file has {room - n_bytes} bytes left"
    return cursor.error("truncated", key, reason, at + 8 + n_bytes)


def _check_bools(cursor: _Cursor, key: str, start: int) -> None:
    for begin in range(start, cursor.position, _BOOL_PIECE):
        end = min(begin + _BOOL_PIECE, cursor.position)
        rest = cursor.memory[begin:end].lstrip(b"\x00\x01")
        if rest:
            raise cursor.error("bad-bool", key, f"a bool is 0 or 1, not {rest[0]}", end - len(rest))


def _check_alignment(cursor: _Cursor, kind: GGUFType, value: int | float | TextPlace | GGUFArray, at: int) -> int:
    if kind is not GGUFType.UINT32 or not isinstance(value, int):
        raise cursor.error("bad-alignment", ALIGNMENT_KEY, f"must be UINT32, the file has {kind.name}", at)
    if not MIN_ALIGNMENT <= value <= MAX_ALIGNMENT or value & (value - 1):
        reason = f"must be a power of two from {MIN_ALIGNMENT} to {MAX_ALIGNMENT}, not {value}"
        raise cursor.error("bad-alignment", ALIGNMENT_KEY, reason, at)
    return value


# name: shape, type, offset in the data section, and where that offset stands in the file
_Places = dict[str, tuple[tuple[int, ...], TensorType, int, int]]


def _read_tensors(cursor: _Cursor, n_tensors: int) -> _Places:
    places: _Places = {}
    for number in range(n_tensors):
        at = cursor.position
        name = _read_tensor_name(cursor, f"name of tensor {number}")
        if name in places:
            raise cursor.error("duplicate-tensor", f"tensor {number}", f"the tensor {name!r} is there twice", at)
        field = f"tensor {name!r}"
        shape = _read_shape(cursor, field)
        kind = _read_tensor_type(cursor, field, shape)
        at = cursor.position
        places[name] = shape, kind, cursor.u64(field), at
    return places


def _read_tensor_name(cursor: _Cursor, field: str) -> str:
    at = cursor.position
    raw = cursor.short_text(field, MAX_NAME_BYTES, "bad-tensor-name")
    try:
        name = raw.decode("utf-8")
    except UnicodeDecodeError:
        raise cursor.error("bad-tensor-name", field, f"the name {raw!r} is not UTF-8", at) from None
    if "\0" in name:
        raise cursor.error("bad-tensor-name", field, f"the name {name!r} holds a NUL", at)
    return name


def _read_shape(cursor: _Cursor, field: str) -> tuple[int, ...]:
    at = cursor.position
    n_dims = cursor.u32(field)
    if not 1 <= n_dims <= MAX_DIMS:
        raise cursor.error("bad-shape", field, f"has {n_dims} dimensions, allowed are 1 to {MAX_DIMS}", at)
    at = cursor.position
    shape: tuple[int, ...] = struct.unpack_from(f"<{n_dims}q", cursor.memory, cursor.need(8 * n_dims, field))
    if min(shape) < 1:
        raise cursor.error("bad-shape", field, f"has the shape {shape}, every dimension must be at least 1", at)
    return shape


def _read_tensor_type(cursor: _Cursor, field: str, shape: Sequence[int]) -> TensorType:
    at = cursor.position
    number = cursor.u32(field)
    kind = TYPES_BY_NUMBER.get(number)
    if kind is None:
        raise cursor.error("bad-tensor-type", field, describe_refusal(number), at)
    if shape[0] % kind.block_size:
        reason = f"rows of {shape[0]} elements are not whole {kind.name} blocks of {kind.block_size}"
        raise cursor.error("bad-shape", field, reason, at)
    return kind


def _place_tensor(
    cursor: _Cursor,
    name: str,
    shape: tuple[int, ...],
    kind: TensorType,
    place: tuple[int, int, int, int],
    part: int,
) -> TensorInfo:
    data_offset, offset, expected, at = place
    field = f"tensor {name!r}"
    if data_offset + offset != expected:
        reason = f"its data are said to be at {offset}, the tensors before it end at {expected - data_offset}"
        raise cursor.error("bad-offset", field, reason, at)
    n_bytes = kind.tensor_bytes(shape)
    if n_bytes > cursor.size - expected:
        room = max(cursor.size - expected, 0)
        reason = f"its {n_bytes} bytes of data start at {expected}, the file has {room} from there"
        raise cursor.error("data-beyond-file", field, reason, min(expected, cursor.size))
    return TensorInfo(name, shape, kind, n_bytes, expected, part)
