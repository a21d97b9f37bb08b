"""What is running, and the end of it: how a server that closes ends its requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Lifecycle:
    """The requests that run now. All methods belong to the event loop's thread."""

    def __init__(self) -> None:
        self.is_closing = False
        self._tasks: set[asyncio.Future[None]] = set()
        self._enders: set[Callable[[], None]] = set()

    @property
    def n_running(self) -> int:
        """Requests whose endpoint runs."""
        return len(self._tasks)

    @contextmanager
    def running(self, task: asyncio.Future[None]) -> Iterator[None]:
        """While entered, the task is one of those that `end` cancels."""
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)

    @contextmanager
    def ending_with(self, end: Callable[[], None]) -> Iterator[None]:
        """While entered, `end` is called when the server ends its requests: a stream says so in its last event."""
        self._enders.add(end)
        try:
            yield
        finally:
            self._enders.discard(end)

    def close(self) -> None:
        """Take no further requests."""
        self.is_closing = True

    async def drain(self, timeout: float) -> bool:
        """Wait for the requests that run; False when some are left after `timeout` seconds."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout)
        return not self._tasks

    def end_streams(self) -> None:
        """Let streams end with an error event."""
        for end in tuple(self._enders):
            end()

    def end_all(self) -> None:
        """Cancel what still runs; what has not begun to answer answers 503."""
        for task in tuple(self._tasks):
            task.cancel()
