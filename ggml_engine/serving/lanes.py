"""Capture lanes: how many clones may be on their way at once."""

from __future__ import annotations

import threading


class Lane:
    """A clone's place, from before it is asked for until it has settled."""

    def __init__(self, pool: LanePool) -> None:
        self._pool: LanePool | None = pool

    def release(self) -> None:
        """Give it back; idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            pool._release()


class LanePool:
    """So many lanes. Any thread; waits for nothing."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._n_used = 0
        self._lock = threading.Lock()

    @property
    def in_use(self) -> int:
        """How many are taken."""
        return self._n_used

    def take(self) -> Lane | None:
        """One that is free, or None."""
        with self._lock:
            if self._n_used >= self.size:
                return None
            self._n_used += 1
            return Lane(self)

    def _release(self) -> None:
        with self._lock:
            self._n_used -= 1
