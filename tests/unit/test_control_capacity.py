"""How many sessions and cells there are, and what happens when they run out."""

from __future__ import annotations

import random
import threading
import tracemalloc

import pytest
from control_bench import PROMPT, assert_failed, bench, check_counts, greedy
from fake_executor import WAIT_S, FakeExecutor
from fake_text import FakeText

from ggml_engine.control.generation import Reason
from ggml_engine.control.options import RunnerOptions
from ggml_engine.control.runner import Runner
from ggml_engine.control.session import Session
from ggml_engine.errors import (
    AllocationError,
    ClosedError,
    ContextLengthError,
    EngineError,
    OptionError,
    PoolFullError,
    SessionLimitError,
)


@pytest.mark.parametrize("fourth", ["open", "clone", "snapshot"])
def test_everything_resident_counts_as_a_session(fourth: str) -> None:  # R49
    with bench(RunnerOptions(max_sessions=3)) as b:
        active = b.session_at()
        snapshot = active.snapshot_async(4).result(WAIT_S)
        assert snapshot is not None
        with b.executor.holding_clone() as gate:
            pending = active.clone_async(4)
            gate.wait_held()
            more: list[object] = []
            if fourth == "open":
                refused = b.runner.open_session_async()
            else:
                refused = active.clone_async(4) if fourth == "clone" else active.snapshot_async(4)  # type: ignore[assignment]
        child = pending.result(WAIT_S)
        assert child is not None
        if fourth == "open":
            with pytest.raises(SessionLimitError, match=r"4 sessions were asked for, at most 3"):
                refused.result(WAIT_S)
        else:
            assert refused.result(WAIT_S) is None
        snapshot.close()
        more.append(b.open())
        assert b.run(more[0], [5]) == b.expected([5])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "capacity"),
    [
        ({"max_session_tokens": 2**50}, 1024),
        ({"max_session_tokens": 1, "max_sessions": 2**31}, 1024),
        ({"max_session_tokens": 2**62, "max_sessions": 2**62}, 1024),
    ],
)
def test_bounds_that_cannot_be_kept_are_refused_before_anything_is_made(
    options: dict[str, int], capacity: int
) -> None:  # R50
    executor = FakeExecutor(capacity)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        with pytest.raises(OptionError, match=r"reserve 'full'.*cannot fit 1024 cells"):
            Runner(executor, FakeText(), RunnerOptions(reserve="full", **options))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak - before < 1 << 20
    assert not executor.calls


@pytest.mark.parametrize("n", [2**31, 2**63, 2**200])
def test_a_number_of_sessions_that_overflows_reserves_nothing(n: int) -> None:  # R50
    with bench(RunnerOptions(max_sessions=n)) as b:
        assert b.run(b.open(), [1]) == b.expected([1])


@pytest.mark.parametrize(
    "options",
    [
        {"max_sessions": 0},
        {"max_sessions": True},
        {"max_session_tokens": -1},
        {"max_session_tokens": 1.5},
        {"reserve": "half"},
        {"reserve": "full"},
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, object]) -> None:  # R50
    with pytest.raises(OptionError):
        RunnerOptions(**options)  # type: ignore[arg-type]


def test_a_full_reservation_admits_only_what_fits_at_once() -> None:  # R50
    with bench(RunnerOptions(max_session_tokens=1000, reserve="full"), capacity=2048) as b:
        one, two = b.open(), b.open()
        with pytest.raises(SessionLimitError, match="3000 cells, there are 2048"):
            b.open()
        assert one.clone_async(0).result(WAIT_S) is None
        running = [b.start(session, [i + 1], None) for i, session in enumerate((one, two))]  # type: ignore[arg-type]
        for i, generation in enumerate(running):
            assert generation.result(60)
            assert generation.reason is Reason.LENGTH
            assert generation.tokens == b.expected([i + 1], 1000)
        two.close()
        assert b.run(b.open(), [7]) == b.expected([7])


