"""The engine thread and its command queue.

Commands run between forwards, in the order in which they came; those that a callback queues run before the next
forward. Handles queue commands and read states; the thread holds the core, and no handle.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from ggml_engine.control.generation import Reason
from ggml_engine.control.options import RunnerOptions
from ggml_engine.control.scheduler import Scheduler
from ggml_engine.control.text import TextModel
from ggml_engine.executor.protocol import Executor

log = logging.getLogger("ggml_engine.control")


class Command(Protocol):
    """Something for the engine thread to do between forwards."""

    def run(self, core: Core) -> None:
        """Do it, and settle whoever waits."""

    def refuse(self, core: Core) -> None:
        """Settle whoever waits: the runner has stopped. Any thread."""


class Core:
    """What the engine thread runs. Handles queue commands and read states."""

    def __init__(self, executor: Executor, text: TextModel, options: RunnerOptions, clock: Callable[[], float]) -> None:
        self.scheduler = Scheduler(executor, text, options, clock)
        self.clock = clock
        self._commands: deque[Command] = deque()
        self._wake = threading.Condition()
        self._is_stopping = False
        self._outstanding: dict[int, Command] = {}
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._thread_id: int | None = None

    # ---- anybody's

    def is_engine_thread(self) -> bool:
        """Whether the caller is a callback."""
        return threading.get_ident() == self._thread_id

    def submit(self, command: Command) -> None:
        """Queue a command, or refuse it when the runner has stopped."""
        with self._wake:
            if not self._is_stopping:
                self._commands.append(command)
                self._wake.notify()
                return
        command.refuse(self)

    def start(self) -> None:
        """Start the thread."""
        self._thread = threading.Thread(target=self._run, name="ggml-engine", daemon=True)
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """Settle everything within `timeout` seconds; whether the thread has ended. Any thread, idempotent."""
        with self._wake:
            self._is_stopping = True
            self._wake.notify_all()
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
        with self._wake:
            waiting = [*self._outstanding.values(), *self._commands]
            self._commands.clear()
        for command in waiting:
            command.refuse(self)
        for state in self.scheduler.running:
            if (active := state.active) is not None:
                active.end(Reason.SHUTDOWN)

    # ---- the thread

    def _run(self) -> None:
        self._thread_id = threading.get_ident()
        is_busy = False
        while self._next_commands(may_wait=not is_busy):
            try:
                is_busy = self.scheduler.step()
            except Exception:  # a fault of ours must not take the thread, and with it every session, away
                log.exception("the scheduler failed")
                is_busy = False
        self.scheduler.settle_all()

    def _next_commands(self, *, may_wait: bool) -> bool:
        """Run all queued commands, and those that they queue; False when it is time to stop."""
        while True:
            with self._wake:
                while may_wait and not self._commands and not self._is_stopping:
                    self._wake.wait()
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
            with self._wake:
                del self._outstanding[number]
            del command
            may_wait = False
        for command in left:
            command.refuse(self)
        return False

    def _run_one(self, command: Command) -> None:
        try:
            command.run(self)
        except Exception:
            log.exception("a command failed")
            command.refuse(self)
