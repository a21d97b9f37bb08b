"""Clones of sessions, on an executor without a model. `R` numbers are rules of the contract."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest
from control_bench import PROMPT, bench
from fake_executor import WAIT_S

from ggml_engine.control.config import GenConfig
from ggml_engine.control.generation import Reason, Update
from ggml_engine.control.options import RunnerOptions
from ggml_engine.control.session import Session
from ggml_engine.errors import InputError, WouldBlockError
from ggml_engine.ggml.sampler_config import SamplerConfig


def cloned(session: Session, upto: int | None = None) -> Session:
    child = session.clone_async(upto).result(WAIT_S)
    assert isinstance(child, Session)
    return child


def first_token(callback: Callable[[], None]) -> Callable[[Update], None]:
    """An `on_update` that calls `callback` once, at the first token."""
    calls = []

    def on_update(update: Update) -> None:
        if update.tokens and not calls:
            calls.append(update)
            callback()

    return on_update


def test_a_clone_is_a_session_of_its_own() -> None:  # R1
    with bench() as b:
        source = b.session_at()
        child = cloned(source)
        assert child.id != source.id
        assert child.tokens == source.tokens == PROMPT


def test_without_support_in_the_executor_there_is_no_clone_and_no_harm() -> None:  # R1 R21
    with bench(clones=False) as b:
        source = b.session_at()
        assert source.clone_async(4).result(WAIT_S) is None
        history = [*PROMPT, source.pending, 11]
        assert b.run(source, [11]) == b.expected(history)


def test_an_executor_that_says_nothing_of_clones_refuses_them() -> None:  # R21
    with bench() as b:
        source = b.session_at()
        b.executor.clone = lambda s, u: super(type(b.executor), b.executor).clone(s, u)  # type: ignore[method-assign]
        assert source.clone_async(4).result(WAIT_S) is None
        del b.executor.clone
        history = [*PROMPT, source.pending, 11]
        assert b.run(source, [11]) == b.expected(history)


def test_no_clone_when_no_more_sessions_fit() -> None:  # R1
    with bench(RunnerOptions(max_sessions=2)) as b:
        source = b.session_at()
        child = cloned(source, 4)
        assert source.clone_async(4).result(WAIT_S) is None
        child.close()
        assert isinstance(source.clone_async(4).result(WAIT_S), Session)


def test_no_clone_when_the_runner_has_stopped() -> None:  # R1 R11
    with bench() as b:
        source = b.session_at()
        assert b.runner.shutdown(WAIT_S)
        assert source.clone_async(4).result(WAIT_S) is None


def test_a_position_of_another_type_is_told_to_the_future() -> None:
    with bench() as b:
        source = b.session_at()
        with pytest.raises(InputError):
            source.clone_async("4").result(WAIT_S)  # type: ignore[arg-type]
        with pytest.raises(InputError):
            source.clone_async(True).result(WAIT_S)


def test_a_clone_at_every_boundary_is_exactly_there() -> None:  # R2
    with bench() as b:
        source = b.session_at()
        for upto in range(1, 10):
            child = cloned(source, upto)
            assert child.position == upto
            assert child.tokens == PROMPT[:upto]
            assert not child.is_busy
            assert b.run(child, [50], 1) == b.expected([*PROMPT[:upto], 50], 1)


def test_a_clone_inherits_nothing_but_the_prefix() -> None:  # R3
    with bench() as b:
        source = b.open()
        seen: list[Update] = []
        futures: list[Future[Session | None]] = []

        def on_update(update: Update) -> None:
            seen.append(update)
            if len(seen) == 5:
                futures.append(source.clone_async(9))

        hot = GenConfig(sampler=SamplerConfig(temperature=1.0, seed=7))
        generation = source.generate_async(PROMPT, hot, on_update, max_tokens=8)
        assert generation.wait(WAIT_S)
        assert generation.reason is Reason.LENGTH
        assert source.pending == generation.tokens[-1]
        child = futures[0].result(WAIT_S)
        assert child is not None
        assert child.pending is None
        n_seen = len(seen)
        assert b.run(child, [12], 6) == b.expected([*PROMPT, 12], 6)
        assert len(seen) == n_seen
        assert source.pending == generation.tokens[-1]
        later = cloned(source)
        assert later.pending is None
        assert not later.is_busy
        assert b.run(later, [13], 4) == b.expected([*PROMPT, *generation.tokens[:-1], 13], 4)


def test_source_and_clone_continue_apart() -> None:  # R4
    with bench() as b:
        source = b.session_at()
        child = cloned(source)
        histories = {source: [*PROMPT, source.pending], child: list(PROMPT)}
        for step in range(20):
            for session, history in histories.items():
                history.append((7 * step + session.id) % 97)
                made = b.run(session, history[-1:], 1)
                assert made == b.expected(history, 1)
                history.extend(made)
                assert b.executor.keys(session._state.sequence) == history[:-1]


def test_clones_run_on_the_engine_thread_between_forwards() -> None:  # R5
    with bench() as b:
        source = b.session_at()
        with b.executor.holding_forward() as gate:
            generation = b.start(source, [11], 3)
            gate.wait_held()
            futures = [source.clone_async(4) for _ in range(50)]
            gate.release()
            children = [future.result(WAIT_S) for future in futures]
        assert all(isinstance(child, Session) for child in children)
        assert generation.wait(WAIT_S)
        clones = b.executor.calls_of("clone")
        assert len(clones) == 50
        assert not any(call.in_forward for call in clones)
        assert {call.thread_id for call in clones} == {call.thread_id for call in b.executor.calls_of("forward")}
        assert threading.get_ident() not in {call.thread_id for call in clones}


def test_only_what_was_accepted_can_be_cloned_not_what_was_written() -> None:  # R6
    with bench() as b:
        source = b.open()
        b.executor.overruns = True
        assert b.run(source, PROMPT[:6], 1) == b.expected(PROMPT[:6], 1)
        assert b.executor.cache.length(source._state.sequence) == 7, "nothing was overrun"
        assert source.position == 6
        assert source.clone_async(7).result(WAIT_S) is None
        assert not b.executor.calls_of("clone")
        for upto in (6, 4):
            child = cloned(source, upto)
            assert b.run(child, [20], 3) == b.expected([*PROMPT[:upto], 20], 3)


@pytest.mark.parametrize("off_by", [-1, 1])
def test_a_clone_of_another_length_is_refused_and_released(off_by: int) -> None:  # R7
    with bench() as b:
        source = b.session_at()
        b.executor.fail_clone(off_by)
        assert source.clone_async(5).result(WAIT_S) is None
        assert b.executor.n_opened == b.executor.n_closed + 1
        assert isinstance(source.clone_async(5).result(WAIT_S), Session)


@pytest.mark.parametrize("cause", ["refused", "beyond", "no room", "raises"])
def test_a_refusal_leaves_the_source_as_it_was(cause: str) -> None:  # R8 R20
    with bench(RunnerOptions(max_sessions=2 if cause == "no room" else 9)) as b:
        source, other = b.session_at(), b.open()
        before = (source.tokens, source.pending, b.executor.free_cells, len(b.runner._core.scheduler.sessions))
        upto = 10 if cause == "beyond" else 5
        if cause == "refused":
            b.executor._clones = False
        if cause == "raises":
            b.executor.fail_clone(RuntimeError("broken"))
        assert source.clone_async(upto).result(WAIT_S) is None
        after = (source.tokens, source.pending, b.executor.free_cells, len(b.runner._core.scheduler.sessions))
        assert after == before
        history = [*PROMPT, source.pending, 30]
        assert b.run(source, [30]) == b.expected(history)
        assert b.run(other, [31]) == b.expected([31])


def test_a_clone_can_be_had_while_the_source_generates() -> None:  # R9
    with bench() as b:
        source = b.open()
        with b.executor.holding_forward(after=2) as gate:
            generation = b.start(source, PROMPT, 20)
            gate.wait_held()
            future = source.clone_async(2)
            gate.release_one()
            child = future.result(WAIT_S)
            assert generation.reason is None, "the generation is over: nothing was shown"
            gate.release()
        assert child is not None
        assert generation.result(WAIT_S)
        assert generation.tokens == b.expected(PROMPT, 20)
        assert b.run(child, [40]) == b.expected([*PROMPT[:2], 40])


def test_a_clone_that_was_asked_for_before_the_close_is_served() -> None:  # R10
    with bench() as b:
        source, other = b.session_at(), b.open()
        with b.executor.holding_forward() as gate:
            running = b.start(other, [1], 2)
            gate.wait_held()
            future = source.clone_async(5)
            del source
        child = future.result(WAIT_S)
        assert isinstance(child, Session)
        assert b.run(child, [3]) == b.expected([*PROMPT[:5], 3])
        assert running.wait(WAIT_S)


def test_a_clone_that_was_asked_for_after_the_close_is_not() -> None:  # R10
    with bench() as b:
        source, other = b.session_at(), b.open()
        with b.executor.holding_forward() as gate:
            running = b.start(other, [1], 2)
            gate.wait_held()
            source.close()
            future = source.clone_async(5)
        assert future.result(WAIT_S) is None
        assert not b.executor.calls_of("clone")
        assert running.wait(WAIT_S)


def test_a_clone_is_served_before_the_close_of_its_source_also_where_sessions_are_scarce() -> None:  # R10
    with bench(RunnerOptions(max_sessions=2)) as b:
        source, other = b.session_at(), b.open()
        with b.executor.holding_forward() as gate:
            running = b.start(other, [1], 2)
            gate.wait_held()
            future = source.clone_async(5)
            source.close()
        # there is no room for it while its source is there, and the source may not go first
        assert future.result(WAIT_S) is None
        assert not b.executor.calls_of("clone")
        assert running.wait(WAIT_S)


def test_shutdown_settles_clones_and_releases_those_that_nobody_gets() -> None:  # R11
    with bench() as b:
        source = b.session_at()
        with b.executor.holding_clone() as gate:
            inside = source.clone_async(4)
            gate.wait_held()
            queued = [source.clone_async(4) for _ in range(8)]
            assert not b.runner.shutdown(0.05), "the clone was held"
            assert [future.result(0) for future in queued] == [None] * 8
            assert inside.result(0) is None
        assert b.runner.shutdown(WAIT_S)
        assert b.executor.n_opened == b.executor.n_closed == 2


def test_a_future_that_is_dropped_releases_its_clone() -> None:  # R12
    with bench() as b:
        source, other = b.session_at(), b.open()
        before = b.executor.n_closed
        with b.executor.holding_forward() as gate:  # (a) before it resolves
            running = b.start(other, [1], 1)
            gate.wait_held()
            future = source.clone_async(4)
            del future
        b.drain()
        assert running.wait(WAIT_S)
        assert len(b.executor.calls_of("clone")) == 1
        assert b.executor.n_closed == before + 1

        future = source.clone_async(4)  # (b) after
        assert future.result(WAIT_S) is not None
        used = b.executor.cache.used_cells
        source.close()
        b.drain()
        assert b.executor.cache.used_cells == used - 5, "the clone must hold its four cells"
        del future
        b.drain()
        assert b.executor.n_closed == before + 3
        assert b.executor.cache.used_cells == used - 9


def test_a_cancelled_future_takes_no_clone() -> None:  # R12
    with bench() as b:
        source = b.session_at()
        with b.executor.holding_forward() as gate:
            running = b.start(source, [1], 1)
            gate.wait_held()
            future = source.clone_async(4)
            assert future.cancel()
        assert running.wait(WAIT_S)
        b.drain()
        assert not b.executor.calls_of("clone")


def test_a_callback_may_ask_for_a_clone_and_not_wait_for_it() -> None:  # R13
    with bench() as b:
        source = b.open()
        futures: list[Future[Session | None]] = []
        errors: list[Exception] = []

        def ask() -> None:
            futures.append(source.clone_async(4))
            try:
                futures[0].result(WAIT_S)
            except Exception as error:
                errors.append(error)

        generation = b.start(source, PROMPT, 5, on_update=first_token(ask))
        assert generation.result(WAIT_S)
        assert isinstance(errors[0], WouldBlockError)
        assert generation.tokens == b.expected(PROMPT)
        assert isinstance(futures[0].result(WAIT_S), Session)


def test_what_a_callback_queues_runs_before_the_next_forward() -> None:  # R14
    with bench() as b:
        source = b.open()
        asked_at: list[int] = []
        futures: list[Future[Session | None]] = []

        def ask() -> None:
            asked_at.append(b.executor.n_forwards)
            futures.append(source.clone_async(len(PROMPT)))

        generation = b.start(source, PROMPT, 6, on_update=first_token(ask))
        assert generation.result(WAIT_S)
        assert isinstance(futures[0].result(WAIT_S), Session)
        assert [call.n_forwards for call in b.executor.calls_of("clone")] == asked_at
        assert b.executor.n_forwards > asked_at[0]


def test_a_snapshot_from_a_callback_comes_before_a_ring_forgets() -> None:  # R14
    with bench(ring=4) as b:
        source = b.open()
        futures: list[Future[Session | None]] = []
        ask = first_token(lambda: futures.append(source.snapshot_async(len(PROMPT))))
        assert b.start(source, PROMPT, 6, on_update=ask).result(WAIT_S)
        child = futures[0].result(WAIT_S)
        assert child is not None
        assert b.run(child, [60]) == b.expected([*PROMPT, 60])
        assert source.clone_async(len(PROMPT)).result(WAIT_S) is None, "one step later it must be too late"


def test_a_ring_that_has_forgotten_refuses_also_after_a_rewind() -> None:  # R66
    with bench(ring=8) as b:
        source = b.open()
        assert b.run(source, list(range(20)), 1) == b.expected(list(range(20)), 1)
        assert source.rewind_async(5).result(WAIT_S) == 5
        assert source.clone_async(5).result(WAIT_S) is None
        assert len(b.executor.calls_of("clone")) == 1, "the executor has to say so: the position is committed"
        b.executor._ring = None  # the control: without the mark of what was written it would be given
        assert cloned(source, 5).tokens == [0, 1, 2, 3, 4]


def test_a_boundary_that_is_not_committed_never_reaches_the_executor() -> None:  # R15
    with bench() as b:
        source = b.session_at()
        assert source.pending is not None
        for upto in (-1, 10, 2**63, -(2**63)):
            assert source.clone_async(upto).result(WAIT_S) is None
        assert not b.executor.calls_of("clone")
        assert cloned(source, 9).position == 9


def test_a_poisoned_or_closed_session_cannot_be_cloned() -> None:  # R16
    with bench() as b:
        source, closed = b.session_at(), b.session_at()
        closed.close()
        assert closed.clone_async(4).result(WAIT_S) is None
        b.executor.fail_forward(RuntimeError("broken"))
        failed = b.start(source, [1])
        assert failed.wait(WAIT_S)
        assert failed.reason is Reason.FAILED
        assert source.status == "poisoned"
        assert source.clone_async(4).result(WAIT_S) is None
        assert not b.executor.calls_of("clone")


def test_a_cancelled_prefill_shows_what_was_consumed() -> None:  # R17
    with bench(max_batch_tokens=4) as b:
        source = b.open()
        prompt = list(range(20, 36))
        with b.executor.holding_forward(after=2) as gate:
            generation = b.start(source, prompt)
            gate.wait_held()
            generation.cancel()
            assert generation.wait(WAIT_S)
        assert generation.reason is Reason.CANCELLED
        assert source.position == 8
        assert source.clone_async(9).result(WAIT_S) is None
        child = cloned(source, 8)
        assert b.run(child, [1]) == b.expected([*prompt[:8], 1])
        assert b.run(source, [2]) == b.expected([*prompt[:8], 2])


def test_a_clone_of_a_clone_outlives_them_all() -> None:  # R18
    with bench() as b:
        first = b.session_at()
        second = cloned(first, 8)
        third = cloned(second, 6)
        first.close()
        second.close()
        b.drain()
        assert b.executor.cache.used_cells == 6
        assert b.run(third, [33], 8) == b.expected([*PROMPT[:6], 33], 8)
        assert b.executor.cache.used_cells == 6 + 8


def test_a_request_is_bound_to_the_session_not_to_its_handle() -> None:  # R19
    with bench() as b:
        old = session = b.session_at()
        with b.executor.holding_forward() as gate:
            running = b.start(old, [11], 3)
            gate.wait_held()
            future = session.clone_async(7)
            session = b.runner.open_session_async()  # type: ignore[assignment]
        child = future.result(WAIT_S)
        assert child is not None
        assert child.tokens == PROMPT[:7]
        assert running.wait(WAIT_S)


def test_a_request_does_not_keep_its_source_open() -> None:  # R19
    with bench() as b:
        source = b.session_at()
        n_closed = b.executor.n_closed
        future = source.clone_async(7)
        child = future.result(WAIT_S)
        del source
        b.drain()
        assert b.executor.n_closed == n_closed + 1
        assert child is not None
        assert b.run(child, [2]) == b.expected([*PROMPT[:7], 2])


def test_a_callback_that_names_its_session_does_not_keep_it_open() -> None:  # R19
    with bench() as b:
        futures: list[Future[Session | None]] = []

        def asking(session: Session) -> Callable[[Update], None]:
            return first_token(lambda: futures.append(session.clone_async(9)))

        session = b.open()
        generation = b.start(session, on_update=asking(session))
        assert generation.result(WAIT_S)
        futures.clear()
        b.drain()
        n_closed = b.executor.n_closed
        del session, generation
        b.drain()
        assert b.executor.n_closed == n_closed + 1


def test_a_clone_that_cannot_be_handed_out_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:  # R22
    with bench() as b:
        source = b.session_at()
        before = (b.executor.cache.used_cells, len(b.runner._core.scheduler.sessions))

        def refuse(*arguments: object) -> None:
            raise MemoryError("no room for a handle")

        with monkeypatch.context() as patch:
            patch.setattr(Session, "__init__", refuse)
            assert source.clone_async(4).result(WAIT_S) is None
            with pytest.raises(Exception, match="could not be handed out"):
                b.runner.open_session(WAIT_S)
        b.drain()
        assert len(b.executor.calls_of("clone")) == 1
        assert b.executor.n_opened == b.executor.n_closed + 1
        assert (b.executor.cache.used_cells, len(b.runner._core.scheduler.sessions)) == before


def test_ids_are_never_issued_twice() -> None:  # R22
    with bench() as b:
        source = b.session_at()
        ids = {source.id}
        for _ in range(500):
            opened = b.runner.open_session_async()
            clone = source.clone_async(3)
            child = clone.result(WAIT_S)
            assert child is not None
            ids |= {opened.result(WAIT_S).id, child.id}
        assert len(ids) == 1001
        assert len(set(b.executor.issued)) == len(b.executor.issued) == 1001


def test_a_failed_clone_stops_nobody() -> None:  # R20
    with bench() as b:
        source, other = b.session_at(), b.open()
        b.executor.fail_clone(ValueError("broken"))
        with b.executor.holding_forward() as gate:
            running = b.start(other, PROMPT, 6)
            gate.wait_held()
            future = source.clone_async(4)
        assert future.result(WAIT_S) is None
        assert running.result(WAIT_S)
        assert running.tokens == b.expected(PROMPT, 6)
        assert not other.is_busy
