"""One timeout for what waits several times."""

from __future__ import annotations

import time


class Deadline:
    """So many seconds from here on; None for no end."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._at = None if timeout is None else time.monotonic() + timeout

    def left(self) -> float | None:
        """The seconds that are left. Raises TimeoutError when there are none."""
        if self._at is None:
            return None
        left = self._at - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"not done in {self._timeout} s")
        return left
