"""The time that the end of a server has, and threads that it does not wait for."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any


class TimeLeft:
    """So many seconds from now on, for steps that follow each other."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = clock() + seconds

    def part(self, share: float = 1.0) -> float:
        """Seconds for a step that may take this share of what is left; never less than none."""
        return max(0.0, self._until - self._clock()) * share


class WorkThreads(ThreadPoolExecutor):
    """An event loop's threads, which its end does not wait for. `is_busy` says whether one still works."""

    def __init__(self) -> None:
        super().__init__(thread_name_prefix="ggml-engine-work")
        self._at_work: set[Future[Any]] = set()

    @property
    def is_busy(self) -> bool:
        """Whether a call has not returned."""
        return any(not future.done() for future in tuple(self._at_work))

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """Call it in a thread."""
        future = super().submit(function, *arguments, **named)
        self._at_work.add(future)
        future.add_done_callback(self._at_work.discard)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: ARG002
        """Take no further calls, and forget those that have not begun."""
        super().shutdown(wait=False, cancel_futures=True)
