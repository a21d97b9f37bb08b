"""What callers do in the simulator of the control plane, and what must come of it: sessions and futures.

Every action queues one command and says what must be so when it has run, or was refused.
"""

# ruff: noqa: T201 - a traced seed is printed

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from control_model import ControlModel
from simulated_executor import SimulatedExecutor

from ggml_engine.control.core import Core
from ggml_engine.control.future import EngineFuture
from ggml_engine.control.runner import Runner
from ggml_engine.control.session import Session
from ggml_engine.errors import (
    ClosedError,
    ComputeError,
    PositionError,
    SessionBusyError,
    SessionError,
    SessionLimitError,
)


@dataclass(slots=True, eq=False)
class Expectation:
    """A queued command: what must be so after it ran, or was refused. `before` is called before it runs."""

    ran: Callable[[Any], None]
    refused: Callable[[], None]
    before: Callable[[], Any] = lambda: None


@dataclass(slots=True, eq=False)
class HeldFuture:
    """A future that somebody holds."""

    future: EngineFuture[Any] | None = None
    was_cancelled: bool = False


class Callers:
    """Those who hold sessions and futures. `model` is told what comes of their commands."""

    def __init__(self, rng: random.Random, executor: SimulatedExecutor, core: Core, model: ControlModel) -> None:
        self.random = rng
        self.executor = executor
        self.core = core
        self.model = model
        self.runner: Runner | None = Runner.over(core)
        self.next_expectation: Expectation | None = None  # of the command that is queued next
        self.trouble: BaseException | None = None
        self.handles: dict[int, Session] = {}
        self.futures: list[HeldFuture] = []
        self.cancelled: list[EngineFuture[Any]] = []
        self.where = "outside"
        self.is_traced = False

    def noting(self, check: Callable[[], None]) -> None:
        """Run a check inside the engine, whose own handling of errors must not eat the finding."""
        try:
            check()
        except Exception as error:
            if self.trouble is None:
                self.trouble = error

    def note(self, text: str) -> None:
        """A line for who plays a seed again."""
        if self.is_traced:
            print(f"{self.where:8} {text}")

    # ---- sessions

    def expect_close(self, number: int) -> Expectation:
        self.model.closing.add(number)

        def ran(_: object) -> None:
            if number in self.model.sessions:
                self.note(f"closed {number}")
                self.model.closed(self.model.sessions[number])

        return Expectation(ran, lambda: None)

    def open(self) -> None:
        if self.runner is None:
            return
        held = HeldFuture()
        is_kept = self.random.random() < 0.9
        self.note(f"open{'' if is_kept else ', dropped'}")

        def ran(fails: bool) -> None:
            if held.was_cancelled:
                return
            found = held.future if is_kept else None
            is_possible = self.model.may_be_opened()  # only now: closes may have been served first
            if not is_possible or fails:
                kind = ComputeError if is_possible else SessionLimitError
                assert found is None or isinstance(error_of(found), kind), f"{found}"
                return
            self._made(found, [], is_snapshot=False)

        def refused() -> None:
            if is_kept and not held.was_cancelled and held.future is not None:
                assert isinstance(error_of(held.future), ClosedError)

        self.next_expectation = Expectation(ran, refused, lambda: self.executor.open_fault)
        future = self.runner.open_session_async()
        if is_kept:
            held.future = future
            self.hold(held)

    def _made(self, future: EngineFuture[Any] | None, keys: list[int], *, is_snapshot: bool) -> None:
        number = len(self.model.sessions)
        state = self.core.scheduler.sessions[-1] if future is None else value_of(future)._state
        assert state.sequence == self.executor.last_opened
        self.note(f"made {number} (sequence {state.sequence}) of {keys}")
        made = self.model.opened(state.sequence, state, keys, is_snapshot=is_snapshot)
        assert state.tokens == made.tokens

    def pick(self) -> Session | None:
        if not self.handles:
            return None
        return self.handles[self.random.choice(list(self.handles))]

    def clone(self) -> None:
        self._clone(is_snapshot=False)

    def snapshot(self) -> None:
        self._clone(is_snapshot=True)

    def park(self) -> None:
        """Close the source of a snapshot, which then has the cells alone."""
        source = self._clone(is_snapshot=True)
        if source is not None:
            self._close(source)

    def _clone(self, *, is_snapshot: bool) -> Session | None:
        source = self.pick()
        if source is None:
            self.open()
            return None
        model = self.model.sessions[source.id]
        upto = self.random.choice((None, None, self.random.randint(-1, len(model.keys) + 2), len(model.keys)))
        is_kept = self.random.random() < 0.9
        self.note(f"{'snapshot' if is_snapshot else 'clone'} {source.id} {upto}{'' if is_kept else ', dropped'}")
        held = HeldFuture()

        def before() -> tuple[int, str | None]:
            return self.executor.n_clones, self.executor.clone_fault

        def ran(was: tuple[int, str | None]) -> None:
            if held.was_cancelled:
                return
            n_clones, fault = was
            to = len(model.keys) if upto is None else upto
            is_possible = self.model.can_clone(model, to)  # only now: closes may have been served first
            assert self.executor.n_clones == n_clones + is_possible, f"clone {to}: the executor was asked"  # R15
            found = held.future if is_kept else None
            if not is_possible or fault in ("raise", "refuse") or (fault == "short" and to > 0):
                assert found is None or value_of(found) is None
            else:
                assert found is None or value_of(found) is not None, f"a clone of {source_id} at {to} was refused"
                self.model.used(model)
                self._made(found, model.keys[:to], is_snapshot=is_snapshot)

        def refused() -> None:
            if is_kept and not held.was_cancelled and held.future is not None:
                assert value_of(held.future) is None

        source_id = source.id
        self.next_expectation = Expectation(ran, refused, before)
        future = source.snapshot_async(upto) if is_snapshot else source.clone_async(upto)
        if is_kept:
            held.future = future
            self.hold(held)
        return source
        return None

    def rewind(self) -> None:
        session = self.pick()
        if session is None:
            return self.open()
        model = self.model.sessions[session.id]
        to = self.random.choice((self.random.randint(-1, len(model.keys) + 1), len(model.keys), 0))
        self.note(f"rewind {session.id} {to}")
        held = HeldFuture()

        def ran(can: bool) -> None:
            if held.was_cancelled:
                return
            assert held.future is not None
            if can and not model.cannot_rewind:
                self.model.rewound(model, to)
                assert value_of(held.future) == to
            else:
                kinds = (SessionError,) if model.status != "open" else (PositionError, SessionBusyError)
                is_failed = model.cannot_rewind
                model.cannot_rewind = False
                assert isinstance(error_of(held.future), ComputeError if is_failed else kinds)

        def refused() -> None:
            if held.future is not None and not held.was_cancelled:
                assert isinstance(error_of(held.future), ClosedError)

        if model.is_busy:
            future = session.rewind_async(to)
            assert isinstance(error_of(future), SessionBusyError)
            return None
        self.next_expectation = Expectation(ran, refused, lambda: self.model.can_rewind(model, to))
        held.future = session.rewind_async(to)
        self.hold(held)
        return None

    def pick_useless(self) -> Session | None:
        """Rather one that can do nothing any more."""
        useless = [n for n in self.handles if self.model.sessions[n].status != "open"]
        return self.handles[self.random.choice(useless)] if useless else self.pick()

    def close(self) -> None:
        session = self.pick_useless()
        if session is not None:
            self._close(session)

    def _close(self, session: Session) -> None:
        self.note(f"close {session.id}")
        self.model.closing.add(session.id)
        session.close()
        if self.random.random() < 0.7:
            self.handles.pop(session.id, None)

    def drop(self) -> None:
        session = self.pick_useless()
        if session is not None:
            number = session.id
            self.note(f"drop {number}")
            self.model.closing.add(number)
            del session
            del self.handles[number]

    # ---- futures

    def hold(self, held: HeldFuture) -> None:
        """Keep a future; some have a callback that gives a command."""
        self.futures.append(held)
        if self.random.random() < 0.15:
            held.future.add_done_callback(lambda _: self.noting(self.act_in_callback))

    def act_in_callback(self) -> None:
        """Some command, of those that a callback gives."""
        raise NotImplementedError

    def drop_future(self) -> None:
        if self.futures:
            self.note("drop a future")
            self.futures.pop(self.random.randrange(len(self.futures)))

    def cancel_future(self) -> None:
        if self.futures:
            held = self.random.choice(self.futures)
            if held.future.cancel():
                held.was_cancelled = True
                self.cancelled.append(held.future)
            self.note(f"cancel a future: {held.was_cancelled}")

    def collect(self) -> None:
        """Take sessions out of futures that have them; some are dropped there."""
        waiting = []
        for held in self.futures:
            if not held.future.done():
                waiting.append(held)
            elif not held.was_cancelled and held.future.exception(0) is None:
                found = held.future.result(0)
                if isinstance(found, Session) and self.random.random() < 0.9:
                    self.handles[found.id] = found
                del found
        self.futures = waiting


def value_of(future: EngineFuture[Any]) -> Any:
    assert future.done(), "a future is not settled"
    return future.result(0)


def error_of(future: EngineFuture[Any]) -> BaseException | None:
    assert future.done(), "a future is not settled"
    return future.exception(0)
