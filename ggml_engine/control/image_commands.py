"""Saving and loading as the engine thread sees them: short calls between forwards, and handles that let go.

A handle that is dropped, by an error or a timeout on its caller's thread, gives up what it stands for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TypeVar

from ggml_engine.control.commands import CallCommand
from ggml_engine.control.core import Core
from ggml_engine.control.deadline import Deadline
from ggml_engine.control.future import EngineFuture
from ggml_engine.control.image_table import HeldImage, IncomingImage
from ggml_engine.control.session_state import SessionState

T = TypeVar("T")


def ask(core: Core, call: Callable[[Core], T], deadline: Deadline, session: SessionState | None = None) -> T:
    """What `call` gives on the engine thread. Raises what it does, ClosedError, WouldBlockError and TimeoutError."""
    future: EngineFuture[T] = EngineFuture(core.is_engine_thread)
    core.submit(CallCommand(future, call, session))
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
        self.close = _closing(self, core, lambda core: core.scheduler.release(image))


class Incoming:
    """What is being loaded, until it is committed, closed or dropped."""

    def __init__(self, core: Core, image: IncomingImage) -> None:
        self.image = image
        self.close = _closing(self, core, lambda core: core.scheduler.abandon(image))


def _closing(handle: object, core: Core, call: Callable[[Core], None]) -> Callable[[], object]:
    """What lets the engine thread `call`, once: when it is called itself, or when `handle` is dropped."""
    close = weakref.finalize(handle, _submit, core, call)
    close.atexit = False
    return close


def _submit(core: Core, call: Callable[[Core], None]) -> None:
    core.submit(CallCommand(EngineFuture(core.is_engine_thread), call))
