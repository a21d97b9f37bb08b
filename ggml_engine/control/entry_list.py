"""The entries of a prefix cache in the order of their use, for several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from ggml_engine.control.retention import CacheEntry
from ggml_engine.control.runner import Runner
from ggml_engine.control.session import Session

Choice = Callable[[tuple[CacheEntry, ...]], CacheEntry | None]


class EntryList:
    """Entries, the least recently used one first. Its lock is never held while the engine's thread is waited for."""

    def __init__(self) -> None:
        self._items: list[CacheEntry] = []
        self._lock = threading.RLock()  # a finalizer may come while its own thread holds it

    def alive(self) -> tuple[CacheEntry, ...]:
        """Those that can serve; others, whose snapshot the engine closed or gave up for its cells, are dropped."""
        with self._lock:
            for entry in [each for each in self._items if each.snapshot.status != "open"]:
                self.remove(entry)
            return tuple(self._items)

    def runners(self) -> set[Runner]:
        """Whose snapshots there are."""
        with self._lock:
            return {entry.snapshot.runner for entry in self._items}

    def holds(self, snapshot: Session) -> bool:
        """Whether an entry is of this handle."""
        with self._lock:
            return any(entry.snapshot is snapshot for entry in self._items)

    def append(self, entry: CacheEntry, replaced: Sequence[CacheEntry] = ()) -> None:
        """Take it in as the most recently used one, in place of `replaced`."""
        with self._lock:
            for old in replaced:
                self.remove(old)
            self._items.append(entry)

    def put_before(self, entries: Sequence[CacheEntry]) -> None:
        """Take them in as ones that were used longer ago than all that are there, in this order."""
        with self._lock:
            self._items[:0] = entries

    def remove(self, entry: CacheEntry) -> None:
        """Let it go, and close its snapshot; idempotent."""
        with self._lock:
            with suppress(ValueError):
                self._items.remove(entry)
            entry.snapshot.close()

    def choose(self, choice: Choice, among: Sequence[CacheEntry]) -> bool:
        """Let the one go that `choice` takes among those that are still there; whether it took one."""
        with self._lock:
            left = tuple(entry for entry in self._items if entry in among)
            chosen = choice(left) if left else None
            if chosen is None or chosen not in left:
                return False
            self.remove(chosen)
            return True

    def touch(self, entry: CacheEntry) -> bool:
        """Make it the most recently used one; whether it was there."""
        with self._lock:
            for i, each in enumerate(self._items):
                if each.snapshot is entry.snapshot:  # its metadata may be others by now
                    self._items.append(self._items.pop(i))
                    return True
            return False

    def refresh(self, key: CacheEntry, metadata: object) -> bool:
        """Touch the entry of exactly the same tokens, and give it this metadata; whether there is one."""
        with self._lock:
            for old in self.alive():
                if key.is_duplicate(old):
                    self._items.remove(old)
                    self._items.append(replace(old, metadata=metadata))
                    return True
            return False


def is_snapshot_of(session: Session, tokens: npt.NDArray[np.int32]) -> bool:
    """Whether a session holds exactly these tokens, and nothing that is no token."""
    if session.status != "open" or session.is_busy or session.position != tokens.size or not tokens.size:
        return False
    # a position of a prepared input is told apart from a token, but not from another input's
    return bool(tokens.min() >= 0) and np.array_equal(np.asarray(session.tokens, np.int32), tokens)


def count_bytes(entries: Sequence[CacheEntry], timeout: float | None) -> int:
    """Bytes of the cells that snapshots hold, each cell once. Waits for their engine threads."""
    by_runner: dict[Runner, list[Session]] = {}
    for entry in entries:
        by_runner.setdefault(entry.snapshot.runner, []).append(entry.snapshot)
    asked = [(runner, runner.count_cells_async(sessions)) for runner, sessions in by_runner.items()]
    return sum(runner.executor.bytes_per_cell * future.result(timeout) for runner, future in asked)
