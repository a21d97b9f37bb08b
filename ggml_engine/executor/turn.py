"""`Turn`: callers on several threads use an executor one after the other."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from ggml_engine.errors import ClosedError, UnknownSequenceError


class Turn:
    """`with turn:` waits for the others, and raises ClosedError once it `is_closed`.

    `close` drops a sequence: it is called for those in `to_close` before a turn begins. `lock` is the turn without
    all this.
    """

    __slots__ = ("_close", "is_closed", "lock", "to_close")

    def __init__(self, close: Callable[[int], None]) -> None:
        self._close = close
        self.lock = threading.Lock()
        self.to_close: deque[int] = deque()  # finalizers add to it, from any thread
        self.is_closed = False

    def __enter__(self) -> None:
        self.lock.acquire()
        if self.is_closed or self.to_close:
            self._begin()

    def _begin(self) -> None:
        try:
            if self.is_closed:
                raise ClosedError("the executor was closed")
            while self.to_close:
                with suppress(UnknownSequenceError):  # closed by hand, then by its finalizer
                    self._close(self.to_close.popleft())
        except BaseException:
            self.lock.release()
            raise

    def __exit__(self, *_error: object) -> None:
        self.lock.release()
