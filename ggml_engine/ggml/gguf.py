"""`GGUFFile`: a model file, single or in parts, opened and checked. The engine's own strict parser, in Python alone.

Whatever is opened here is structurally sound: each tensor lies inside its file and has a type and shape that ggml can
take. Whatever is not raises one GGUFError, quickly, with no handle left open. Refused, where others differ: version 1
and big-endian files; keys that are empty, over 65,535 bytes or not printable ASCII; bools other than 0 and 1; arrays of
arrays; alignments other than a power of two from 8 to 2^20; tensor names other than 1 to 63 bytes of UTF-8 without
NUL; zero dimensions; offsets that are not the padded sum of the sizes before; over 65,536 keys or tensors, or 2^22
strings. Free text may hold anything. Bytes after the end give a warning. Values are not looked at: what a key or a
tensor must be for a model to run is for `models` and `vocab`.
"""

from __future__ import annotations

import logging
import os
import re
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from ggml_engine.errors import ClosedError, GGUFError, WeightError
from ggml_engine.ggml.gguf_header import Header, TensorInfo, read_header
from ggml_engine.ggml.gguf_metadata import GGUFArray, GGUFType, GGUFValue, Metadata
from ggml_engine.ggml.gguf_source import FileBytes
from ggml_engine.ggml.tensor_types import TensorType

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

__all__ = ["GGUFArray", "GGUFFile", "GGUFPart", "GGUFType", "GGUFValue", "Metadata", "TensorInfo", "TensorType"]

logger = logging.getLogger("ggml_engine.gguf")

MAX_PARTS: Final = 1024
_SPLIT_NUMBER: Final = "split.no"
_SPLIT_COUNT: Final = "split.count"
_SPLIT_TENSORS: Final = "split.tensors.count"
_PART_NAME: Final = re.compile(r"(?P<stem>.*)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})\.gguf", re.DOTALL)


@dataclass(frozen=True, slots=True)
class GGUFPart:
    """One file of a model. Its tensor data begin at `data_offset`; offsets of its tensors are from its start."""

    path: str
    n_bytes: int
    version: int
    alignment: int
    data_offset: int
    source: FileBytes

    @property
    def buffer(self) -> memoryview:
        """The whole file, read-only, starting at a page boundary; ClosedError after the file was closed."""
        return self.source.view


class GGUFFile:
    """An open GGUF. `path`, `version`, `alignment` and `metadata` are those of the first part.

    `tensors` are in file order, part after part; `n_bytes` is the size of all parts; `warnings` are for people.
    """

    def __init__(self, parts: Sequence[tuple[FileBytes, Header]]) -> None:
        source, header = parts[0]
        self.path: str = source.path
        self.version: int = header.version
        self.alignment: int = header.alignment
        self.metadata: Metadata = header.metadata
        self.parts: tuple[GGUFPart, ...] = tuple(
            GGUFPart(source.path, source.n_bytes, header.version, header.alignment, header.data_offset, source)
            for source, header in parts
        )
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(_join_tensors(parts))
        self.n_bytes: int = sum(source.n_bytes for source, _ in parts)
        self.warnings: list[str] = []
        for source, header in parts:
            if source.n_bytes > header.data_end:
                extra = source.n_bytes - header.data_end
                self._warn(f"{source.path}: {extra} bytes after the end of the model (byte {header.data_end})")

    @classmethod
    def open(cls, path: str | bytes | os.PathLike[str], *, mmap: bool = True) -> GGUFFile:
        """Open and check the file at `path`; any part of a split model opens all its parts.

        The parts are mapped, so a file that changes later changes under the reader, and one that shrinks kills the
        process (SIGBUS); `mmap=False` reads them into memory at once. GGUFError for whatever is not a whole,
        well-formed GGUF; its `code` tells which: "not-found", "not-a-file", "unreadable", "empty", "bad-magic",
        "big-endian", "bad-version", "truncated", "too-many", "bad-key", "duplicate-key", "bad-value-type",
        "nested-array", "bad-bool", "bad-alignment", "bad-tensor-name", "duplicate-tensor", "bad-shape",
        "bad-tensor-type", "bad-offset", "data-beyond-file", "bad-split", "missing-part".
        """
        with ExitStack() as undo:
            source = FileBytes.open(path, mapped=mmap)
            undo.callback(source.close)
            header = read_header(source)
            number, count = _read_split(source, header)
            parts = [(source, header)]
            if count > 1:
                parts = _open_parts((source, header), number, count, undo, mapped=mmap)
            opened = cls(parts)
            undo.pop_all()
        return opened

    def kind(self, key: str) -> GGUFType:
        """The type that the file gives the metadata value `key`; KeyError if there is none."""
        return self.metadata.kind(key)

    def tensor_bytes(self, name: str) -> memoryview:
        """The data of a tensor: a read-only view of the file's memory (nothing is copied), `n_bytes` long.

        WeightError for a name that the file does not have, ClosedError after `close`.
        """
        info = self.tensors.get(name)
        if info is None:
            raise WeightError(name, f"is not among the {len(self.tensors)} tensors of {self.path}")
        return self.parts[info.part].buffer[info.offset : info.offset + info.n_bytes]

    @property
    def closed(self) -> bool:
        return self.parts[0].source.closed

    def close(self) -> None:
        """Give handles and memory back; may be called again. Views and arrays taken before stay valid.

        They keep their part's mapping until the last of them is gone. Afterwards the tensors' data, and text and arrays
        of the metadata, raise ClosedError.
        """
        for part in self.parts:
            part.source.close()

    def __enter__(self) -> GGUFFile:
        if self.closed:
            raise ClosedError(f"{self.path} was closed")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"{len(self.parts)} part(s)"
        return f"GGUFFile({self.path!r}, {len(self.metadata)} keys, {len(self.tensors)} tensors, {state})"

    def _warn(self, text: str) -> None:
        self.warnings.append(text)
        logger.warning("%s", text)