def test_without_a_reservation_there_is_a_victim_and_the_others_finish() -> None:  # R50
    with bench(capacity=512, max_batch_tokens=64) as b:
        sessions = [b.open() for _ in range(4)]
        running = b.start_together(sessions, 250)
        for generation in running:
            assert generation.wait(WAIT_S)
        failed = [generation for generation in running if generation.reason is Reason.FAILED]
        finished = [generation for generation in running if generation.reason is Reason.LENGTH]
        assert len(failed) == 2, running  # two sessions of 250 fit, a third never
        assert len(finished) == 2
        assert failed == running[2:], "the youngest generations are to be given up"
        for generation in failed:
            assert isinstance(generation.error, PoolFullError)
        for i, generation in enumerate(running[:2]):
            assert generation.tokens == b.expected([i + 1], 250)
        for session in sessions[2:]:
            assert session.status == "open"
            assert session.position == 0
            assert b.run(session, [9]) == b.expected([9])


def test_a_prompt_that_can_never_fit_is_refused_at_once() -> None:  # R50
    with bench(RunnerOptions(max_session_tokens=8)) as b:
        session = b.open()
        failed = b.start(session, PROMPT)
        assert_failed(failed, "needs 9 tokens, the context holds 8")
        assert isinstance(failed.error, ContextLengthError)
        assert not b.executor.forwards
        full = b.start(session, PROMPT[:6], None)  # type: ignore[arg-type]
        assert full.result(WAIT_S)
        assert full.reason is Reason.LENGTH
        assert full.tokens == b.expected(PROMPT[:6], 3)
        assert session.position == 8
        assert session.pending == full.tokens[-1]


def test_a_dropped_session_makes_room_for_the_next_one() -> None:  # R52
    with bench(RunnerOptions(max_sessions=1)) as b:
        for _ in range(300):
            session = b.open()
            del session
        for _ in range(300):
            session = b.open()
            b.run(session, [1], 1)
            session.close()


def test_a_dropped_session_makes_room_for_a_clone() -> None:  # R52
    with bench(RunnerOptions(max_sessions=2)) as b:
        source = b.session_at()
        for _ in range(300):
            child = source.clone_async(4).result(WAIT_S)
            assert isinstance(child, Session)
            del child


def test_closes_that_come_late_make_room() -> None:  # R52
    with bench(RunnerOptions(max_sessions=2)) as b:
        one, two = b.open(), b.open()
        with b.executor.holding_forward() as gate:
            running = b.start(one, [1], 1)
            gate.wait_held()
            # as when the thread itself drops the last reference to a handle that it gave out
            opened = b.runner.open_session_async()
            two.close()
        assert b.run(opened.result(WAIT_S), [3]) == b.expected([3])
        assert running.wait(WAIT_S)


@pytest.mark.parametrize("seed", range(25))
def test_shutdown_settles_every_future_and_generation(seed: int) -> None:  # R54
    chance = random.Random(seed)
    for _ in range(20):
        executor, text = FakeExecutor(capacity=256, max_batch_tokens=16), FakeText()
        runner = Runner(executor, text, RunnerOptions(max_sessions=chance.choice([4, 1024])))
        sessions = [runner.open_session(WAIT_S)]
        futures, generations, settled = [], [], []
        stop_at = chance.randrange(200)
        for i in range(200):
            if i == stop_at:
                assert runner.shutdown(WAIT_S)
            session = chance.choice(sessions)
            match chance.randrange(4):
                case 0:
                    futures.append(runner.open_session_async())
                case 1:
                    futures.append(session.clone_async(chance.randrange(4)))  # type: ignore[arg-type]
                case 2:
                    futures.append(session.rewind_async(0))  # type: ignore[arg-type]
                case _:
                    generations.append(
                        session.generate_async(
                            [chance.randrange(97) for _ in range(5)],
                            greedy(max_tokens=chance.randrange(1, 30)),
                            on_settled=settled.append,
                        )
                    )
            if futures and futures[-1].done() and not futures[-1].exception(0):
                made = futures[-1].result(0)
                if isinstance(made, Session):
                    sessions.append(made)
        assert runner.shutdown(WAIT_S)
        for future in futures:
            assert future.done()
            error = future.exception(0)
            assert error is None or isinstance(error, EngineError)
        assert all(generation.reason is not None for generation in generations)
        assert len(settled) == len(generations)
        executor.check_balance()
        assert text.n_open_samplers == 0
        check_counts(runner)


