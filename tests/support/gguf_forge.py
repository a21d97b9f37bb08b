"""Writes GGUF files byte by byte, right or wrong, for tests. Shares nothing with the parser: both cannot err alike.

    forge = GGUFForge()
    forge.put("llama.block_count", 2)  # int: u32, float: f32, bool, str, bytes, list, numpy array; or kind=FLOAT64
    forge.tensor("output.weight", numpy_array)  # floats or integers, shape as numpy has it
    forge.tensor("w", shape=(32, 2), kind=2, data=bytes(36))  # anything, shape in GGUF order (ne0 first)
    path = forge.write(tmp_path / "m.gguf")

`build()` gives an `Image`: the bytes and the place of each field ("n_kv", "kv.<key>.value", "tensor.<name>.offset", ...),
so that a test can `overwrite` one. Everything a file says can be a lie: `n_kv`, `n_tensors`, `version`, `magic`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

UINT8, INT8, UINT16, INT16, UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY, UINT64, INT64, FLOAT64 = range(13)
_FORMATS = {
    UINT8: "B",
    INT8: "b",
    UINT16: "H",
    INT16: "h",
    UINT32: "I",
    INT32: "i",
    FLOAT32: "f",
    BOOL: "B",
    UINT64: "Q",
    INT64: "q",
    FLOAT64: "d",
}
_NUMPY_KINDS = {
    "uint8": UINT8,
    "int8": INT8,
    "uint16": UINT16,
    "int16": INT16,
    "uint32": UINT32,
    "int32": INT32,
    "float32": FLOAT32,
    "bool": BOOL,
    "uint64": UINT64,
    "int64": INT64,
    "float64": FLOAT64,
}
# ggml's numbers of tensor types that numpy has.
TENSOR_KINDS = {"float32": 0, "float16": 1, "int8": 24, "int16": 25, "int32": 26, "int64": 27, "float64": 28}


class Field(NamedTuple):
    """A number in the file: its name, first byte and width in bytes."""

    name: str
    offset: int
    width: int


@dataclass(frozen=True)
class Image:
    """A file's bytes, the size of its header (without padding), and its number fields."""

    data: bytes
    header_bytes: int
    fields: tuple[Field, ...]

    def field(self, name: str) -> Field:
        found = [field for field in self.fields if field.name == name]
        if len(found) != 1:
            raise LookupError(f"{len(found)} fields {name!r} among {[field.name for field in self.fields]}")
        return found[0]

    def overwrite(self, name: str, value: int) -> bytes:
        """The file with one field changed; a value that is too large is cut to the field's width."""
        _, offset, width = self.field(name)
        new = (value % (1 << 8 * width)).to_bytes(width, "little")
        return self.data[:offset] + new + self.data[offset + width :]

    def cut(self, n_bytes: int) -> bytes:
        return self.data[:n_bytes]


class _Writer:
    def __init__(self) -> None:
        self.data = bytearray()
        self.fields: list[Field] = []

    def number(self, name: str, code: str, value: float) -> None:
        packed = struct.pack("<" + code, value)
        self.fields.append(Field(name, len(self.data), len(packed)))
        self.data += packed

    def text(self, name: str, value: str | bytes) -> None:
        raw = value.encode() if isinstance(value, str) else value
        self.number(f"{name}.length", "Q", len(raw))
        self.data += raw

    def pad(self, alignment: int) -> None:
        self.data += bytes(-len(self.data) % alignment)


@dataclass
class _Value:
    key: str | bytes
    kind: int
    element_kind: int | None
    value: Any

    @property
    def label(self) -> str:
        return self.key if isinstance(self.key, str) else self.key.decode("latin-1")

    def write(self, out: _Writer) -> None:
        name = f"kv.{self.label}"
        out.text(f"{name}.key", self.key)
        out.number(f"{name}.type", "I", self.kind)
        if self.kind == ARRAY:
            self._write_array(out, name)
        elif self.kind == STRING:
            out.text(f"{name}.value", self.value)
        elif self.kind in _FORMATS:
            out.number(f"{name}.value", _FORMATS[self.kind], self.value)
        else:
            out.data += self.value  # an unknown type: the bytes as given

    def _write_array(self, out: _Writer, name: str) -> None:
        kind = UINT8 if self.element_kind is None else self.element_kind
        out.number(f"{name}.element_type", "I", kind)
        out.number(f"{name}.count", "Q", len(self.value))
        if isinstance(self.value, np.ndarray | bytes):
            out.data += bytes(self.value.data) if isinstance(self.value, np.ndarray) else self.value
            return
        for index, element in enumerate(self.value):
            if kind == STRING:
                out.text(f"{name}.{index}", element)
            else:
                out.data += struct.pack("<" + _FORMATS[kind], element)


