"""Measured times of attention in the user's cache directory: one small file for a model's shape on a machine.

What is read was written by anybody: a file that is large, damaged, of another format or of another shape is as good as
none, and so is a directory that cannot be read or written. Nothing here raises. A file is replaced whole, so that
processes which read meanwhile see the old one or the new one.
"""

from __future__ import annotations

import json
import logging
import os
import stat
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ggml_engine.executor.attention_choice import ROWS, TOKENS, Times
from ggml_engine.models.attention import AttentionForm

log = logging.getLogger("ggml_engine.executor")

FORMAT: Final = 2  # of the file and of what is measured: another number, another file
SWITCH: Final = "GGML_ENGINE_CALIBRATION"  # the environment variable that turns measuring and its files off
_MAX_BYTES: Final = 16 << 10
_MAX_S: Final = 1e4


def is_switched_off() -> bool:
    """Whether the environment says that nothing is measured, read or kept."""
    return os.environ.get(SWITCH, "").strip().lower() in {"0", "off", "no", "false"}


def directory() -> Path:
    """`ggml-engine/attention` in the user's cache directory, where the platform has it."""
    if os.name == "nt":
        base = os.environ.get("LOCALAPPDATA")
        cache = Path(base) if base else Path.home() / "AppData" / "Local"
    elif sys.platform == "darwin":
        cache = Path.home() / "Library" / "Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME")
        cache = Path(base) if base and os.path.isabs(base) else Path.home() / ".cache"
    return cache / "ggml-engine" / "attention"


def path_of(subject: Mapping[str, Any]) -> Path:
    """The file for what was measured: shape, machine, threads and library."""
    import hashlib  # noqa: PLC0415  # it loads OpenSSL, and a start needs none

    text = json.dumps({**subject, "format": FORMAT}, sort_keys=True)
    return directory() / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"


def load(subject: Mapping[str, Any]) -> Times | None:
    """What was measured of it before, or None."""
    try:
        path = path_of(subject)
        raw = _read(path)
        return None if raw is None else _checked(json.loads(raw), subject)
    except (OSError, ValueError, TypeError, KeyError, RecursionError, RuntimeError) as error:
        log.debug("no times of attention are taken from the cache: %s", error)
        return None


def save(subject: Mapping[str, Any], times: Times) -> bool:
    """Keep it; whether that was possible."""
    import tempfile  # noqa: PLC0415  # slow to import, and a start needs none of it

    held = {form.value: [list(map(float, row)) for row in rows] for form, rows in times.items()}
    text = json.dumps({"format": FORMAT, "subject": dict(subject), "seconds": held}, sort_keys=True)
    try:
        path = path_of(subject)
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=".", suffix=".tmp", dir=path.parent)  # 0600
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(name, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(name)
            raise
    except (OSError, RuntimeError) as error:  # RuntimeError: nobody has a home directory
        log.info("the times of attention could not be kept: %s", error)
        return False
    return True


def _read(path: Path) -> bytes | None:
    """A regular file's bytes; a pipe would be waited for, and a large file is none of ours."""
    flags = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        descriptor = os.open(path, flags)
    except FileNotFoundError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise ValueError(f"{path} is no file")
        raw = file.read(_MAX_BYTES + 1)
    if len(raw) > _MAX_BYTES:
        raise ValueError(f"{path} has more than {_MAX_BYTES} bytes")
    return raw


def _checked(found: Any, subject: Mapping[str, Any]) -> Times:
    if not isinstance(found, dict) or found.get("format") != FORMAT or found.get("subject") != dict(subject):
        raise ValueError("it was written for something else")
    held = found["seconds"]
    if not isinstance(held, dict) or not held:
        raise ValueError("it has no times")
    times = {}
    for name, table in held.items():
        rows = [[_seconds(value) for value in row] for row in table]
        if len(rows) != len(TOKENS) or any(len(row) != len(ROWS) for row in rows):
            raise ValueError(f"{name!r} has times of other steps")
        times[AttentionForm(name)] = rows
    return times


def _seconds(value: Any) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0 < value < _MAX_S:
        raise ValueError(f"{value!r:.40} is no time")
    return float(value)