def test_after_shutdown_everything_is_refused_and_settled() -> None:  # R54
    with bench() as b:
        session = b.session_at()
        assert b.runner.shutdown(WAIT_S)
        assert b.runner.shutdown(WAIT_S), "shutdown is idempotent"
        with pytest.raises(ClosedError):
            b.open()
        with pytest.raises(ClosedError):
            session.rewind_async(0).result(WAIT_S)
        generation = b.start(session, [1])
        assert generation.wait(WAIT_S)
        assert generation.reason is Reason.SHUTDOWN
        with pytest.raises(ClosedError):
            generation.result(WAIT_S)
        assert session.clone_async(2).result(WAIT_S) is None
        session.close()


# ---- cells run out


def test_snapshots_go_first_the_one_that_was_used_longest_ago() -> None:  # R50
    with bench(capacity=64, max_batch_tokens=16) as b:
        parked = []
        for i in range(3):
            session = b.session_at([10 + i] * 16)
            snapshot = session.snapshot_async().result(WAIT_S)
            assert snapshot is not None
            parked.append(snapshot)
            session.close()
        assert parked[0].clone_async(3).result(WAIT_S) is not None  # used: now the second is the oldest
        b.drain()
        session = b.open()
        generation = b.start(session, list(range(20)), 6)
        assert generation.result(WAIT_S)
        assert generation.tokens == b.expected(list(range(20)), 6)
        assert [each.status for each in parked] == ["open", "evicted", "open"]
        assert parked[1].clone_async(2).result(WAIT_S) is None
        assert_failed(b.start(parked[1], [1]), "cells were given up")
        assert b.run(parked[2], [4], 2) == b.expected([*[12] * 16, 4], 2)


def test_snapshots_go_when_decoding_needs_their_cells() -> None:  # R50
    with bench(capacity=32) as b:
        session = b.session_at(PROMPT)
        snapshot = session.snapshot_async().result(WAIT_S)
        assert snapshot is not None
        other = b.open()
        assert b.run(other, [1], 20) == b.expected([1], 20)
        assert snapshot.status == "open"
        assert session.rewind_async(1).result(WAIT_S) == 1
        pending: list[int] = []
        generation = b.start(session, [5], 4)
        assert generation.result(WAIT_S)
        assert generation.tokens == b.expected([PROMPT[0], *pending, 5], 4)
        assert snapshot.status == "evicted"


def test_a_prefill_waits_for_the_cells_of_those_that_run() -> None:  # R50
    with bench(capacity=64, max_batch_tokens=16) as b:
        first, second = b.open(), b.open()
        ends: list[str] = []
        told = threading.Event()
        with b.executor.holding_forward(after=20) as gate:
            one = b.start(first, [1], 40, on_settled=lambda _: (ends.append("one"), first.close()))
            gate.wait_held()
            two = b.start(second, list(range(50)), 5, on_settled=lambda _: (ends.append("two"), told.set()))
        assert one.wait(WAIT_S)
        assert told.wait(WAIT_S)  # a little after the end
        assert one.tokens == b.expected([1], 40)
        assert two.reason is Reason.LENGTH, two.error
        assert two.tokens == b.expected(list(range(50)), 5)
        assert ends == ["one", "two"]


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_prefill_that_waits_for_room_can_be_ended(how: str) -> None:  # R50
    with bench(capacity=64, max_batch_tokens=16) as b:
        first, second = b.open(), b.open()
        with b.executor.holding_forward(after=20) as gate:
            one = b.start(first, [1], 40)
            gate.wait_held()
            two = b.start(second, list(range(50)), 5)
            gate.step()  # it waits: the step is of the first alone
            assert [len(forward.chunks) for forward in b.executor.forwards] == [1] * 22
            if how == "cancel":
                two.cancel()
            else:
                second.close()
            gate.step()
            assert two.wait(WAIT_S)
            assert two.reason is Reason.CANCELLED
            assert one.reason is None
        assert one.result(WAIT_S)
        assert one.tokens == b.expected([1], 40)


def test_a_custom_policy_chooses_the_victim() -> None:  # R50
    asked: list[list[int]] = []

    def oldest(sessions):  # type: ignore[no-untyped-def]
        asked.append([session.number for session in sessions])
        return sessions[0]

    with bench(RunnerOptions(victim=oldest), capacity=64) as b:
        sessions = [b.open() for _ in range(3)]
        running = b.start_together(sessions, 25)
        for generation in running:
            assert generation.wait(WAIT_S)
        assert [generation.reason for generation in running] == [Reason.FAILED, Reason.LENGTH, Reason.LENGTH]
        assert asked == [[session.id for session in sessions]]
        for i in (1, 2):
            assert running[i].tokens == b.expected([i + 1], 25)


