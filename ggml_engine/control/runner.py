"""`Runner`: the engine over one executor. Opens sessions, batches what they generate, and ends.

The engine thread holds no handle: when the last one (the runner or one of its sessions) is gone, a finalizer stops it.
"""

from __future__ import annotations

import sys
import time
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import TracebackType
from typing import TypeVar

from ggml_engine.control.commands import CallCommand, CountCellsCommand, OpenCommand
from ggml_engine.control.core import Core
from ggml_engine.control.deadline import Deadline
from ggml_engine.control.future import EngineFuture
from ggml_engine.control.options import RunnerOptions
from ggml_engine.control.saved_names import Directory, names_in, path_of
from ggml_engine.control.session import Session
from ggml_engine.control.text import TextModel
from ggml_engine.errors import OptionError, SavedStateError, WouldBlockError
from ggml_engine.executor.protocol import Executor
from ggml_engine.models.adapter_set import AdapterLike, AdapterSet

SHUTDOWN_S = 5.0

Result = TypeVar("Result")
Adapters = Iterable[tuple[AdapterLike, float]]  # loaded ones, each with its scale


class Runner:
    """The engine thread over one executor: opens sessions, batches them, and ends.

    `text` is the model's tokens and text. All methods may be called from any thread. The executor is the caller's: it
    must outlive the runner, and nobody else may use it meanwhile. Raises OptionError for options that cannot be kept.
    """

    def __init__(
        self,
        executor: Executor,
        text: TextModel,
        options: RunnerOptions | None = None,
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        options = options or RunnerOptions()
        self._attach(Core(executor, text, options, clock))
        if options.switch_interval_s is not None and sys.getswitchinterval() > options.switch_interval_s:
            sys.setswitchinterval(options.switch_interval_s)
        self._core.start()

    @classmethod
    def over(cls, core: Core) -> Runner:
        """A runner without a thread: its maker calls `core.turn`."""
        runner = cls.__new__(cls)
        runner._attach(core)
        return runner

    def _attach(self, core: Core) -> None:
        self._core = core
        self._finalizer = weakref.finalize(self, Core.stop, core, SHUTDOWN_S)

    def open_session(self, timeout: float | None = None, *, adapters: Adapters | None = None) -> Session:
        """A new, empty session, computed with `adapters` at their scales: by default the executor's own, () is none.

        Its clones have the same. Sessions of other adapters, or scales, share no step and no cell with it. Raises
        SessionLimitError, OptionError for adapters that cannot be had, ClosedError, WouldBlockError in a callback.
        """
        if self._core.is_engine_thread():
            raise WouldBlockError("open_session waits for the thread that this callback runs on: open_session_async")
        return self.open_session_async(adapters=adapters).result(timeout)

    def open_session_async(self, *, adapters: Adapters | None = None) -> EngineFuture[Session]:
        """A future of a new, empty session; it fails with what `open_session` raises."""
        future: EngineFuture[Session] = EngineFuture(self._core.is_engine_thread)
        try:
            wanted = None if adapters is None else AdapterSet.of(adapters)
        except OptionError as error:
            future.refuse(error)
        else:
            self._core.submit(OpenCommand(future, partial(Session, self, self._core), wanted))
        return future

    def load_session(self, directory: Directory, name: str, timeout: float | None = None) -> Session:
        """A session as `Session.save` has written it: its tokens, their K/V, and the pending token.

        The file is checked whole before anything is made of it. Where cells are missing, snapshots are given up as for
        a prompt. Raises SavedStateError, SessionLimitError, ContextLengthError, PoolFullError, ClosedError,
        TimeoutError, what else the executor refuses with, and WouldBlockError in a callback; then no session is open.
        """
        if self._core.is_engine_thread():
            raise WouldBlockError("load_session waits for the thread that this callback runs on")
        from ggml_engine.control.saved_file import open_saved  # noqa: PLC0415  # a start needs none of it
        from ggml_engine.control.saving import SESSION, check_made_for, load_sessions  # noqa: PLC0415

        deadline = Deadline(timeout)
        with open_saved(path_of(directory, name), deadline) as saved:
            check_made_for(self._core, saved, SESSION)
            if len(saved.state.sequences) != 1:
                raise SavedStateError("damaged", saved.path, f"it has {len(saved.state.sequences)} sessions, not one")
            (session,) = load_sessions(self._core, saved, [0], partial(Session, self, self._core), deadline)
        return session

    @staticmethod
    def saved_names(directory: Directory) -> list[str]:
        """The names that are saved in a directory, sessions and prefix caches, in alphabetical order.

        Raises SavedStateError where there is a directory that cannot be listed.
        """
        return names_in(directory)

    def stats(self) -> dict[str, int]:
        """Counts since the start: generations by how they ended, steps, tokens; sessions now."""
        scheduler = self._core.scheduler
        return {**scheduler.counts, "sessions": len(scheduler.sessions), "running": len(scheduler.running)}

    def count_cells_async(self, sessions: Iterable[Session]) -> EngineFuture[int]:
        """A future of how many cells these sessions of this runner hold; one that several share counts once."""
        future: EngineFuture[int] = EngineFuture(self._core.is_engine_thread)
        self._core.submit(CountCellsCommand(future, [session._state for session in sessions]))
        return future

    def compute_async(self, function: Callable[[Executor], Result]) -> EngineFuture[Result]:
        """A future of what `function` makes of the executor: called on the engine's thread, between two forwards.

        Others wait while it computes: one forward is a good measure. It touches no sequence but those that it opens,
        and closes them. Where it raises PoolFullError, snapshots go, and it is called again.
        """
        future: EngineFuture[Result] = EngineFuture(self._core.is_engine_thread)
        self._core.submit(CallCommand(future, lambda core: core.scheduler.compute_apart(function)))
        return future

    @property
    def is_in_callback(self) -> bool:
        """Whether the caller is on the engine's thread, where nothing may wait for it."""
        return self._core.is_engine_thread()

    @property
    def executor(self) -> Executor:
        """What computes."""
        return self._core.scheduler.executor

    @property
    def options(self) -> RunnerOptions:
        """How it is bounded."""
        return self._core.scheduler.options

    @property
    def session_limit(self) -> int:
        """The most positions that a session can hold."""
        return self._core.scheduler.session_limit

    @property
    def text(self) -> TextModel:
        """The model's tokens and text."""
        return self._core.scheduler.text

    def shutdown(self, timeout: float = SHUTDOWN_S) -> bool:
        """End every generation and close every session; every future is settled when this returns.

        False when the executor did not return within `timeout` seconds: then its thread is left behind. In a callback
        it returns False at once, and the runner ends after it. Idempotent.
        """
        return self._core.stop(timeout)

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()
