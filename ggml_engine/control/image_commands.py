"""Saving and loading as the engine thread sees them: short calls between forwards, and handles that let go.

A handle that is dropped, by an error or a timeout on its caller's thread, gives up what it stands for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from ggml_engine.control.core import Core
from ggml_engine.control.deadline import Deadline
from ggml_engine.control.future import EngineFuture
from ggml_engine.control.generation import without_frames
from ggml_engine.control.image_table import HeldImage, IncomingImage
from ggml_engine.control.session_state import SessionState
from ggml_engine.errors import ClosedError

T = TypeVar("T")


class ImageCommand(Generic[T]):
    """A call on the engine thread whose result, or error, its future gets."""

    is_close = False

    def __init__(self, future: EngineFuture[T], call: Callable[[Core], T], session: SessionState | None = None) -> None:
        self._future = future
        self._call: Callable[[Core], T] | None = call
        self.session = session

    def run(self, core: Core) -> None:
        """See the class."""
        call, self._call = self._call, None
        if call is None or not self._future.set_running_or_notify_cancel():
            return
        try:
            result = call(core)
        except Exception as error:
            self._future.refuse(without_frames(error))
        else:
            self._future.settle(result)

    def refuse(self, core: Core) -> None:  # noqa: ARG002  # see Command
        """See Command."""
        self._call = None
        self._future.refuse(ClosedError("the runner has stopped"))


def ask(core: Core, call: Callable[[Core], T], deadline: Deadline, session: SessionState | None = None) -> T:
    """What `call` gives on the engine thread. Raises what it does, ClosedError, WouldBlockError and TimeoutError."""
    future: EngineFuture[T] = EngineFuture(core.is_engine_thread)
    core.submit(ImageCommand(future, call, session))
    try:
        return future.result(deadline.left())
    except BaseException:
        future.cancel()
        del future  # whoever keeps the error must not keep what came too late
        raise


class Held:
    """What is being saved, until it is closed or dropped."""

    def __init__(self, core: Core, image: HeldImage) -> None:
        self.image = image
        self.close = weakref.finalize(self, _submit, core, lambda core: core.scheduler.release(image))
        self.close.atexit = False


class Incoming:
    """What is being loaded, until it is committed, closed or dropped."""

    def __init__(self, core: Core, image: IncomingImage) -> None:
        self.image = image
        self.close = weakref.finalize(self, _submit, core, lambda core: core.scheduler.abandon(image))
        self.close.atexit = False


def _submit(core: Core, call: Callable[[Core], None]) -> None:
    core.submit(ImageCommand(EngineFuture(core.is_engine_thread), call))
