"""`Signal`: an event of the event loop that any thread may set."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress


class Signal:
    """Made on the event loop's thread. What waits for a reply of the engine waits for this."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()

    def set(self) -> None:
        """Let `wait` return; on any thread, never waits."""
        with suppress(RuntimeError):  # the loop has ended, and nobody waits
            self._loop.call_soon_threadsafe(self._event.set)

    async def wait(self, on_cancel: Callable[[], object]) -> None:
        """Until it is set; `on_cancel` is called where the request ends before: its client left, the server closes."""
        try:
            await self._event.wait()
        except BaseException:
            on_cancel()
            raise
