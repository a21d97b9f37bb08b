"""`Turns`: of requests that are not generations, how many are worked on at once, and which of those that wait is next.

A request of a runtime's waits in the runtime's own queue; what is only computed or only read waits here, by the same
rules: first come first served within a partition, partition by partition, and a share of the queue for each of them.
One that takes long has several turns, and goes behind the others in between. For the loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

from ggml_engine.errors import QueueFullError
from ggml_engine.serving.durations import Durations
from ggml_engine.serving.waiting import FairQueue

Result = TypeVar("Result")


class Turns:
    """`most_at_once` turns, and up to `most_waiting` that wait for one. `clock` is in seconds."""

    def __init__(self, most_at_once: int, most_waiting: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._most_at_once = most_at_once
        self._waiting: FairQueue[asyncio.Event] = FairQueue(most_waiting)
        self._durations = Durations()
        self._clock = clock
        self.n_running = 0

    @property
    def n_waiting(self) -> int:
        """How many wait."""
        return len(self._waiting)

    @asynccontextmanager
    async def turn(self, partition: str, *, goes_on: bool = False) -> AsyncIterator[None]:
        """While entered, one is worked on.

        Raises QueueFullError where it would have to wait and there is no room; not for one that `goes_on`, which has
        had a turn.
        """
        await self._begin(partition, goes_on)
        with self._given():
            yield

    async def run(self, partition: str, work: Callable[[], Awaitable[Result]]) -> Result:
        """What `work()` gives, in a turn that lasts until it ends, though its caller has left. Raises QueueFullError.

        So what runs in threads, and cannot be stopped there, is never more than there are turns.
        """
        await self._begin(partition, goes_on=False)
        task = asyncio.ensure_future(self._worked(work))
        task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # seen, if by nobody else
        return await asyncio.shield(task)

    async def _worked(self, work: Callable[[], Awaitable[Result]]) -> Result:
        with self._given():
            return await work()

    @contextmanager
    def _given(self) -> Iterator[None]:
        """A turn that has begun, to its end."""
        begun_at = self._clock()
        try:
            yield
        finally:
            self._durations.note(self._clock() - begun_at)
            self._end()

    async def _begin(self, partition: str, goes_on: bool) -> None:
        if not self.n_waiting and self.n_running < self._most_at_once:
            self.n_running += 1
            return
        if not goes_on and not self._waiting.has_room(partition):
            n = self.n_waiting
            raise QueueFullError(n, self._durations.retry_after_s(n, self._most_at_once))
        is_given = asyncio.Event()
        self._waiting.put(partition, is_given)
        try:
            await is_given.wait()
        except BaseException:
            if is_given.is_set():
                self._end()
            else:
                self._waiting.remove(partition, is_given)
            raise

    def _end(self) -> None:
        """A turn is free: whose it is now has it from here on, whenever it wakes up."""
        self.n_running -= 1
        if self._waiting.first() is not None:
            self.n_running += 1
            self._waiting.take().set()
