"""What tests of saved states share: a saved file's bytes, and forged ones whose checksum is right."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from control_bench import Bench

from ggml_engine.control.saved_format import DIGEST_BYTES, HEAD, MAGIC, VERSION


def file_of(directory: Path, name: str) -> Path:
    """Where a name is saved."""
    return directory / f"{name}.ggkv"


def metadata_of(path: Path) -> dict[str, Any]:
    """The metadata of a file."""
    data = path.read_bytes()
    n = HEAD.unpack(data[: HEAD.size])[2]
    found: dict[str, Any] = json.loads(data[HEAD.size : HEAD.size + n])
    return found


def sealed(body: bytes) -> bytes:
    """A body with the checksum that belongs to it."""
    return body + hashlib.sha256(body).digest()


def forged(
    path: Path, change: Callable[[dict[str, Any]], object] | None = None, rest: Callable[[bytes], bytes] | None = None
) -> None:
    """Change metadata, or what comes after them, and let size and checksum be right."""
    data = path.read_bytes()
    n = HEAD.unpack(data[: HEAD.size])[2]
    metadata = json.loads(data[HEAD.size : HEAD.size + n])
    if change is not None:
        change(metadata)
    after = data[HEAD.size + n : -DIGEST_BYTES]
    with_text(path, json.dumps(metadata).encode(), after if rest is None else rest(after))


def with_text(path: Path, text: bytes, after: bytes) -> None:
    """A file of these metadata and what comes after them, whose size and checksum are right."""
    n_bytes = HEAD.size + len(text) + len(after) + DIGEST_BYTES
    path.write_bytes(sealed(HEAD.pack(MAGIC, VERSION, len(text), n_bytes) + text + after))


def state_of(b: Bench) -> tuple[Any, ...]:
    """Everything that a failed load must leave as it was: sequences, cells, what these hold, sessions."""
    b.drain()
    cache = b.executor.cache
    sequences = {s: (cache.length(s), b.executor.keys(s)) for s in cache.open_sequences}
    return sequences, cache.free_cells, b.runner.stats()["sessions"], b.runner._core.scheduler._n_incoming
