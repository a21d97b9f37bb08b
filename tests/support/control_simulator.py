"""A simulator of the control plane: random commands in a random order, on one thread, checked after every one.

`Simulation(seed).run()` plays all parts: callers that open, clone, rewind, generate, cancel, close, drop handles and
futures; callbacks that do the same on the engine's side; other threads that do it inside a forward; an executor that
fails; and the engine thread, by `Core.turn`. A seed decides everything, so that a failure can be played again:

    python tests/support/control_simulator.py SEED
"""

# ruff: noqa: T201 - also a program: it prints

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import wait
from itertools import accumulate, count

from control_model import ControlModel
from simulated_callers import Expectation
from simulated_executor import SimulatedExecutor, SimulatedText
from simulated_generations import GeneratingCallers

from ggml_engine.control.commands import CloseCommand, RefuseCommand, StartCommand
from ggml_engine.control.core import Command, Core
from ggml_engine.control.options import RunnerOptions
from ggml_engine.control.session_state import SessionState
from ggml_engine.executor.batch import Batch

N_COMMANDS = 100
DEEPEST = 3  # callbacks in callbacks
MOST_TURNS = 2000  # to come to rest; far more than any interleaving needs

Action = Callable[["Simulation"], None]
Menu = tuple[tuple[Action, ...], tuple[int, ...]]

log = logging.getLogger("ggml_engine.control")


class Watched:
    """A command under observation."""

    def __init__(self, command: Command, expectation: Expectation, simulation: Simulation) -> None:
        self._command = command
        self._expectation = expectation
        self._simulation = simulation
        self.session = command.session
        self.is_close = command.is_close
        self._has_run = False
        simulation.n_waiting += 1

    def run(self, core: Core) -> None:
        self._simulation.n_waiting -= 1
        self._has_run = True
        before = self._expectation.before()
        try:
            self._command.run(core)
        finally:
            self._simulation.noting(lambda: self._expectation.ran(before))

    def refuse(self, core: Core) -> None:
        self._command.refuse(core)
        if not self._has_run:  # one that raised is refused, too
            self._simulation.n_waiting -= 1
            self._simulation.noting(self._expectation.refused)


class WatchedCore(Core):
    """A core whose commands are checked one by one."""

    simulation: Simulation

    def submit(self, command: Command) -> None:
        simulation = self.simulation
        if isinstance(command, CloseCommand):
            expectation = simulation.expect_close(command.session.number)
        else:
            assert simulation.next_expectation is not None, f"{command} was queued, nothing was asked for"
            expectation, simulation.next_expectation = simulation.next_expectation, None
            if isinstance(command, StartCommand | RefuseCommand):
                simulation.on_queued(command)
        super().submit(Watched(command, expectation, simulation))


