"""The simulator of the control plane can fail: with one small fault at a time, some of the first seeds find it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from control_simulator import play, replay_command
from fake_executor import FakeExecutor

from ggml_engine.control import scheduler
from ggml_engine.control.commands import RewindCommand, StartCommand
from ggml_engine.control.core import Core
from ggml_engine.control.future import EngineFuture
from ggml_engine.control.generation import GenerationState, Reason
from ggml_engine.control.options import RunnerOptions
from ggml_engine.control.scheduler import Scheduler
from ggml_engine.control.session import Session
from ggml_engine.control.session_state import SessionState, SessionStatus
from ggml_engine.control.work import Work
from ggml_engine.errors import ComputeError, ExecutorError

N_TO_FIND = 300  # first seeds among which a fault must be found; nearly all are found by one of the first ten

Patch = pytest.MonkeyPatch
FAULTS: dict[str, Callable[[Patch], None]] = {}


def fault(make: Callable[[Patch], None]) -> Callable[[Patch], None]:
    FAULTS[make.__name__] = make
    return make


@fault
def commands_are_drained_after_the_step(patch: Patch) -> None:
    def turn(core: Core, *, may_wait: bool = False) -> bool:
        core.scheduler.step()
        if core._next_commands(may_wait=False):
            return True
        core.scheduler.settle_all()
        return False

    patch.setattr(Core, "turn", turn)


@fault
def a_step_reaps_and_forwards_at_once(patch: Patch) -> None:
    reap = Scheduler._reap
    patch.setattr(Scheduler, "_reap", lambda self: bool(reap(self)) and False)


@fault
def a_clone_inherits_the_pending_token(patch: Patch) -> None:
    clone = Scheduler.clone

    def wrong(self: Scheduler, source: SessionState, upto: int, *, is_snapshot: bool = False) -> SessionState | None:
        child = clone(self, source, upto, is_snapshot=is_snapshot)
        if child is not None:
            child.pending = source.pending
        return child

    patch.setattr(Scheduler, "clone", wrong)


@fault
def a_clone_has_one_token_too_few(patch: Patch) -> None:
    register = Scheduler._register

    def wrong(self: Scheduler, sequence: int, tokens: list[int], **options: Any) -> SessionState:
        return register(self, sequence, tokens[:-1], **options)

    patch.setattr(Scheduler, "_register", wrong)


@fault
def clones_do_not_count_as_sessions(patch: Patch) -> None:
    patch.setattr(Scheduler, "has_room", property(lambda _: True))


@fault
def numbers_of_sessions_are_used_again(patch: Patch) -> None:
    register = Scheduler._register

    def wrong(self: Scheduler, sequence: int, tokens: list[int], **options: Any) -> SessionState:
        self._next_number = next(n for n in range(1000) if n not in self._sessions)
        return register(self, sequence, tokens, **options)

    patch.setattr(Scheduler, "_register", wrong)


@fault
def a_rewind_keeps_the_pending_token(patch: Patch) -> None:
    rewind = Scheduler.rewind

    def wrong(self: Scheduler, state: SessionState, to: int) -> int:
        pending = state.pending
        at = rewind(self, state, to)
        state.pending = pending
        return at

    patch.setattr(Scheduler, "rewind", wrong)


@fault
def a_rewind_is_not_told(patch: Patch) -> None:
    run = RewindCommand.run

    def wrong(self: RewindCommand, core: Core) -> None:
        self._future, told = EngineFuture(lambda: False), self._future
        run(self, core)
        if self._future.exception(0) is not None:
            told.set_exception(self._future.exception(0))

    patch.setattr(RewindCommand, "run", wrong)


@fault
def a_cancelled_generation_counts_as_failed(patch: Patch) -> None:
    settle = Scheduler.settle

    def wrong(self: Scheduler, generation: GenerationState) -> None:
        before = self.counts["cancelled"]
        settle(self, generation)
        self.counts["failed"] += self.counts["cancelled"] - before
        self.counts["cancelled"] = before

    patch.setattr(Scheduler, "settle", wrong)


@fault
def a_cancelled_generation_is_not_settled(patch: Patch) -> None:
    settle = Scheduler.settle

    def wrong(self: Scheduler, generation: GenerationState) -> None:
        if generation.reason is not Reason.CANCELLED:
            settle(self, generation)

    patch.setattr(Scheduler, "settle", wrong)


@fault
def an_end_is_told_twice(patch: Patch) -> None:
    patch.setattr(GenerationState, "mark_settled", lambda _: True)
    settle = Scheduler.settle

    def wrong(self: Scheduler, generation: GenerationState) -> None:
        settle(self, generation)
        settle(self, generation)
        counted = generation.reason
        name = counted.value if counted is not None and counted.value in self.counts else "finished"
        self.counts[name] -= 1  # so that only the callback is told twice

    patch.setattr(Scheduler, "settle", wrong)


@fault
def the_pending_token_is_not_committed(patch: Patch) -> None:
    begin = Work.begin
    patch.setattr(Work, "begin", lambda self, history, _, *rest: begin(self, history, [], *rest))


@fault
def a_pending_token_is_lost_when_nothing_was_forwarded(patch: Patch) -> None:
    patch.setattr(Work, "uncommitted_token", property(lambda self: self.next_token))


@fault
def the_last_token_of_a_generation_is_not_pending(patch: Patch) -> None:
    patch.setattr(Work, "uncommitted_token", property(lambda _: None))


@fault
def a_whole_history_keeps_one_token_too_many(patch: Patch) -> None:
    prefix = scheduler.common_prefix
    patch.setattr(scheduler, "common_prefix", lambda a, b: min(len(a), len(b), prefix(a, b) + 1))


@fault
def breakpoints_are_crossed(patch: Patch) -> None:
    def limit(self: Work, n_vocab: int) -> int:
        most = self.n_wanted
        if self._done < self._lead.size and self._is_prepared:
            most = min(most, int(self._lead.size) - self._done)
        return most

    patch.setattr(Work, "limit", limit)


@fault
def a_callback_that_raises_is_ignored(patch: Patch) -> None:
    def call(callback: Callable[[object], object] | None, value: object) -> None:
        try:
            if callback is not None:
                callback(value)
        except Exception:
            return

    patch.setattr(Work, "_call", staticmethod(call))


@fault
def cancelled_generations_go_on(patch: Patch) -> None:
    patch.setattr(Scheduler, "_reap", lambda _: False)


@fault
def a_failed_forward_poisons_nobody(patch: Patch) -> None:
    poison = Scheduler._poison

    def wrong(self: Scheduler, running: object, error: Exception, reason: Reason = Reason.FAILED) -> None:
        poison(self, running, error, reason)  # type: ignore[arg-type]
        running.session.status = SessionStatus.OPEN  # type: ignore[attr-defined]

    patch.setattr(Scheduler, "_poison", wrong)


@fault
def a_failed_forward_fails_those_that_are_cancelled(patch: Patch) -> None:
    def wrong(self: Scheduler, parts: list[object], error: Exception) -> None:
        for part in parts:
            self._poison(part.running, error)  # type: ignore[attr-defined]

    patch.setattr(Scheduler, "_fail_all", wrong)


@fault
def an_aborted_forward_is_not_undone(patch: Patch) -> None:
    patch.setattr(Scheduler, "_rewound", lambda *_: True)


@fault
def an_abort_that_cannot_be_undone_fails_who_was_cancelled(patch: Patch) -> None:
    poison = Scheduler._poison

    def wrong(self: Scheduler, running: object, error: Exception, reason: Reason = Reason.FAILED) -> None:
        poison(self, running, error, Reason.FAILED if isinstance(error, ExecutorError) else reason)  # type: ignore[arg-type]

    patch.setattr(Scheduler, "_poison", wrong)


@fault
def an_aborted_forward_ends_everybody(patch: Patch) -> None:
    def wrong(self: Scheduler, parts: list[object]) -> None:
        for part in parts:
            self._end(part.running, Reason.CANCELLED)  # type: ignore[attr-defined]

    patch.setattr(Scheduler, "_undo", wrong)


@fault
def an_idle_session_gives_up_its_cells(patch: Patch) -> None:
    def wrong(self: Scheduler) -> bool:
        idle = [state for state in self._sessions.values() if state.active is None]
        if not idle:
            return False
        self._sessions.pop(idle[0].number)
        self.executor.close(idle[0].sequence)
        idle[0].status = SessionStatus.EVICTED
        return True

    patch.setattr(Scheduler, "_evict_snapshot", wrong)


@fault
def a_snapshot_that_cannot_be_closed_ends_the_step(patch: Patch) -> None:
    evict = Scheduler._evict_snapshot

    def wrong(self: Scheduler) -> bool:
        is_broken = self.executor.close_fault  # type: ignore[attr-defined]
        found = evict(self)
        if found and is_broken:
            raise ComputeError("as the executor said")
        return found

    patch.setattr(Scheduler, "_evict_snapshot", wrong)


@fault
def what_is_reserved_is_given_away(patch: Patch) -> None:
    def wrong(self: RunnerOptions, n_sessions: int, capacity: int) -> str:
        return "too many" if n_sessions > self.max_sessions else ""

    patch.setattr(RunnerOptions, "refusal", wrong)


@fault
def the_choice_of_a_victim_may_end_the_step(patch: Patch) -> None:
    def wrong(self: Scheduler) -> object:
        admitted = [running for running in self._running if running.is_admitted]
        chosen = self.options.victim([running.session for running in admitted])
        return next(running for running in admitted if running.session is chosen)

    patch.setattr(Scheduler, "_victim", wrong)


@fault
def a_session_is_given_room_before_its_own_prompt_fits(patch: Patch) -> None:
    patch.setattr(Scheduler, "_check_room", lambda *_: None)


@fault
def cached_tokens_count_as_evaluated(patch: Patch) -> None:
    advance = Work.advance

    def wrong(self: Work, *given: object) -> Reason | None:
        reason = advance(self, *given)  # type: ignore[arg-type]
        self.state.stats.evaluated_tokens = self.first_position + self._done
        return reason

    patch.setattr(Work, "advance", wrong)


@fault
def an_input_that_changes_is_forwarded(patch: Patch) -> None:
    def wrong(self: Work, n: int) -> object:
        start = self._done - int(self._lead.size)
        return None if self.is_decode or start < 0 or not self._is_prepared else (self._delta, start, start + n)

    patch.setattr(Work, "prepared", wrong)


@fault
def the_snapshot_that_was_used_last_goes_first(patch: Patch) -> None:
    touch = Scheduler._touch

    def wrong(self: Scheduler, state: SessionState) -> None:
        touch(self, state)
        state.last_use = -state.last_use

    patch.setattr(Scheduler, "_touch", wrong)


@fault
def a_clone_is_no_use_of_its_source(patch: Patch) -> None:
    touch = Scheduler._touch

    def wrong(self: Scheduler, state: SessionState) -> None:
        if state is not self.__dict__.get("_cloned"):
            touch(self, state)

    clone = Scheduler.clone

    def cloned(self: Scheduler, source: SessionState, upto: int, *, is_snapshot: bool = False) -> SessionState | None:
        self.__dict__["_cloned"] = source
        try:
            return clone(self, source, upto, is_snapshot=is_snapshot)
        finally:
            del self.__dict__["_cloned"]

    patch.setattr(Scheduler, "_touch", wrong)
    patch.setattr(Scheduler, "clone", cloned)


@fault
def generations_are_given_up_before_snapshots(patch: Patch) -> None:
    patch.setattr(Scheduler, "_evict_snapshot", lambda _: False)


@fault
def snapshots_are_given_up_in_vain(patch: Patch) -> None:
    def wrong(self: Scheduler) -> SessionState | None:
        idle = [state for state in self._sessions.values() if state.is_snapshot and state.active is None]
        return min(idle, key=lambda state: state.last_use, default=None)

    patch.setattr(Scheduler, "_snapshot_to_evict", wrong)


@fault
def snapshots_that_share_cells_with_each_other_keep_them(patch: Patch) -> None:
    choose = Scheduler._snapshot_to_evict

    def wrong(self: Scheduler) -> SessionState | None:
        chosen = choose(self)
        owners = {state.sequence for state in self._sessions.values()}
        count = self.executor.count_cells
        if chosen is None or count(owners - {chosen.sequence}) == count(owners):
            return None
        return chosen

    patch.setattr(Scheduler, "_snapshot_to_evict", wrong)


@fault
def who_is_given_up_keeps_what_it_had(patch: Patch) -> None:
    def wrong(self: Scheduler, running: object, error: Exception) -> None:
        self._end(running, Reason.FAILED, error)  # type: ignore[arg-type]

    patch.setattr(Scheduler, "_give_up", wrong)


@fault
def closing_forgets_the_sequence(patch: Patch) -> None:
    close = Scheduler.close

    def wrong(self: Scheduler, state: SessionState) -> None:
        executor, self.executor = self.executor, FakeExecutor(64)
        try:
            close(self, state)
        except Exception:  # the other one has no such sequence
            return
        finally:
            self.executor = executor

    patch.setattr(Scheduler, "close", wrong)


@fault
def samplers_are_not_closed(patch: Patch) -> None:
    patch.setattr(Work, "finish", lambda self, reason, error=None: self.state.end(reason, error))


@fault
def failed_batches_are_credited(patch: Patch) -> None:
    fail_all = Scheduler._fail_all

    def wrong(self: Scheduler, parts: list[object], error: Exception) -> None:
        self._count(parts, 0.0)  # type: ignore[arg-type]
        fail_all(self, parts, error)  # type: ignore[arg-type]

    patch.setattr(Scheduler, "_fail_all", wrong)


@fault
def what_is_queued_at_the_end_is_forgotten(patch: Patch) -> None:
    patch.setattr(StartCommand, "refuse", lambda *_: None)


@fault
def who_waits_for_a_cancelled_future_is_not_told(patch: Patch) -> None:
    patch.setattr(EngineFuture, "_tell_cancelled", lambda _: None)


@fault
def a_closed_session_keeps_silent(patch: Patch) -> None:
    generate = Session._generate

    def wrong(self: Session, *given: object, **others: object) -> object:
        self._state.close_requested, before = False, self._state.close_requested
        try:
            return generate(self, *given, **others)  # type: ignore[arg-type]
        finally:
            self._state.close_requested = before

    patch.setattr(Session, "_generate", wrong)


@fault
def the_end_leaves_sessions_open(patch: Patch) -> None:
    patch.setattr(Scheduler, "settle_all", lambda _: None)


@fault
def a_token_is_shown_and_not_committed(patch: Patch) -> None:
    advance = Work.advance

    def wrong(self: Work, n: int, tokens: object, rows: object, now: float) -> Reason | None:
        reason = advance(self, n, tokens, rows, now)  # type: ignore[arg-type]
        if self.next_token is not None and len(self.state.tokens) == 3:
            self.next_token = (self.next_token + 1) % 23
        return reason

    patch.setattr(Work, "advance", wrong)


def finding_of(seed: int) -> AssertionError | None:
    try:
        play(seed)
    except AssertionError as error:
        return error
    return None


@pytest.mark.parametrize("name", FAULTS)
def test_the_simulator_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:  # R94
    FAULTS[name](monkeypatch)
    for seed in range(N_TO_FIND):
        finding = finding_of(seed)
        if finding is not None:
            assert isinstance(finding.__cause__, AssertionError), f"{finding.__cause__!r} is no finding"
            assert replay_command(seed) in str(finding)
            return
    pytest.fail(f"{N_TO_FIND} interleavings did not notice that {name.replace('_', ' ')}")
