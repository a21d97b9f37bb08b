"""How long requests take, for telling when to try again."""

from __future__ import annotations

import math
from collections import deque

_N_RECENT = 32
_LEAST_S, _MOST_S = 1.0, 60.0


class Durations:
    """The last durations of requests, in seconds from their beginning to their end."""

    def __init__(self) -> None:
        self._recent: deque[float] = deque(maxlen=_N_RECENT)

    def note(self, seconds: float) -> None:
        """One has ended."""
        self._recent.append(seconds)

    def retry_after_s(self, n_waiting: int, n_places: int) -> float:
        """When a place in the queue should be free: whole seconds, from 1 to 60.

        One leaves it whenever a running request ends: by the mean of the last durations, `n_places` in that time.
        """
        if not self._recent or not n_waiting:
            return _LEAST_S
        mean = sum(self._recent) / len(self._recent)
        return min(max(_LEAST_S, math.ceil(mean / n_places)), _MOST_S)
