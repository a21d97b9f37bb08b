"""`Workers`: a few threads of their own for calls that may take long, so that these wait for none of another kind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


class Workers:
    """`n` threads. What is called beyond that waits for one of them."""

    def __init__(self, n: int, name: str) -> None:
        self._threads = ThreadPoolExecutor(n, name)

    async def call(self, function: Callable[[], Result]) -> Result:
        """`function()`, on one of the threads; where its caller is cancelled it is not begun, or ends unheard."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def close(self) -> None:
        """Take no more calls; those that were taken end by themselves."""
        self._threads.shutdown(wait=False)