def _join_tensors(parts: Sequence[tuple[FileBytes, Header]]) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for source, header in parts:
        for name, info in header.tensors.items():
            if name in tensors:
                reason = f"is also in part {tensors[name].part + 1}, {parts[tensors[name].part][0].path}"
                raise GGUFError("duplicate-tensor", source.path, info.offset, f"tensor {name!r}", reason)
            tensors[name] = info
    return tensors


def _split_error(source: FileBytes, field: str, reason: str, code: str = "bad-split") -> GGUFError:
    return GGUFError(code, source.path, 0, field, reason)


def _split_integer(source: FileBytes, header: Header, key: str) -> int | None:
    if key not in header.metadata:
        return None
    value = header.metadata[key]
    if not header.metadata.kind(key).is_integer or not isinstance(value, int):
        raise _split_error(source, key, f"must be an integer, the file has {header.metadata.kind(key).name}")
    return value


def _read_split(source: FileBytes, header: Header) -> tuple[int, int]:
    """Which part this is (from 0), and of how many. llama-gguf-split writes a count of 0 into files that it merged."""
    number = _split_integer(source, header, _SPLIT_NUMBER)
    count = _split_integer(source, header, _SPLIT_COUNT)
    if count is None or count in (0, 1):
        if number:
            raise _split_error(source, _SPLIT_NUMBER, f"is {number} in a file that is not split")
        return 0, 1
    if not 0 < count <= MAX_PARTS:
        raise _split_error(source, _SPLIT_COUNT, f"is {count}, allowed are 1 to {MAX_PARTS}")
    if number is None or not 0 <= number < count:
        raise _split_error(source, _SPLIT_NUMBER, f"is {number}, a file of {count} parts has 0 to {count - 1}")
    return number, count


def _open_parts(
    given: tuple[FileBytes, Header], number: int, count: int, undo: ExitStack, *, mapped: bool
) -> list[tuple[FileBytes, Header]]:
    paths = _part_paths(given[0], number, count)
    parts = []
    for index, path in enumerate(paths):
        if index == number:
            source, header = given
            header = _renumbered(header, index)
        else:
            source = _open_part(given[0], path, index, count, mapped=mapped)
            undo.callback(source.close)
            header = read_header(source, index)
        found = _read_split(source, header)
        if found != (index, count):
            reason = f"says it is part {found[0] + 1} of {found[1]}, its name says {index + 1} of {count}"
            raise _split_error(source, _SPLIT_NUMBER, reason)
        parts.append((source, header))
    _check_tensor_count(parts)
    return parts


def _part_paths(source: FileBytes, number: int, count: int) -> list[str]:
    folder, name = os.path.split(source.path)
    match = _PART_NAME.fullmatch(name)
    if match is None or (int(match["number"]), int(match["count"])) != (number + 1, count):
        wanted = f"-{number + 1:05}-of-{count:05}.gguf"
        reason = f"is part {number + 1} of {count}; to find the others its name must end in {wanted}"
        raise _split_error(source, _SPLIT_COUNT, reason)
    return [os.path.join(folder, f"{match['stem']}-{index + 1:05}-of-{count:05}.gguf") for index in range(count)]


def _open_part(given: FileBytes, path: str, index: int, count: int, *, mapped: bool) -> FileBytes:
    try:
        return FileBytes.open(path, mapped=mapped)
    except GGUFError as error:
        if error.code != "not-found":
            raise
    name = os.path.basename(path)
    raise _split_error(given, _SPLIT_COUNT, f"part {index + 1} of {count} is missing: {name}", "missing-part")


def _renumbered(header: Header, part: int) -> Header:
    tensors = {name: replace(info, part=part) for name, info in header.tensors.items()}
    return replace(header, tensors=tensors)


def _check_tensor_count(parts: Sequence[tuple[FileBytes, Header]]) -> None:
    found = sum(len(header.tensors) for _, header in parts)
    for source, header in parts:
        declared = _split_integer(source, header, _SPLIT_TENSORS)
        if declared is None and source is parts[0][0]:
            raise _split_error(source, _SPLIT_TENSORS, "is missing from the first part")
        if declared is not None and declared != found:
            raise _split_error(source, _SPLIT_TENSORS, f"is {declared}, the {len(parts)} parts hold {found} tensors")
