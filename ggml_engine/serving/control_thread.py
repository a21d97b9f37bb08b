"""`ControlThread`: runs calls one after the other, and looks at the clock in between. What it runs must not wait."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

log = logging.getLogger("ggml_engine.serving")

Call = Callable[[], object]

_LONGEST_S = 3600.0  # a clock that jumps is noticed by then


class ControlThread:
    """A thread over a queue. `tick` is called after each call, and says in how many seconds to call it again (None: no
    need); it ends when `is_over` says so.
    """

    def __init__(self, tick: Callable[[], float | None], is_over: Callable[[], bool]) -> None:
        self._tick = tick
        self._is_over = is_over
        self._calls: SimpleQueue[Call] = SimpleQueue()
        self._lock = threading.RLock()  # a finalizer may come while its own thread holds it
        self._has_ended = False
        self._thread = threading.Thread(target=self._run, name="ggml-serving", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def post(self, call: Call) -> None:
        """Run `call` after those that were posted before it; drop it after the end. Any thread; waits for nothing."""
        with self._lock:
            if not self._has_ended:
                self._calls.put(call)

    def join(self, timeout: float) -> bool:
        """Wait for the end; whether it has come."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def is_current(self) -> bool:
        """Whether the caller is on it."""
        return threading.current_thread() is self._thread

    def _run(self) -> None:
        while not self._is_over():
            try:
                call = self._calls.get(timeout=self._wait_s())
            except Empty:
                continue
            self._run_one(call)
            del call
        with self._lock:  # what was posted before the end is run
            self._has_ended = True
        while not self._calls.empty():
            self._run_one(self._calls.get())

    @staticmethod
    def _run_one(call: Call) -> None:
        try:
            call()
        except Exception:
            log.exception("a call of the serving runtime failed")

    def _wait_s(self) -> float:
        try:
            wait_s = self._tick()
        except Exception:
            log.exception("a tick of the serving runtime failed")
            return 1.0
        return _LONGEST_S if wait_s is None else min(max(wait_s, 0.01), _LONGEST_S)
