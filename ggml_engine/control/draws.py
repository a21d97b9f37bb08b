"""`DrawPool`: tokens of several generations chosen at once, by a few threads that a runner owns.

Worth it for samplers that go over whole rows: libllama's need no lock of Python's. Every generation has a sampler and
random numbers of its own, so which thread comes first changes nothing.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")

MAX_THREADS = 4
LEAST_WIDTH = 8192  # shorter rows are done before another thread has woken up


def default_threads() -> int:
    """As many as there are processors, a few at most."""
    return max(1, min(MAX_THREADS, os.cpu_count() or 1))


class DrawPool:
    """Up to `n_threads` threads, the caller's among them; the others begin with the first use."""

    def __init__(self, n_threads: int) -> None:
        self.n_threads = n_threads
        self._pool: ThreadPoolExecutor | None = None

    def run(self, calls: Sequence[Callable[[], Result]]) -> list[Result | BaseException]:
        """What the calls return or raise, in their order, when all of them are done."""
        found: dict[int, Result | BaseException] = {}
        left = deque(enumerate(calls))

        def work() -> None:
            while True:
                try:
                    index, call = left.popleft()
                except IndexError:
                    return
                try:
                    found[index] = call()
                except BaseException as error:
                    found[index] = error

        helpers: list[Future[None]] = []
        if (n_helpers := min(self.n_threads, len(calls)) - 1) > 0:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self.n_threads - 1, thread_name_prefix="ggml-engine-draw")
            helpers = [self._pool.submit(work) for _ in range(n_helpers)]
        work()
        for helper in helpers:
            helper.result()
        return [found[index] for index in range(len(calls))]

    def close(self) -> None:
        """End the threads; idempotent."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
