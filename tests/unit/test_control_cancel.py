"""Cancelled, failed, finished: how generations end, and what is counted."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable

import numpy as np
import pytest
from control_bench import PROMPT, assert_failed, bench, check_counts, greedy
from fake_executor import WAIT_S, Fault, Logits
from fake_text import FakeText

from ggml_engine.control.generation import Generation, Reason, Update
from ggml_engine.errors import ExecutorError, PoisonedError, SessionBusyError
from ggml_engine.executor.protocol import Executor

RAISED = RuntimeError("the device is gone")


def cut(logits: Logits) -> object:
    return logits[:-1]


def add_row(logits: Logits) -> object:
    return np.concatenate((logits, logits[:1]))


def narrow(logits: Logits) -> object:
    return logits[:, :-1]


def nothing(logits: Logits) -> object:
    return None


def refusal(logits: Logits) -> object:
    return False


def flat(logits: Logits) -> object:
    return logits.ravel()


MALFORMED = [cut, add_row, narrow, nothing, refusal, flat, np.ndarray.tolist]


@pytest.mark.parametrize("fault", [RAISED, *MALFORMED])
def test_what_fails_under_a_session_that_was_closed_is_cancelled(fault: Fault) -> None:  # R55
    with bench() as b:
        session, other = b.open(), b.open()
        b.executor.fail_forward(fault, at=2)
        with b.executor.holding_forward(after=2) as gate:
            generation = b.start(session, PROMPT, 20)
            gate.wait_held()
            session.close()
        assert generation.wait(WAIT_S)
        assert b.executor.forwards[2].outcome == "failed", "the fault was not used"
        assert generation.reason is Reason.CANCELLED
        assert generation.error is None
        assert generation.tokens == b.expected(PROMPT, 2)
        b.drain()
        assert session.status == "closed"
        assert b.executor.n_closed == 1
        assert b.run(other, [3]) == b.expected([3])


@pytest.mark.parametrize("fault", [RAISED, *MALFORMED])
def test_what_fails_under_a_cancelled_generation_does_not_poison(fault: Fault) -> None:  # R55
    with bench() as b:
        session = b.open()
        b.executor.fail_forward(fault, at=2)
        with b.executor.holding_forward(after=2) as gate:
            generation = b.start(session, PROMPT, 20)
            gate.wait_held()
            generation.cancel()
        assert generation.wait(WAIT_S)
        assert b.executor.forwards[2].outcome == "failed", "the fault was not used"
        assert generation.reason is Reason.CANCELLED
        assert session.status == "open"
        history = [*PROMPT, *generation.tokens, 4]
        assert b.run(session, [4]) == b.expected(history)


def test_a_failure_ends_all_of_its_batch_and_nobody_else() -> None:  # R56
    with bench() as b:
        one, two, three = b.open(), b.open(), b.open()
        with b.executor.holding_forward() as gate:
            first = b.start(one, [1], 20)
            gate.wait_held()
            second = b.start(two, [2], 20)
            b.executor.fail_forward(RAISED, at=0)  # the next one, of both
        for generation in (first, second):
            assert_failed(generation, "the device is gone")
        failed = [forward for forward in b.executor.forwards if forward.outcome == "failed"]
        assert [len(forward.chunks) for forward in failed] == [2]
        assert b.run(three, [3]) == b.expected([3])
        for session in (one, two):
            again = b.start(session, [5])
            assert_failed(again, "cannot continue after an executor failure")
            assert isinstance(again.error, PoisonedError)
            assert session.status == "poisoned"


@pytest.mark.parametrize("malformed", MALFORMED)
def test_malformed_rows_fail_their_batch_and_nothing_crashes(malformed: Fault) -> None:  # R57
    with bench() as b:
        one, other = b.open(), b.open()
        b.executor.fail_forward(malformed)
        failed = b.start(one, PROMPT)
        assert_failed(failed, "an executor returned")
        assert isinstance(failed.error, ExecutorError)
        assert b.executor.forwards[0].outcome == "failed"
        assert b.run(other, PROMPT) == b.expected(PROMPT)


def test_rows_that_no_token_can_be_chosen_from_fail_one_generation() -> None:  # R57
    with bench() as b:
        one, other = b.open(), b.open()

        def broken(logits: Logits) -> int:
            raise ValueError("logits must be finite")

        with b.executor.holding_forward() as gate:
            first = b.start(one, [1], 6)
            gate.wait_held()
            second = b.start(other, [2], 6)
            b.text.samplers[0].sample = broken  # type: ignore[method-assign]
        assert_failed(first, "logits must be finite")
        assert second.result(WAIT_S)
        assert second.tokens == b.expected([2], 6)
        assert one.status == "open", "its K/V is as it should be"
        assert one.tokens == [1]
        assert b.run(one, [8]) == b.expected([1, 8])


def test_reused_tokens_are_no_prefill() -> None:  # R58
    ticks = itertools.count()
    with bench(max_batch_tokens=2048, capacity=4096) as b:
        b.runner._core.scheduler._clock = lambda: float(next(ticks))
        prompt = [i % 97 for i in range(1280)]
        session = b.open()
        cold = session.generate(prompt, greedy(max_tokens=1), timeout=WAIT_S)
        assert (cold.stats.reused_tokens, cold.stats.evaluated_tokens) == (0, 1280)
        before = b.runner.stats()["prefill_tokens"]
        warm = session.generate_from(prompt, greedy(max_tokens=1))
        assert warm.result(WAIT_S)
        assert (warm.stats.prompt_tokens, warm.stats.reused_tokens, warm.stats.evaluated_tokens) == (1280, 1279, 1)
        assert b.runner.stats()["prefill_tokens"] - before == 1
        assert warm.tokens == cold.tokens == b.expected(prompt, 1)
        assert 0 < warm.stats.prefill_tokens_per_s <= 2 * cold.stats.prefill_tokens_per_s
        seen = [update.prefill for update in warm.updates() if update.prefill]
        assert [(each.done, each.total) for each in seen] == [(0, 1), (1, 1)]


def test_a_cancelled_prefill_shows_no_breakpoint_any_more() -> None:  # R59
    with bench(ignores_abort=True) as b:
        session = b.open()
        shown: list[int] = []
        config = greedy(max_tokens=5, prefill_breakpoints=(4, 8))
        with b.executor.holding_forward(after=1) as gate:
            generation = session.generate_async(PROMPT, config, on_breakpoint=shown.append)
            gate.wait_held()  # the chunk from 4 to 8
            generation.cancel()
        assert generation.wait(WAIT_S)
        assert generation.reason is Reason.CANCELLED
        assert shown == [4]
        assert session.position == 8
        assert generation.tokens == []


@pytest.mark.parametrize("seed", range(8))
def test_every_generation_is_counted_once(seed: int) -> None:  # R60
    chance = random.Random(seed)
    with bench(capacity=200, max_batch_tokens=16, text=FakeText(ends=[11, 12, 13])) as b:
        sessions = [b.open() for _ in range(5)]
        generations, settled, credited = [], [], []
        for _ in range(80):
            session = chance.choice(sessions)
            if chance.random() < 0.1:
                b.executor.fail_forward(RAISED, at=chance.randrange(3))
            if session.status == "poisoned":
                sessions[sessions.index(session)] = session = b.open()
            generation = b.start(
                session,
                [chance.randrange(97) for _ in range(chance.randrange(0, 12))],
                chance.choice([None, 0, 1, 5, 30]),
                on_settled=settled.append,
            )
            generations.append(generation)
            if chance.random() < 0.2:
                generation.cancel()
            if chance.random() < 0.3:
                assert generation.wait(WAIT_S)
                if session.position > 50:
                    session.rewind_async(0).exception(WAIT_S)  # a refusal of a busy or poisoned one is as good
        for generation in generations:
            assert generation.wait(WAIT_S)
        b.drain()
        counts = b.runner.stats()
        check_counts(b.runner)
        assert counts["started"] == len(generations) == len(settled)
        reasons = [generation.reason for generation in generations]
        assert counts["cancelled"] == reasons.count(Reason.CANCELLED)
        assert counts["failed"] == reasons.count(Reason.FAILED)
        done = [forward for forward in b.executor.forwards if forward.outcome == "done"]
        credited = sum(chunk.stop - chunk.start for forward in done for chunk in forward.chunks)
        assert counts["prefill_tokens"] + counts["decode_tokens"] == credited
        assert counts["steps"] == len(done)
        assert {Reason.CANCELLED, Reason.FAILED} < set(reasons)


def test_a_failed_batch_credits_no_tokens() -> None:  # R60
    with bench() as b:
        session = b.open()
        b.executor.fail_forward(RAISED)
        failed = b.start(session, PROMPT)
        assert_failed(failed, "the device is gone")
        counts = b.runner.stats()
        assert (counts["prefill_tokens"], counts["decode_tokens"], counts["steps"]) == (0, 0, 0)
        assert failed.stats.evaluated_tokens == 0
        assert session.position == 0


def test_a_busy_session_refuses_a_second_generation() -> None:  # R61
    with bench() as b:
        session = b.open()
        with b.executor.holding_forward() as gate:
            first = b.start(session, PROMPT, 6)
            gate.wait_held()
            second = b.start(session, [1])
        assert_failed(second, "the session is busy")
        assert isinstance(second.error, SessionBusyError)
        with pytest.raises(SessionBusyError):
            second.result(WAIT_S)
        assert first.result(WAIT_S)
        assert first.tokens == b.expected(PROMPT, 6)


@pytest.mark.parametrize(
    ("delta", "n", "message"),
    [
        ([], 5, "nothing to generate from"),
        ([1], 0, "max_tokens must be positive, is 0"),
        ([1], -3, "max_tokens must be positive, is -3"),
        ([97], 5, "token ids are 0 to 96"),
        ([-1], 5, "token ids are 0 to 96"),
        ("text", 5, "takes token ids, text was given"),
        (None, 5, "nothing was given"),
        (7, 5, ""),
        ([[1]], 5, "token ids are"),
    ],
)
def test_what_cannot_be_generated_fails_with_a_message(delta: object, n: int, message: str) -> None:  # R61
    with bench() as b:
        session = b.session_at()
        pending = session.pending
        assert_failed(b.start(session, delta, n), message)
        assert session.pending == pending
        assert session.tokens == PROMPT
        assert b.run(session, [2]) == b.expected([*PROMPT, pending, 2])


def test_on_settled_is_called_once_with_a_handle_that_can_be_read() -> None:  # R62
    with bench() as b:
        session = b.open()
        seen: list[tuple[int, Reason | None, str]] = []

        def settled(i: int) -> Callable[[Generation], None]:
            return lambda handle: seen.append((i, handle.reason, str(handle.error)))

        kept = [session.generate_async([], greedy(), on_settled=settled(i)) for i in range(1000)]
        for generation in kept:
            assert generation.wait(WAIT_S)
        b.drain()
        assert [i for i, _, _ in seen] == list(range(1000))
        assert {reason for _, reason, _ in seen} == {Reason.FAILED}
        assert all("nothing to generate" in error or "is busy" in error for _, _, error in seen)


@pytest.mark.parametrize("how", ["finish", "cancel", "close", "shutdown", "fail"])
def test_on_settled_is_called_once_however_it_ends(how: str) -> None:  # R62
    with bench(text=FakeText(ends=[]), ignores_abort=False) as b:
        session = b.open()
        seen: list[Reason | None] = []
        if how == "fail":
            b.executor.fail_forward(RAISED, at=1)
        with b.executor.holding_forward(after=1) as gate:
            generation = b.start(session, [1], 4, on_settled=lambda handle: seen.append(handle.reason))
            gate.wait_held()
            if how == "cancel":
                generation.cancel()
            if how == "close":
                session.close()
            if how == "shutdown":
                assert b.runner.shutdown(WAIT_S)
        assert generation.wait(WAIT_S)
        expected = {
            "finish": Reason.LENGTH,
            "cancel": Reason.CANCELLED,
            "close": Reason.CANCELLED,
            "shutdown": Reason.SHUTDOWN,
            "fail": Reason.FAILED,
        }
        b.drain()
        assert seen == [generation.reason] == [expected[how]]


def test_the_end_of_one_generation_may_begin_the_next() -> None:  # R62
    with bench() as b:
        session = b.open()
        made: list[Generation] = []
        done = threading.Event()

        def again(handle: Generation) -> None:
            made.append(handle)
            if len(made) < 5:
                kept.append(session.generate_async([len(made)], greedy(), max_tokens=3, on_settled=again))
            else:
                done.set()

        kept = [session.generate_async([0], greedy(), max_tokens=3, on_settled=again)]
        assert done.wait(WAIT_S)
        history: list[int] = []
        for i, generation in enumerate(made):
            history.append(i)
            assert generation.tokens == b.expected(history, 3), generation.error
            history += generation.tokens


# ---- callbacks


def test_a_callback_that_raises_fails_its_own_generation() -> None:
    with bench() as b:
        session, other = b.open(), b.open()

        def on_update(update: Update) -> None:
            if update.tokens == (b.expected(PROMPT, 2)[1],):
                raise KeyError("callback")

        with b.executor.holding_forward() as gate:
            running = b.start(other, [1], 8)
            gate.wait_held()
            failed = b.start(session, PROMPT, 8, on_update=on_update)
        assert_failed(failed, "KeyError: 'callback'")
        assert running.result(WAIT_S)
        assert running.tokens == b.expected([1], 8)
        assert session.status == "open"
        assert session.pending == failed.tokens[-1]
        assert b.run(session, [6]) == b.expected([*PROMPT, *failed.tokens, 6])


def test_a_callback_that_exits_does_not_take_the_thread_away() -> None:
    with bench() as b:
        session = b.open()

        def leave(update: Update) -> None:
            raise SystemExit(3)

        assert_failed(b.start(session, PROMPT, on_update=leave), "SystemExit")
        after: list[str] = []

        def leave_later(handle: Generation) -> None:
            after.append("called")
            raise SystemExit(3)

        assert b.start(session, PROMPT, on_settled=leave_later).wait(WAIT_S)
        future = session.clone_async(3)
        future.add_done_callback(lambda _: leave(Update()))
        assert future.result(WAIT_S) is not None
        assert b.run(session, [1], 2)
        assert after == ["called"]


def test_a_fault_of_the_scheduler_settles_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    with bench() as b:
        session, other = b.open(), b.open()
        with b.executor.holding_forward() as gate:
            running = b.start(session, [1], 8)
            gate.wait_held()
            monkeypatch.setattr("ggml_engine.control.scheduler.batch_of", lambda *_: 1 / 0)
        assert_failed(running, "ZeroDivisionError")
        monkeypatch.undo()
        assert session.status == "poisoned"
        assert b.run(other, [2]) == b.expected([2])


def test_a_sampler_that_cannot_be_made_fails_the_generation() -> None:
    with bench() as b:
        session = b.open()
        b.text.sampler_error = ValueError("no such grammar")
        assert_failed(b.start(session), "no such grammar")
        b.text.sampler_error = None
        assert b.run(session, [1]) == b.expected([1])


def test_an_executor_without_abort_is_one_that_does_not_stop() -> None:
    with bench() as b:
        b.executor.abort = lambda: Executor.abort(b.executor)  # type: ignore[method-assign]
        session = b.open()
        with b.executor.holding_forward() as gate:
            generation = b.start(session, PROMPT, 5)
            gate.wait_held()
            generation.cancel()
            gate.release()
            assert generation.wait(WAIT_S)
        assert generation.reason is Reason.CANCELLED
        del b.executor.abort
