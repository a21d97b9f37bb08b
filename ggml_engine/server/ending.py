"""The time that the end of a server has."""

from __future__ import annotations

import time
from collections.abc import Callable


class TimeLeft:
    """So many seconds from now on, for steps that follow each other."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = clock() + seconds

    def part(self, share: float = 1.0) -> float:
        """Seconds for a step that may take this share of what is left; never less than none."""
        return max(0.0, self._until - self._clock()) * share
