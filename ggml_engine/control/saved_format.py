"""The form of a saved state: what stands before its rows, and what is checked of it (docs/saved-state.md).

All numbers are little-endian. Does not know: files, sessions, and what a row is.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ggml_engine.executor.image import KvImage

MAGIC = b"\x89GGKV\r\n\x1a"
VERSION = 1
HEAD = struct.Struct("<8sIIQ")  # magic, version, bytes of the metadata, bytes of the file
DIGEST_BYTES = 32  # SHA-256 of all that comes before
MAX_METADATA_BYTES = 4 << 20
_MAX_COUNT = 1 << 48  # so that no sum of sizes is a number that cannot be one


class FormatError(ValueError):
    """Bytes are no saved state; the reader says of which file."""


@dataclass(frozen=True, slots=True, eq=False)
class SavedSequence:
    """One sequence: `tokens` i32 [positions], its pending token if there is one, and the caller's metadata."""

    tokens: npt.NDArray[np.int32]
    pending: int | None = None
    metadata: object = None


@dataclass(frozen=True, slots=True, eq=False)
class SavedState:
    """All of a saved state but its rows. `kind` is session or prefix-cache; `sequences` are those of `image`."""

    kind: str
    fingerprint: str
    made_for: Mapping[str, str]
    image: KvImage
    sequences: tuple[SavedSequence, ...]


# ---- writing


def encode_json(value: object) -> bytes:
    """JSON that says exactly this value. Raises FormatError for what would come back as something else."""
    try:
        text = json.dumps(value, allow_nan=False, separators=(",", ":"))
        is_same = json.loads(text) == value
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"it is not JSON: {error}") from None
    if not is_same:
        raise FormatError("it does not come back from JSON as it was (tuples, keys that are no text)")
    return text.encode()


def encode_head(state: SavedState) -> bytes:
    """Everything before the rows. Raises FormatError for metadata that are not JSON, or too much of it."""
    sequences = [
        {
            "n_tokens": int(each.tokens.size),
            "n_rows": int(table.size),
            "pending": each.pending,
            "metadata": each.metadata,
        }
        for each, table in zip(state.sequences, state.image.tables, strict=True)
    ]
    metadata = encode_json(
        {
            "kind": state.kind,
            "fingerprint": state.fingerprint,
            "made_for": dict(state.made_for),
            "row_bytes": state.image.row_bytes,
            "n_rows": state.image.n_rows,
            "sequences": sequences,
        }
    )
    if len(metadata) > MAX_METADATA_BYTES:
        raise FormatError(f"its metadata take {len(metadata)} bytes, {MAX_METADATA_BYTES} are the most")
    tables = b"".join(
        each.tokens.astype("<i4").tobytes() + table.astype("<u4").tobytes()
        for each, table in zip(state.sequences, state.image.tables, strict=True)
    )
    n_bytes = HEAD.size + len(metadata) + len(tables) + state.image.n_rows * state.image.row_bytes + DIGEST_BYTES
    return HEAD.pack(MAGIC, VERSION, len(metadata), n_bytes) + metadata + tables


# ---- reading


@dataclass(frozen=True, slots=True)
class _Entry:
    n_tokens: int
    n_rows: int
    pending: int | None
    metadata: object


@dataclass(frozen=True, slots=True)
class Metadata:
    """The metadata of a file, checked as far as that goes without the rest of it."""

    kind: str
    fingerprint: str
    made_for: Mapping[str, str]
    row_bytes: int
    n_rows: int
    entries: tuple[_Entry, ...]

    @property
    def table_bytes(self) -> int:
        """Bytes of the tokens and tables of all sequences."""
        return sum(4 * (entry.n_tokens + entry.n_rows) for entry in self.entries)

    @property
    def row_data_bytes(self) -> int:
        """Bytes of the rows."""
        return self.n_rows * self.row_bytes


def decode_metadata(data: bytes) -> Metadata:
    """Raises FormatError for what is no metadata of ours."""
    try:
        given = json.loads(data.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"its metadata are not JSON: {error}") from None
    if not isinstance(given, dict):
        raise FormatError("its metadata are no object")
    made_for = given.get("made_for")
    entries = given.get("sequences")
    if not isinstance(made_for, dict) or not all(isinstance(value, str) for value in made_for.values()):
        raise FormatError("its metadata do not say what it was made for")
    if not isinstance(entries, list):
        raise FormatError("its metadata name no sequences")
    return Metadata(
        _text(given, "kind"),
        _text(given, "fingerprint"),
        made_for,
        _count(given, "row_bytes"),
        _count(given, "n_rows"),
        tuple(map(_entry, entries)),
    )


def _entry(given: object) -> _Entry:
    if not isinstance(given, dict):
        raise FormatError("a sequence of its metadata is no object")
    pending = None if given.get("pending") is None else _count(given, "pending")
    return _Entry(_count(given, "n_tokens"), _count(given, "n_rows"), pending, given.get("metadata"))


def _no_constant(name: str) -> object:
    raise FormatError(f"{name} is not JSON")


def _text(given: Mapping[str, Any], key: str) -> str:
    value = given.get(key)
    if not isinstance(value, str):
        raise FormatError(f"{key} of its metadata is no text")
    return value


def _count(given: Mapping[str, Any], key: str) -> int:
    value = given.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_COUNT:
        raise FormatError(f"{key} of its metadata is no count: {value!r:.40}")
    return value


def decode_tables(metadata: Metadata, data: bytes) -> SavedState:
    """The state of metadata and the bytes of its tokens and tables. Raises FormatError for rows that are not there."""
    sequences, tables = [], []
    start = 0
    for entry in metadata.entries:
        tokens = np.frombuffer(data, "<i4", entry.n_tokens, start).astype(np.int32)
        start += 4 * entry.n_tokens
        table = np.frombuffer(data, "<u4", entry.n_rows, start).astype(np.int64)
        start += 4 * entry.n_rows
        if table.size and int(table.max()) >= metadata.n_rows:
            raise FormatError(f"a sequence has row {table.max()}, there are {metadata.n_rows}")
        sequences.append(SavedSequence(tokens, entry.pending, entry.metadata))
        tables.append(table)
    lengths = tuple(entry.n_tokens for entry in metadata.entries)
    image = KvImage(metadata.row_bytes, metadata.n_rows, lengths, tuple(tables))
    return SavedState(metadata.kind, metadata.fingerprint, metadata.made_for, image, tuple(sequences))


def differences(made_for: Mapping[str, str], here: Mapping[str, str]) -> str:
    """What a file was made for and what there is, where the two are known to differ; empty where they are not.

    A file may have any keys, and any number of them: those that are not `here` are left out.
    """
    unequal = [key for key in sorted(here) if made_for.get(key) != here[key]]
    return ", ".join(f"{key} {made_for.get(key)!r:.60} and not {here[key]!r:.60}" for key in unequal)
