"""`Workers`: a few threads of their own for calls that may take long, so that these wait for none of another kind.

The end of a server waits for none of its threads: what they still do is told of (`is_busy`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")


class WorkThreads(ThreadPoolExecutor):
    """Threads whose end nobody waits for; an event loop may have them as its own. `n` as in `ThreadPoolExecutor`."""

    def __init__(self, n: int | None = None, name: str = "ggml-engine-work") -> None:
        super().__init__(n, name)
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


class Workers:
    """`n` threads. What is called beyond that waits for one of them."""

    def __init__(self, n: int, name: str) -> None:
        self._threads = WorkThreads(n, name)

    @property
    def is_busy(self) -> bool:
        """Whether a call has not returned, whatever became of its caller."""
        return self._threads.is_busy

    async def call(self, function: Callable[[], Result]) -> Result:
        """`function()`, on one of the threads; where its caller is cancelled it is not begun, or ends unheard."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    def close(self) -> None:
        """Take no more calls, and forget those that have not begun; the others end by themselves."""
        self._threads.shutdown()
