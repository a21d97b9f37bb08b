"""Futures that the engine thread settles."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Generator
from concurrent.futures import Future, InvalidStateError
from typing import Any, TypeVar

from ggml_engine.errors import WouldBlockError

T = TypeVar("T")


class EngineFuture(Future[T]):
    """A `concurrent.futures.Future` that can be awaited, and that refuses to wait on the thread that settles it."""

    def __init__(self, is_engine_thread: Callable[[], bool]) -> None:
        super().__init__()
        self._is_engine_thread = is_engine_thread
        self._is_cancel_told = False

    def result(self, timeout: float | None = None) -> T:
        """The value, when it is there. Raises TimeoutError, and WouldBlockError inside a callback of the engine."""
        self._refuse_to_block()
        try:
            return super().result(timeout)
        except concurrent.futures.TimeoutError:  # in Python 3.10 another one than the built-in, which this raises too
            if not self.done():
                raise TimeoutError(f"not settled in {timeout} s") from None
            raise
        finally:
            del self  # an error that is raised keeps this frame, which must not keep the error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """The error, when it has ended, or None; raises as `result` does."""
        self._refuse_to_block()
        try:
            return super().exception(timeout)
        except concurrent.futures.TimeoutError:
            raise TimeoutError(f"not settled in {timeout} s") from None

    def __await__(self) -> Generator[Any, None, T]:
        import asyncio  # noqa: PLC0415  # some 20 ms that few programs need

        return asyncio.wrap_future(self).__await__()

    def _refuse_to_block(self) -> None:
        if not self.done() and self._is_engine_thread():
            raise WouldBlockError("a callback cannot wait for what its own thread has to do: use add_done_callback")

    def settle(self, value: T) -> bool:
        """Set the value unless it has one, or was cancelled; whether it was set."""
        try:
            self.set_result(value)
        except InvalidStateError:
            self._tell_cancelled()
            return False
        return True

    def refuse(self, error: BaseException) -> bool:
        """Set an error unless it is settled; whether it was set."""
        try:
            self.set_exception(error)
        except InvalidStateError:
            self._tell_cancelled()
            return False
        return True

    def set_running_or_notify_cancel(self) -> bool:
        """Whether its command may run; False when it was cancelled, and those who wait for it know that."""
        if self._is_cancel_told:
            return False
        may_run = super().set_running_or_notify_cancel()
        self._is_cancel_told = not may_run
        return may_run

    def _tell_cancelled(self) -> None:
        """`concurrent.futures.wait` takes a cancelled future for done only when it was told so."""
        if self.cancelled():
            self.set_running_or_notify_cancel()
