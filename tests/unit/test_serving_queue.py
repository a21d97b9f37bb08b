"""Who waits, who is refused, cancelling in every state, and the end of a serving runtime. `R`: rules of the contract."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import pytest
from control_bench import PROMPT, bench, greedy
from fake_executor import WAIT_S
from serving_bench import Ear, Serving, serving

from ggml_engine.control.generation import Reason, Update
from ggml_engine.control.options import RunnerOptions
from ggml_engine.errors import (
    ClosedError,
    ContextLengthError,
    InputError,
    QueueFullError,
    WouldBlockError,
)
from ggml_engine.serving.options import ServingOptions
from ggml_engine.serving.request import ServingRequest
from ggml_engine.serving.runtime import ServingRuntime


def test_requests_compute_in_the_order_in_which_they_came_and_no_more_than_may() -> None:
    with serving(max_requests=2, max_queue=8) as s:
        order: list[str] = []

        class Noting(Ear):
            def __init__(self, name: str) -> None:
                super().__init__()
                self.name = name

            def on_settled(self, index: int, choice: Any) -> None:
                order.append(self.name)

        with s.b.executor.holding_forward() as gate:
            replies = [s.submit([1, 2], 4, Noting("0"))]
            gate.wait_held()
            replies += [s.submit([i, 2], 4, Noting(str(i))) for i in range(1, 6)]
            stats = s.runtime.stats()
            assert (stats["running"], stats["waiting"]) == (2, 4)
            assert [reply.state for reply in replies[2:]] == ["queued"] * 4
        for i, reply in enumerate(replies):
            assert reply.result(WAIT_S)[0].tokens == s.b.expected([i, 2] if i else [1, 2], 4)
        assert {*order[:2]} == {"0", "1"}
        assert {*order[2:4]} == {"2", "3"}


def test_a_full_queue_refuses_and_says_when_to_try_again() -> None:
    with serving(max_requests=1, max_queue=2) as s:
        with s.b.executor.holding_forward() as gate:
            replies = [s.submit()]
            gate.wait_held()
            replies += [s.submit(), s.submit(session="a")]
            with pytest.raises(QueueFullError, match="2 requests wait already") as refused:
                s.submit(session="b")
            assert refused.value.retry_after_s == 1
            assert pickle.loads(pickle.dumps(refused.value)).retry_after_s == 1
            s.clock.now += 90
        for reply in replies:
            assert reply.result(WAIT_S)
        assert s.runtime.stats()["refused"] == 1
        assert [info.name for info in s.runtime.sessions()] == ["a"], "the refused one has taken its name"
        with s.b.executor.holding_forward() as gate:
            replies = [s.submit() for _ in range(3)]
            gate.wait_held()
            with pytest.raises(QueueFullError) as refused:
                s.submit()
            # the last ones took 90, 0 and 0 seconds from their beginnings, one at a time
            assert refused.value.retry_after_s == 30
        for reply in replies:
            assert reply.result(WAIT_S)


def test_a_burst_is_refused_nothing_that_there_are_places_for() -> None:
    with serving(max_requests=4, max_queue=0) as s:
        with s.b.executor.holding_forward() as gate:
            replies = [s.submit([i, 2]) for i in range(4)]
            gate.wait_held()
            with pytest.raises(QueueFullError):
                s.submit()
        for reply in replies:
            assert reply.result(WAIT_S)


def test_the_time_in_the_queue_is_told() -> None:
    with serving(max_requests=1) as s:
        with s.b.executor.holding_forward() as gate:
            first = s.submit()
            gate.wait_held()
            second = s.submit()
            s.clock.now += 7
        assert first.result(WAIT_S)
        assert second.result(WAIT_S)
        assert first.stats.queued_s < 1
        assert 7 <= second.stats.queued_s < 8


# ---- what can never be


@pytest.mark.parametrize(
    ("runner", "most", "limit"),
    [
        (RunnerOptions(), None, 32),
        (RunnerOptions(max_session_tokens=20), None, 20),
        (RunnerOptions(), 20, 20),
        (RunnerOptions(max_session_tokens=20), 25, 20),
    ],
)
def test_a_prompt_that_no_session_can_hold_is_refused_with_both_counts(
    runner: RunnerOptions, most: int | None, limit: int
) -> None:
    with serving(runner, capacity=32, max_session_tokens=most) as s:
        with pytest.raises(ContextLengthError, match=f"needs {limit + 1} tokens, the context holds {limit}") as refused:
            s.submit([1] * (limit + 1), session="a")
        assert (refused.value.requested, refused.value.limit) == (limit + 1, limit)
        assert not s.b.executor.calls
        reply = s.submit([1] * (limit - 2), 50)
        (choice,) = reply.result(WAIT_S)
        assert choice.reason is Reason.LENGTH
        assert choice.tokens == s.b.expected([1] * (limit - 2), 3), "the last one that is sampled takes no cell"


@pytest.mark.parametrize("tokens", [[], None, "text", b"text", [-1], [97], [2**40], [1.5], [[1]]])
def test_what_are_no_tokens_is_refused_at_once(tokens: Any) -> None:
    with serving() as s:
        with pytest.raises(InputError):
            s.submit(tokens)
        assert not s.b.executor.calls


@pytest.mark.parametrize(
    "given", [{"session": ""}, {"session": "x" * 257}, {"session": 3}, {"partition": 1}, {"opening": -1}]
)
def test_names_that_are_none_are_refused(given: Any) -> None:
    with pytest.raises(InputError):
        ServingRequest([1], **given)


def test_a_request_that_cannot_be_sampled_fails_and_leaves_nothing() -> None:
    with serving() as s:
        s.b.text.sampler_error = InputError("no such grammar")
        reply = s.submit(session="a")
        assert reply.wait(WAIT_S)
        assert reply.choices[0].reason is Reason.FAILED
        with pytest.raises(InputError, match="no such grammar"):
            reply.result(WAIT_S)
        s.b.text.sampler_error = None
        s.drain()
        assert not s.runtime.sessions()


# ---- cancelling


def cancelled(s: Serving, reply: Any) -> None:
    assert reply.wait(WAIT_S)
    assert reply.choices[0].reason is Reason.CANCELLED
    assert reply.choices[0].error is None
    assert reply.state == "done"
    s.check_at_rest()
    assert s.b.executor.cache.used_cells == sum(len(key) for key in s.keys)
    s.ask([*PROMPT, 1])


@pytest.mark.parametrize("session", [None, "a"])
def test_a_cancel_in_the_queue(session: str | None) -> None:
    with serving(max_requests=1) as s:
        with s.b.executor.holding_forward() as gate:
            first = s.submit([40, 41])
            gate.wait_held()
            reply = s.submit(session=session)
            reply.cancel()
            assert reply.wait(WAIT_S), "it waits for the one that computes"
            assert s.runtime.stats()["waiting"] == 0
        assert first.result(WAIT_S)
        cancelled(s, reply)


@pytest.mark.parametrize("session", [None, "a"])
def test_a_cancel_while_it_is_looked_up(session: str | None) -> None:
    with serving(prefix_cache_entries=4) as s:
        s.ask()
        with s.b.executor.holding_clone() as gate:
            reply = s.submit([*PROMPT, 1, 2], session=session)
            gate.wait_held()
            reply.cancel()
        cancelled(s, reply)


def test_a_cancel_while_a_session_is_opened() -> None:
    with serving() as s:
        s.b.executor.open_gate.close()
        reply = s.submit()
        s.b.executor.open_gate.wait_held()
        reply.cancel()
        s.b.executor.open_gate.release()
        cancelled(s, reply)


def test_a_cancel_while_a_branch_is_cloned() -> None:
    with serving() as s:
        s.turn("a", PROMPT)
        with s.b.executor.holding_clone() as gate:
            reply = s.submit([*PROMPT, 70], session="a")
            gate.wait_held()
            reply.cancel()
        assert reply.wait(WAIT_S)
        s.drain()
        assert s.runtime.sessions()[0].position == len(PROMPT) + 3, "the history that there was is kept"
        s.runtime.close_session("", "a")
        cancelled(s, reply)


def test_a_cancel_in_the_prefill() -> None:
    with serving(prefix_cache_entries=4, max_batch_tokens=4) as s:
        with s.b.executor.holding_forward(after=1) as gate:
            reply = s.submit()
            gate.wait_held()
            assert reply.state == "prefill"
            reply.cancel()
            reply.cancel()
        cancelled(s, reply)
        assert s.b.executor.n_aborts >= 1, "a long forward would have been waited for"


def test_a_cancel_while_it_decodes() -> None:
    with serving(prefix_cache_entries=4) as s:
        with s.b.executor.holding_forward(after=3) as gate:
            reply = s.submit(PROMPT, 50)
            gate.wait_held()
            assert reply.state == "decode"
            reply.cancel()
        cancelled(s, reply)
        assert reply.choices[0].tokens[:3] == s.b.expected(PROMPT, 3)


def test_a_cancel_after_the_end_changes_nothing() -> None:
    with serving() as s:
        reply = s.ask()
        reply.cancel()
        assert reply.choices[0].reason is Reason.LENGTH
        s.drain()
        assert s.runtime.stats()["cancelled"] == 0


def test_a_cancel_in_a_callback() -> None:
    with serving() as s:

        class Cancelling(Ear):
            def on_update(self, index: int, update: Update) -> None:
                super().on_update(index, update)
                if update.tokens:
                    replies[0].cancel()

        replies: list[Any] = []
        with s.b.executor.holding_forward() as gate:
            replies.append(s.submit(PROMPT, 50, Cancelling()))
            gate.wait_held()
        cancelled(s, replies[0])
        assert len(replies[0].choices[0].tokens) < 50


def test_a_callback_cannot_wait() -> None:
    with serving() as s:
        errors: list[Exception] = []

        class Waiting(Ear):
            def _try(self) -> None:
                for call in (replies[0].wait, replies[0].result, lambda: s.runtime.rewind("", "a", 1)):
                    try:
                        call()
                    except WouldBlockError as error:
                        errors.append(error)

            def on_update(self, index: int, update: Update) -> None:
                if update.tokens:
                    self._try()

            def on_settled(self, index: int, choice: Any) -> None:
                self._try()

        replies: list[Any] = []
        with s.b.executor.holding_forward() as gate:
            replies.append(s.submit(PROMPT, 1, Waiting()))
            gate.wait_held()
        assert replies[0].result(WAIT_S)
        assert len(errors) == 6


# ---- the end


def test_the_end_settles_whoever_waits_computes_or_is_kept() -> None:
    with bench() as b:
        runtime = ServingRuntime(b.runner, ServingOptions(prefix_cache_entries=4, max_requests=2))
        ear = Ear()
        with b.executor.holding_forward(after=3) as gate:
            replies = [
                runtime.submit(ServingRequest([i, *PROMPT], greedy(max_tokens=50), session=str(i), n=1 + i % 2), ear)
                for i in range(4)
            ]
            gate.wait_held()
            ended: list[bool] = []
            ending = threading.Thread(target=lambda: ended.append(runtime.shutdown(WAIT_S)))
            ending.start()
            gate.release()
            ending.join(WAIT_S)
        assert ended == [True]
        for reply in replies:
            assert reply.state == "done"
            assert {choice.reason for choice in reply.choices} == {Reason.SHUTDOWN}
            with pytest.raises(ClosedError):
                reply.result(0)
        assert sorted(ear.settled) == [0, 0, 0, 0, 1, 1]
        stats = runtime.stats()
        assert (stats["shutdown"], stats["sessions"], stats["cache_entries"]) == (4, 0, 0)
        with pytest.raises(ClosedError):
            runtime.submit(ServingRequest(PROMPT))
        with pytest.raises(ClosedError):
            runtime.fork("", "a", "b")
        assert runtime.shutdown(WAIT_S)
        b.drain()
        assert b.executor.n_opened == b.executor.n_closed
        assert b.open().position == 0, "the runner is its caller's"


def test_an_engine_that_hangs_keeps_nobody_waiting() -> None:
    with bench(ignores_abort=True) as b:
        runtime = ServingRuntime(b.runner, ServingOptions(prefix_cache_entries=4, max_requests=1))
        with b.executor.holding_forward() as gate:
            replies = [runtime.submit(ServingRequest(PROMPT, greedy(max_tokens=50), session="a")) for _ in range(1)]
            gate.wait_held()
            replies.append(runtime.submit(ServingRequest(PROMPT)))
            assert not runtime.shutdown(0.05)
            for reply in replies:
                assert reply.wait(0)
                assert reply.choices[0].reason is Reason.SHUTDOWN
        assert runtime.shutdown(WAIT_S)
        b.drain()
        assert b.executor.n_opened == b.executor.n_closed


def test_a_runner_that_was_shut_down_ends_the_requests() -> None:
    with bench() as b:
        runtime = ServingRuntime(b.runner, ServingOptions(prefix_cache_entries=4))
        with b.executor.holding_forward(after=1) as gate:
            reply = runtime.submit(ServingRequest(PROMPT, greedy(max_tokens=50), n=2, session="a"))
            gate.wait_held()
            assert b.runner.shutdown(WAIT_S)
        assert reply.wait(WAIT_S)
        assert {choice.reason for choice in reply.choices} <= {Reason.SHUTDOWN, Reason.FAILED}
        late = runtime.submit(ServingRequest(PROMPT))
        assert late.wait(WAIT_S)
        assert late.choices[0].reason is Reason.SHUTDOWN
        assert runtime.shutdown(WAIT_S)