class Simulation(GeneratingCallers):
    """One interleaving."""

    def __init__(self, seed: int, n_commands: int = N_COMMANDS) -> None:
        rng = random.Random(seed)
        pick = rng.choice
        executor = SimulatedExecutor(pick((16, 32, 64, 128)), pick((3, 6, 16)), pick((1, 4, 8)), self)
        max_session_tokens = pick((None, None, 12, 24))
        is_reserved = max_session_tokens is not None and rng.random() < 0.5
        options = RunnerOptions(
            max_sessions=pick((3, 6, 10)),
            max_session_tokens=max_session_tokens,
            reserve="full" if is_reserved and max_session_tokens <= executor.capacity else "none",
            victim=pick((_youngest, _oldest, _wrong_victim)),
        )
        now = count()
        self.text = SimulatedText()
        core = WatchedCore(executor, self.text, options, lambda: next(now) / 1000)
        core.simulation = self
        limit = min(executor.capacity, options.max_session_tokens or executor.capacity)
        is_reserved = options.reserve == "full"
        in_runs = -(-limit // executor.run) * executor.run
        n_fit = executor.capacity // in_runs if is_reserved else options.max_sessions
        model = ControlModel(limit, min(n_fit, options.max_sessions), executor.owned_cells, is_reserved=is_reserved)
        super().__init__(rng, executor, core, model)
        self.n_commands = n_commands
        step, scheduler = self.core.scheduler.step, self.core.scheduler

        def watched_step() -> bool:
            self.noting(self.model.resolve)
            self.model.before_step()
            self._is_in_step = True
            try:
                is_busy = step()
            except Exception as error:
                self.trouble = self.trouble or AssertionError(f"an error leaves a step: {error!r}")
                raise
            finally:
                self._is_in_step = False
            self.noting(self.model.after_step)
            return is_busy

        scheduler.step = watched_step  # type: ignore[method-assign]
        self.n_waiting = 0
        self.is_stopped = False
        self.n_done = 0
        self._stop_at = self.random.randrange(3 * n_commands)
        self._n_changes = 0
        self._depth = 0
        self._is_in_step = False

    # ---- the interleaving

    def run(self) -> None:
        """Play it. Raises AssertionError at the first difference from the model."""
        disabled, log.disabled = log.disabled, not self.is_traced
        try:
            while self.n_done < self.n_commands:
                if self.n_done >= self._stop_at and not self.is_stopped:
                    if self.random.random() < 0.4:  # what was cancelled and not yet looked at
                        self.cancel_future()
                    self.stop()
                self.act(_OUTSIDE)
                self.check()
                if self.random.random() < 0.6:
                    self.maybe_turn()
                    self.check()
            if self.is_stopped:
                self.end_after_stop()
            else:
                self.end_at_rest()
        finally:
            log.disabled = disabled

    def act(self, menu: Menu) -> None:
        """One command of the menu."""
        actions, weights = menu
        self.n_done += 1
        self.random.choices(actions, cum_weights=weights)[0](self)

    def act_in_callback(self) -> None:
        """A command that a callback gives. After the end commands are refused at once, with callbacks in callbacks."""
        if self._depth == DEEPEST:
            return
        self._depth += 1
        where, self.where = self.where, "callback"
        self.act(_CALLBACK)
        self.where = where
        self._depth -= 1

    def turn(self) -> None:
        """The engine's turn."""
        was_stopped = self.is_stopped
        self.where = "engine"
        is_alive = self.core.turn()
        self.where = "outside"
        if self.trouble is not None:
            raise self.trouble
        if is_alive:
            assert not was_stopped, "the runner was stopped, and goes on"
        else:
            assert self.is_stopped
            self.model.over()
        self.collect()

    def stop(self) -> None:
        """Stop the runner; inside a callback or a forward it ends with the turn."""
        self.note("stop")
        self.is_stopped = True
        self.core.stop(0)

    # ---- the executor's side (see Watcher)

    def on_forward(self, batch: Batch) -> None:
        self.noting(lambda: self._on_forward(batch))

    def _on_forward(self, batch: Batch) -> None:
        assert not self.n_waiting, f"a forward begins before {self.n_waiting} commands that were queued"
        tokens, wanted, ids = batch.tokens.tolist(), batch.wants_logits.tolist(), batch.sequences.tolist()
        for piece in getattr(batch, "prepared", ()):
            n = piece.stop - piece.start
            tokens[piece.row : piece.row + n] = piece.source.keys[piece.start : piece.stop]
        rows: list[tuple[int, list[int], list[bool]]] = []
        for sequence, token, is_wanted in zip(ids, tokens, wanted, strict=True):
            if not rows or rows[-1][0] != sequence:
                rows.append((sequence, [], []))
            rows[-1][1].append(token)
            rows[-1][2].append(is_wanted)
        self.note(f"forward {[(sequence, keys) for sequence, keys, _ in rows]}")
        self.model.forward(rows, self.executor.max_batch_tokens)

    def inside_forward(self) -> None:
        is_fault_near = self.executor.forward_fault or self.executor.rewind_fault
        if self.random.random() < (0.6 if is_fault_near else 0.15):
            self.where, before = "thread", self.where
            self.noting(lambda: self.act(_THREAD))
            self.where = before

    def on_outcome(self, outcome: str) -> None:
        self.note(f"forward: {outcome}")
        self.noting(lambda: self.model.outcome(outcome))

    def on_rewind_failed(self, sequence: int) -> None:
        self.note(f"rewind of sequence {sequence} fails")
        self.noting(lambda: self.model.rewind_failed(sequence))

    def on_close(self, sequence: int) -> None:
        if self._is_in_step:
            self.note(f"sequence {sequence} gives up its cells")
            self.noting(lambda: self.model.evicted(sequence))

    # ---- faults

    def break_forward(self) -> None:
        self.executor.forward_fault = self.random.choice(("raise", "shape", "nothing", "abort"))

    def break_clone(self) -> None:
        self.executor.clone_fault = self.random.choice(("raise", "refuse", "short"))

    def break_open(self) -> None:
        self.executor.open_fault = True

    def break_rewind(self) -> None:
        self.executor.rewind_fault = True

    def break_close(self) -> None:
        self.executor.close_fault = True

    # ---- checks

    def check(self) -> None:
        """Everything that must be so between two commands."""
        if self.trouble is not None:
            raise self.trouble
        model = self.model
        for session in model.resident.values():
            state = session.state
            assert state.tokens == session.tokens, f"session {session.number} is {state.tokens}, not {session.tokens}"
            is_same = state.pending == session.pending or session.status == "poisoned"
            assert is_same, f"{state.pending} is pending, not {session.pending}"
            assert state.status.value == session.status, f"{state.status} is not {session.status}"
        for number, handle in self.handles.items():
            session = model.sessions[number]
            assert handle.status == session.status, f"session {number} is {handle.status}, not {session.status}"
            assert handle.position == len(session.keys)
            assert handle.is_busy == session.is_busy
        if self._n_changes != self.executor.n_changes:
            self._n_changes = self.executor.n_changes
            self._check_cells()
        self._check_counts()

    def _check_cells(self) -> None:
        model, cache = self.model, self.executor.cache
        for session in model.resident.values():
            if session.status == "open":
                assert cache.length(session.sequence) == len(session.keys)
        sequences = cache.open_sequences
        assert set(sequences) == set(model.resident), f"{sequences} are open, not {set(model.resident)}"
        assert cache.free_cells + cache.used_cells == cache.capacity
        n_owned = cache.count_cells(sequences)
        assert cache.used_cells == n_owned, f"{cache.used_cells} cells are used, {n_owned} are owned"  # R74

    def _check_counts(self) -> None:
        model, counts = self.model, self.core.scheduler.counts
        assert counts == model.counts, f"{counts} is not {model.counts}"
        ended = counts["finished"] + counts["cancelled"] + counts["failed"] + counts["shutdown"]
        assert counts["started"] == ended + len(model.begun)  # R60
        n_claimed = sum(1 for each in self.asked if each.refusal is None and not each.has_ended)
        assert self.text.n_samplers == n_claimed, f"{self.text.n_samplers} samplers are open, {n_claimed} are needed"

    # ---- the end

    def end_at_rest(self) -> None:
        """All generations end by themselves or by being cancelled; then nothing is left when all handles go."""
        for number in list(self.generations):
            if self.asked[number].asked.max_tokens is None:
                self._cancel(number)
        self._rest()
        assert not self.futures, f"{len(self.futures)} futures are not settled at rest"
        for generation in self.asked:
            assert generation.has_ended, f"generation {generation.number} has not ended at rest"
        self.generations.clear()
        self.model.closing |= set(self.handles)
        self.handles.clear()
        self._rest()
        assert not self.model.resident, f"{list(self.model.resident)} stay open without a handle"
        self.check_balance()
        self.stop()
        self.turn()
        self.runner = None  # what ends a runner that is dropped holds its core

    def _rest(self) -> None:
        for _ in range(MOST_TURNS):
            self.turn()
            self.check()
            if self.is_stopped:
                return self.end_after_stop()
            if not self.n_waiting and not self.model.begun and not self.futures:
                return None
        raise AssertionError(f"no rest after {MOST_TURNS} turns: {len(self.model.begun)} generations run")

    def end_after_stop(self) -> None:
        """What was queued and what is asked for later is settled, and everything is closed."""
        if not self.model.is_over:
            self.turn()
        if not self.model.is_over:  # it was stopped inside that turn
            self.turn()
        assert self.model.is_over
        for _ in range(5):
            self.act(_OUTSIDE)
            self.check()
        self.collect()
        assert not self.n_waiting
        assert not self.futures, "a future is not settled after the end"
        for generation in self.asked:
            assert generation.has_ended, f"generation {generation.number} has not ended after the end"
        self.generations.clear()
        self.handles.clear()
        self.runner = None
        self.check()
        self.check_balance()

    def check_balance(self) -> None:
        """Nothing is left (contract R100)."""
        assert not wait(self.cancelled, 0).not_done, "who waits for a cancelled future waits for ever"
        executor = self.executor
        assert executor.n_opened == executor.n_closed, f"{executor.n_opened} opened, {executor.n_closed} closed"
        assert executor.free_cells == executor.capacity
        assert self.text.n_samplers == 0
        counts = self.core.scheduler.counts
        assert counts["started"] == sum(counts[name] for name in ("finished", "cancelled", "failed", "shutdown"))
        assert counts["started"] == len(self.asked)

    def maybe_turn(self) -> None:
        if not self.model.is_over:
            self.turn()

    def rarely_stop(self) -> None:
        if self.random.random() < 0.1:
            self.stop()


def _youngest(sessions: Sequence[SessionState]) -> SessionState:
    return sessions[-1]


def _oldest(sessions: Sequence[SessionState]) -> SessionState:
    return sessions[0]


def _wrong_victim(sessions: Sequence[SessionState]) -> SessionState:
    raise ValueError("a choice that was to fail")


def _menu(**weights: int) -> Menu:
    return tuple(getattr(Simulation, name) for name in weights), tuple(accumulate(weights.values()))


_THREAD = _menu(
    open=3, generate=5, clone=4, snapshot=2, rewind=3, close=2, drop=1, cancel=8, drop_generation=2, cancel_future=1,
    drop_future=1, rarely_stop=1,
)  # fmt: skip
_CALLBACK = _menu(
    open=2, generate=8, clone=6, snapshot=3, rewind=4, close=2, drop=1, cancel=3, drop_generation=1, drop_future=1,
    rarely_stop=1,
)  # fmt: skip
_OUTSIDE = _menu(
    open=10, generate=28, clone=8, snapshot=6, park=7, rewind=5, close=4, drop=3, cancel=3, drop_generation=2,
    cancel_future=2, drop_future=1, break_forward=1, break_clone=1, break_open=1, break_rewind=1, break_close=1,
)  # fmt: skip


def replay_command(seed: int) -> str:
    """What plays a seed again."""
    return f"python tests/support/control_simulator.py {seed}"


def play(seed: int) -> Simulation:
    """Play a seed; an AssertionError says how to play it again."""
    simulation = Simulation(seed)
    try:
        simulation.run()
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error}\nplay it again: {replay_command(seed)}") from error
    return simulation


def main() -> None:
    """Play the seeds in the arguments, and print every command."""
    for seed in map(int, sys.argv[1:]):
        simulation = Simulation(seed)
        simulation.is_traced = True
        print(f"seed {seed}, {simulation.core.scheduler.options}, {simulation.executor.capacity} cells")
        simulation.run()
        print(f"seed {seed}: {simulation.core.scheduler.counts}")


if __name__ == "__main__":
    main()
