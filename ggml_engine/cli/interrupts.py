"""Ctrl-C as a polite request: the first one asks the running work to stop, a second one raises KeyboardInterrupt.

A step of native code cannot be left in the middle; so the work is asked, and ends after the step with its counts whole.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupts:
    """While entered, `requested` says whether Ctrl-C came; `stop` is what it calls then.

    Does nothing on other threads than the main one, or where the process was started to ignore Ctrl-C.
    """

    def __init__(self) -> None:
        self.requested = False
        self._stop: Callable[[], None] | None = None
        self._before: Any = None
        self._installed = False

    def on_request(self, stop: Callable[[], None]) -> None:
        """What the next Ctrl-C calls; at once if it came already."""
        self._stop = stop
        if self.requested:
            stop()

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            signal.default_int_handler(signum, frame)
        self.requested = True
        if self._stop is not None:
            self._stop()

    def __enter__(self) -> Interrupts:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._before = signal.signal(signal.SIGINT, self._handle)
            self._installed = True
        return self

    def __exit__(self, *_error: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._before)
            self._installed = False
