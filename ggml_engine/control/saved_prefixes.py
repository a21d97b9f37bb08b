"""The entries of a prefix cache to a file and back: which of them, in which order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from ggml_engine.control.deadline import Deadline
from ggml_engine.control.image_commands import Held, ask
from ggml_engine.control.image_table import Source
from ggml_engine.control.retention import CacheEntry
from ggml_engine.control.runner import Runner
from ggml_engine.control.saved_file import SavedFile
from ggml_engine.control.saved_format import FormatError, encode_json
from ggml_engine.control.saving import PREFIX_CACHE, load_sessions, write_held
from ggml_engine.control.session import Session
from ggml_engine.errors import PoolFullError, SavedStateError, SessionLimitError


def save_entries(runner: Runner, entries: Sequence[CacheEntry], path: Path, deadline: Deadline) -> int:
    """Write the entries of one runner, the least recently used one first; how many: those that can serve by then.

    Raises SavedStateError (unsavable) for metadata that JSON cannot keep.
    """
    for entry in entries:
        try:
            encode_json(entry.metadata)
        except FormatError as error:
            reason = f"the metadata of an entry of {entry.tokens.size} tokens cannot be saved: {error}"
            raise SavedStateError("unsavable", path, reason) from None
    core = runner._core
    sources = [Source(entry.snapshot._state, entry.tokens) for entry in entries]
    held = ask(core, lambda core: Held(core, core.scheduler.hold(sources)), deadline)
    try:
        metadata = [entries[i].metadata for i in held.image.taken]
        held.image.pending = [None] * len(metadata)  # a snapshot has none, whatever was done with its handle
        write_held(core, held.image, PREFIX_CACHE, path, metadata, deadline)
        return len(metadata)
    finally:
        held.close()


def load_entries(
    runner: Runner, saved: SavedFile, wanted: Sequence[int], max_bytes: int | None, deadline: Deadline
) -> list[CacheEntry]:
    """Entries of the wanted sequences of a file, most wanted first, as far as they fit; the most wanted comes last.

    They take no cells and no place of a session from what is there, leave a place, and take at most `max_bytes`.
    """
    core, executor = runner._core, runner.executor
    wanted = [i for i in wanted if 0 < saved.state.image.lengths[i] <= core.scheduler.session_limit]
    # one more: a runner full of snapshots could open no session to use them
    n_sessions, n_cells = ask(core, lambda core: core.scheduler.count_room(len(wanted) + 1), deadline)
    if max_bytes is not None:
        n_cells = min(n_cells, max_bytes // executor.bytes_per_cell)
    wanted = wanted[: max(0, n_sessions - 1)]
    image = saved.state.image
    n_fitting = bisect_right(range(1, len(wanted) + 1), n_cells, key=lambda n: image.choose(wanted[:n])[0].n_cells)
    wanted = wanted[:n_fitting]
    while wanted:
        order = wanted[::-1]  # so that the least recently used one is given up first, too
        try:
            sessions = load_sessions(core, saved, order, partial(Session, runner, core), deadline, is_snapshot=True)
        except (PoolFullError, SessionLimitError):  # somebody was quicker, or free cells are at other offsets
            wanted = wanted[:-1]
        else:
            return [_entry(saved, i, each, executor.fingerprint) for i, each in zip(order, sessions, strict=True)]
    return []


def _entry(saved: SavedFile, index: int, session: Session, fingerprint: str) -> CacheEntry:
    of_file = saved.state.sequences[index]
    return CacheEntry(session, np.array(of_file.tokens, np.int32), of_file.metadata, fingerprint)
