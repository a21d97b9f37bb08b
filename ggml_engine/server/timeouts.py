"""`timeout`: a bound on a block of asynchronous code, on every Python that there may be.

`asyncio.wait_for` is no substitute: before Python 3.12 a cancel that comes as the awaited call ends is lost, and with
it that a client has left. `asyncio.timeout` is not there before 3.11.
"""

from __future__ import annotations

import asyncio


class timeout:  # noqa: N801 - as asyncio.timeout, which Python 3.10 does not have
    """`async with timeout(seconds)`: asyncio.TimeoutError when the block takes longer."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._expired = False

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        self._handle = asyncio.get_running_loop().call_later(self._seconds, self._expire)

    def _expire(self) -> None:
        self._expired = True
        self._task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, *_rest: object) -> None:
        self._handle.cancel()
        if self._expired and kind is asyncio.CancelledError:
            if hasattr(self._task, "uncancel"):
                self._task.uncancel()
            raise asyncio.TimeoutError
