"""Reading and writing a saved state, in parts, on the caller's thread.

A file is read twice: once to check it whole, before anything is made of it, and once for its rows. Its checksum is
compared each time, so that a file that changes in between is noticed before its sessions can be used.
"""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ggml_engine.control.deadline import Deadline
from ggml_engine.control.saved_format import (
    DIGEST_BYTES,
    HEAD,
    MAGIC,
    MAX_METADATA_BYTES,
    VERSION,
    FormatError,
    SavedState,
    decode_metadata,
    decode_tables,
    encode_head,
)
from ggml_engine.control.saved_names import replacing
from ggml_engine.errors import SavedStateError
from ggml_engine.executor.image import Rows

PART_BYTES = 4 << 20  # copied between two forwards in a few milliseconds


def rows_of_a_part(row_bytes: int) -> int:
    """How many rows are moved at once."""
    return max(1, PART_BYTES // max(1, row_bytes))


def write_state(path: Path, state: SavedState, read: Callable[[int, int], Rows], deadline: Deadline) -> None:
    """Write a state whose rows `read(start, n)` gives. Raises SavedStateError, TimeoutError, and what `read` does."""
    try:
        head = encode_head(state)
    except FormatError as error:
        raise SavedStateError("unsavable", path, str(error)) from None
    n_part = rows_of_a_part(state.image.row_bytes)
    with replacing(path) as file:
        digest = hashlib.sha256(head)
        file.write(head)
        for start in range(0, state.image.n_rows, n_part):
            deadline.left()
            rows = read(start, min(n_part, state.image.n_rows - start))
            data = np.ascontiguousarray(rows).reshape(-1).data
            digest.update(data)
            file.write(data)
        file.write(digest.digest())


class SavedFile:
    """A file that was found whole: its checksum and everything before its rows were checked."""

    def __init__(self, path: Path, file: BinaryIO, head: bytes, state: SavedState) -> None:
        self.path = path
        self.state = state
        self._file = file
        self._head = head

    def parts(self, deadline: Deadline) -> Iterator[tuple[int, Rows]]:
        """The rows in parts, each with the number of its first row.

        Raises SavedStateError (damaged) at the end when the file is not what was checked.
        """
        image = self.state.image
        n_part = rows_of_a_part(image.row_bytes)
        digest = hashlib.sha256(self._head)
        self._file.seek(len(self._head))
        for start in range(0, image.n_rows, n_part):
            deadline.left()
            n = min(n_part, image.n_rows - start)
            data = _read(self.path, self._file, n * image.row_bytes)
            digest.update(data)
            yield start, np.frombuffer(data, np.uint8).reshape(n, image.row_bytes)
        if self._file.read(DIGEST_BYTES) != digest.digest():
            raise SavedStateError("damaged", self.path, "it was changed while it was read")


@contextmanager
def open_saved(path: Path, deadline: Deadline) -> Iterator[SavedFile]:
    """Open a file and check it whole. Raises SavedStateError and TimeoutError."""
    try:
        # a pipe or a device of that name must not hold us up
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise SavedStateError("missing", path, "there is no such file") from None
    except OSError as error:
        raise SavedStateError("io", path, f"it cannot be opened: {error}") from error
    try:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            os.close(number)
            raise SavedStateError("foreign", path, "it is no regular file")
        with open(number, "rb") as file:
            yield _checked(path, file, deadline)
    except TimeoutError:  # an OSError too
        raise
    except OSError as error:
        raise SavedStateError("io", path, f"it cannot be read: {error}") from error


def _checked(path: Path, file: BinaryIO, deadline: Deadline) -> SavedFile:
    n_there = os.fstat(file.fileno()).st_size
    begin = file.read(HEAD.size)
    if not begin.startswith(MAGIC[: len(begin)]) or not begin:
        raise SavedStateError("foreign", path, "it is no saved session or prefix cache")
    if len(begin) < HEAD.size:
        raise SavedStateError("damaged", path, f"it ends after {len(begin)} bytes")
    _, version, n_metadata, n_bytes = HEAD.unpack(begin)
    if version != VERSION:
        raise SavedStateError("version", path, f"it has version {version} of the format, {VERSION} can be read")
    if n_bytes != n_there:
        raise SavedStateError("damaged", path, f"it was written with {n_bytes} bytes and has {n_there}")
    if n_metadata > MAX_METADATA_BYTES or HEAD.size + n_metadata + DIGEST_BYTES > n_bytes:
        raise SavedStateError("damaged", path, f"it says that it has {n_metadata} bytes of metadata")
    _check_digest(path, file, n_bytes - DIGEST_BYTES, deadline)
    file.seek(HEAD.size)
    text = _read(path, file, n_metadata)
    try:
        metadata = decode_metadata(text)
        there = n_bytes - HEAD.size - n_metadata - DIGEST_BYTES
        if metadata.table_bytes + metadata.row_data_bytes != there:
            said = metadata.table_bytes + metadata.row_data_bytes
            raise FormatError(f"its metadata speak of {said} bytes of tables and rows, there are {there}")
        tables = _read(path, file, metadata.table_bytes)
        return SavedFile(path, file, begin + text + tables, decode_tables(metadata, tables))
    except FormatError as error:
        raise SavedStateError("damaged", path, str(error)) from None


def _check_digest(path: Path, file: BinaryIO, n_bytes: int, deadline: Deadline) -> None:
    digest = hashlib.sha256()
    file.seek(0)
    for start in range(0, n_bytes, PART_BYTES):
        deadline.left()
        digest.update(_read(path, file, min(PART_BYTES, n_bytes - start)))
    if file.read(DIGEST_BYTES) != digest.digest():
        raise SavedStateError("damaged", path, "its checksum is another one: it was altered")


def _read(path: Path, file: BinaryIO, n_bytes: int) -> bytes:
    data = file.read(n_bytes)
    if len(data) < n_bytes:
        raise SavedStateError("damaged", path, f"{n_bytes} bytes were expected, {len(data)} are there")
    return data