def test_a_policy_that_fails_is_replaced_by_the_usual_one() -> None:  # R50
    def broken(sessions):  # type: ignore[no-untyped-def]
        raise StopIteration

    with bench(RunnerOptions(victim=broken), capacity=64) as b:
        sessions = [b.open() for _ in range(3)]
        running = b.start_together(sessions, 25)
        for generation in running:
            assert generation.wait(WAIT_S)
        assert [generation.reason for generation in running] == [Reason.LENGTH, Reason.LENGTH, Reason.FAILED]


def test_a_victim_keeps_its_history_and_its_pending_token() -> None:  # R50 R109
    with bench(capacity=64) as b:
        old, young = b.session_at([1, 2, 3]), b.session_at([4, 5, 6])
        pending = young.pending
        assert pending is not None
        running = b.start(old, [7], 40)
        victim = b.start(young, [8], 40)
        assert running.result(WAIT_S)
        assert victim.wait(WAIT_S)
        assert isinstance(victim.error, PoolFullError)
        assert young.tokens == [4, 5, 6]
        assert young.pending == pending
        old.close()
        assert b.run(young, [8]) == b.expected([4, 5, 6, pending, 8])


@pytest.mark.parametrize("seed", range(6))
def test_when_cells_run_out_what_finishes_is_right(seed: int) -> None:  # R50 R60
    chance = random.Random(seed)
    with bench(capacity=192, max_batch_tokens=24, run=chance.choice([1, 64])) as b:
        sessions = [b.open() for _ in range(8)]
        histories: list[list[int]] = [[] for _ in sessions]
        n_failed = n_done = 0
        for _ in range(6):
            running = []
            for session, history in zip(sessions, histories, strict=True):
                delta = [chance.randrange(97) for _ in range(chance.randrange(1, 30))]
                n = chance.randrange(1, 25)
                pending = [] if session.pending is None else [session.pending]
                running.append((session, history, pending, delta, n, b.start(session, delta, n)))
            for session, history, pending, delta, n, generation in running:
                assert generation.wait(WAIT_S)
                if generation.reason is Reason.FAILED:
                    n_failed += 1
                    assert isinstance(generation.error, PoolFullError | ContextLengthError)
                    assert session.rewind_async(0).result(WAIT_S) == 0
                    history.clear()
                    continue
                n_done += 1
                history += [*pending, *delta]
                assert generation.tokens == b.expected(history, n)
                history.extend(generation.tokens[:-1])
                assert session.tokens == history
        assert n_failed, "cells never ran out"
        assert n_done


def test_a_full_reservation_counts_whole_runs() -> None:  # R50
    with bench(RunnerOptions(max_session_tokens=80, reserve="full"), capacity=256, run=64) as b:
        sessions = [b.open() for _ in range(2)]
        with pytest.raises(SessionLimitError, match="384 cells, there are 256"):
            b.open()
        prompts = [[i + 1] * 70 for i in range(2)]
        running = [b.start(session, prompt, None) for session, prompt in zip(sessions, prompts, strict=True)]
        for generation, prompt in zip(running, prompts, strict=True):
            assert generation.wait(WAIT_S)
            assert generation.reason is Reason.LENGTH
            assert generation.tokens == b.expected(prompt, 11)


def test_memory_that_cannot_be_had_takes_one_victim_and_poisons_nobody() -> None:  # R50
    with bench() as b:
        sessions = [b.open(), b.open()]
        b.executor.fail_forward(AllocationError("no memory"), at=1)  # the first that both are in
        running = b.start_together(sessions, 12)
        for generation in running:
            assert generation.wait(WAIT_S)
        failed = [generation for generation in running if generation.reason is Reason.FAILED]
        assert len(failed) == 1
        assert isinstance(failed[0].error, AllocationError)
        assert [session.status for session in sessions] == ["open", "open"]
        left = next(generation for generation in running if generation.reason is not Reason.FAILED)
        assert left.tokens == b.expected([running.index(left) + 1], 12)
