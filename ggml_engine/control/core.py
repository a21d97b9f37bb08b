"""The engine thread and its command queue.

Commands run between forwards, in the order in which they came; those that a callback queues run before the next
forward. Handles queue commands and read states; the thread holds the core, and no handle.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

from ggml_engine.control.options import RunnerOptions
from ggml_engine.control.scheduler import Scheduler
from ggml_engine.control.session_state import SessionState
from ggml_engine.control.text import TextModel
from ggml_engine.executor.protocol import Executor

log = logging.getLogger("ggml_engine.control")


class Command(Protocol):
    """Something for the engine thread to do between forwards."""

    @property
    def session(self) -> SessionState | None:
        """The session that it needs, if it needs one."""

    @property
    def is_close(self) -> bool:
        """Whether it closes that session."""

    def run(self, core: Core) -> None:
        """Do it, and settle whoever waits."""

    def refuse(self, core: Core) -> None:
        """Settle whoever waits: the runner has stopped. Any thread."""


class EngineThread:
    """Which thread computes. Futures and results hold this and not the core, which holds the executor."""

    def __init__(self) -> None:
        self._id: int | None = None

    def enter(self) -> None:
        """The caller's thread is the one."""
        self._id = threading.get_ident()

    def leave(self) -> None:
        """No thread is: another one may get the same id."""
        self._id = None

    def is_current(self) -> bool:
        """Whether the caller is on it: a callback."""
        return threading.get_ident() == self._id


class Core:
    """What the engine thread runs. Handles queue commands and read states."""

    def __init__(self, executor: Executor, text: TextModel, options: RunnerOptions, clock: Callable[[], float]) -> None:
        self.scheduler = Scheduler(executor, text, options, clock)
        self.clock = clock
        self._commands: deque[Command] = deque()
        self._lock = threading.RLock()  # a finalizer may come while its own thread holds it
        # Finalizers run anywhere, on the engine thread just before it sleeps, too: a condition would lose such a call,
        # a queue keeps it. What is in it says only that there may be something new.
        self._calls: SimpleQueue[None] = SimpleQueue()
        self._is_stopping = False
        self._is_busy = False
        self._outstanding: dict[int, Command] = {}
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._process = os.getpid()  # a fork takes no thread along
        self._engine_thread = EngineThread()
        self.is_engine_thread = self._engine_thread.is_current

    # ---- anybody's

    def submit(self, command: Command) -> None:
        """Queue a command, or refuse it when the runner has stopped, or stayed behind in the process that forked."""
        with self._lock:
            is_taken = not self._is_stopping and os.getpid() == self._process
            if is_taken:
                self._commands.append(command)
        if is_taken:
            self._calls.put(None)
        else:
            command.refuse(self)

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="ggml-engine", daemon=True)
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Settle everything within `timeout` seconds; whether the thread has ended. Any thread, idempotent."""
        with self._lock:
            self._is_stopping = True
        self._calls.put(None)
        self.scheduler.abort()
        thread = self._thread
        if thread is None or self.is_engine_thread():
            return False
        thread.join(timeout)
        if not thread.is_alive():
            return True
        log.warning("the executor does not return: the engine thread is left behind")
        self._settle_from_outside()
        return False

    def _settle_from_outside(self) -> None:
        """The thread hangs in the executor: tell whoever waits, and leave the executor alone."""
        with self._lock:
            waiting = [*self._outstanding.values(), *self._commands]
            self._commands.clear()
        for command in waiting:
            command.refuse(self)
        for state in self.scheduler.running:
            if (active := state.active) is not None:
                self.scheduler.shut(state, active)

    # ---- the thread

    def _run(self) -> None:
        while self.turn(may_wait=True):
            pass

    def turn(self, *, may_wait: bool = False) -> bool:
        """All queued commands, then one step; False when the runner has stopped, and everything is settled.

        The caller is the engine thread until then: the runner's own, or a simulator's only one. `may_wait` waits for
        a command where there is nothing to compute.
        """
        self._engine_thread.enter()
        if not self._next_commands(may_wait=may_wait and not self._is_busy):
            self.scheduler.settle_all()
            self._engine_thread.leave()
            return False
        try:
            self._is_busy = self.scheduler.step()
        except BaseException as error:  # a fault of ours must not take the thread, and with it every session, away
            log.exception("the scheduler failed")
            self.scheduler.fail_running(error)
            self._is_busy = False
        return True

    def _next_commands(self, *, may_wait: bool) -> bool:
        """Run all queued commands, and those that they queue; False when it is time to stop."""
        self._wait_for_call(may_wait=may_wait)
        while True:
            with self._lock:
                if self._is_stopping:
                    left = list(self._commands)
                    self._commands.clear()
                    break
                if not self._commands:
                    return True
                command = self._commands.popleft()
                number = next(self._numbers)
                self._outstanding[number] = command
            self._run_one(command)
            with self._lock:
                del self._outstanding[number]
            del command
        for command in left:
            command.refuse(self)
        return False

    def _wait_for_call(self, *, may_wait: bool) -> None:
        """Sleep until there is something to do where that may be, and forget who called so far."""
        while may_wait and not self._commands and not self._is_stopping:
            if not self.scheduler.do_idle_work():
                self._calls.get()
        for _ in range(self._calls.qsize()):  # these came before what is looked at next
            self._calls.get()

    def _run_one(self, command: Command) -> None:
        try:
            command.run(self)
        except BaseException:
            log.exception("a command failed")
            command.refuse(self)

    def make_room_for_a_session(self, needed: SessionState | None) -> None:
        """Serve closes that wait, where no more sessions fit, but for those of sessions that commands before them need.

        The thread may be the last to let go of a handle that it gave out: the close is then queued behind what the
        caller asked for after dropping the handle.
        """
        if self.scheduler.has_room:
            return
        kept: list[Command] = []
        sessions = {id(needed)}
        closes: list[Command] = []
        with self._lock:
            while self._commands:
                command = self._commands.popleft()
                is_next = command.is_close and id(command.session) not in sessions
                (closes if is_next else kept).append(command)
                sessions.add(id(command.session))
            self._commands.extendleft(reversed(kept))
        for command in closes:
            self._run_one(command)