@dataclass
class _Tensor:
    name: str | bytes
    shape: tuple[int, ...]
    kind: int
    data: bytes
    offset: int | None


def _kind_of(value: object) -> int:
    kinds = ((bool, BOOL), (int, UINT32), (float, FLOAT32), (str, STRING), (bytes, STRING))
    for python_type, kind in kinds:
        if isinstance(value, python_type):
            return kind
    return ARRAY


@dataclass
class GGUFForge:
    """Collects keys and tensors in order; see the module's docstring."""

    magic: bytes = b"GGUF"
    version: int = 3
    alignment: int = 32  # of the layout; not written as a key unless put() there
    n_kv: int | None = None  # None: the true number
    n_tensors: int | None = None
    values: list[_Value] = field(default_factory=list)
    tensors: list[_Tensor] = field(default_factory=list)

    def put(self, key: str | bytes, value: Any, *, kind: int | None = None, element_kind: int | None = None) -> None:
        """Add a key. Lists take their element type from the first element, numpy arrays from their dtype."""
        kind = _kind_of(value) if kind is None else kind
        if kind == ARRAY and element_kind is None:
            element_kind = _NUMPY_KINDS[value.dtype.name] if isinstance(value, np.ndarray) else _kind_of(value[0])
        self.values.append(_Value(key, kind, element_kind, value))

    def tensor(
        self,
        name: str | bytes,
        array: np.ndarray | None = None,
        *,
        shape: tuple[int, ...] | None = None,
        kind: int | None = None,
        data: bytes | None = None,
        offset: int | None = None,
    ) -> None:
        """Add a tensor from an array, or from parts (shape in GGUF order); `offset` None is the right one."""
        if array is not None:
            shape = tuple(reversed(array.shape)) if shape is None else shape
            kind = TENSOR_KINDS[array.dtype.name] if kind is None else kind
            data = np.ascontiguousarray(array).tobytes() if data is None else data
        if shape is None or kind is None or data is None:
            raise TypeError("give an array, or shape, kind and data")
        self.tensors.append(_Tensor(name, shape, kind, data, offset))

    def build(self) -> Image:
        out = _Writer()
        out.data += self.magic
        out.number("version", "I", self.version)
        out.number("n_tensors", "Q", len(self.tensors) if self.n_tensors is None else self.n_tensors)
        out.number("n_kv", "Q", len(self.values) if self.n_kv is None else self.n_kv)
        for value in self.values:
            value.write(out)
        data_bytes = 0
        for tensor in self.tensors:
            self._write_tensor(out, tensor, data_bytes)
            data_bytes += -(-len(tensor.data) // self.alignment) * self.alignment
        header_bytes = len(out.data)
        out.pad(self.alignment)
        for tensor in self.tensors:
            out.data += tensor.data
            out.pad(self.alignment)
        return Image(bytes(out.data), header_bytes, tuple(out.fields))

    def write(self, path: Path) -> Path:
        path.write_bytes(self.build().data)
        return path

    @staticmethod
    def _write_tensor(out: _Writer, tensor: _Tensor, data_bytes: int) -> None:
        label = tensor.name if isinstance(tensor.name, str) else tensor.name.decode("latin-1")
        name = f"tensor.{label}"
        out.text(f"{name}.name", tensor.name)
        out.number(f"{name}.n_dims", "I", len(tensor.shape))
        for axis, n in enumerate(tensor.shape):
            out.number(f"{name}.ne{axis}", "Q", n % (1 << 64))
        out.number(f"{name}.type", "I", tensor.kind % (1 << 32))
        out.number(f"{name}.offset", "Q", data_bytes if tensor.offset is None else tensor.offset)


def tiny_forge() -> GGUFForge:
    """A small valid file: keys of all shapes, three tensors (f32, q4_0, f16)."""
    forge = GGUFForge()
    forge.put("general.architecture", "llama")
    forge.put("general.alignment", 32)
    forge.put("tokenizer.ggml.tokens", ["<s>", "a", ""])
    forge.put("tokenizer.ggml.scores", np.array([0.0, -1.0, -2.5], np.float32))
    forge.put("llama.flag", True)
    forge.tensor("a.weight", np.arange(12, dtype=np.float32).reshape(3, 4))
    forge.tensor("b.weight", shape=(32, 2), kind=2, data=bytes(range(36)))
    forge.tensor("c.weight", np.arange(3, dtype=np.float16))
    return forge
