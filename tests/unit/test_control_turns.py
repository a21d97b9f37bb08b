"""Turns of the engine taken by hand, on one thread: what must be done before the next forward, and what breaks then."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from concurrent.futures import wait
from itertools import count
from typing import Any

import pytest
from fake_executor import FakeExecutor
from fake_text import FakeText

from ggml_engine.control.config import GenConfig
from ggml_engine.control.core import Core
from ggml_engine.control.generation import Generation, Reason
from ggml_engine.control.options import RunnerOptions
from ggml_engine.control.runner import Runner
from ggml_engine.control.session import Session
from ggml_engine.errors import ClosedError, ComputeError, PoolFullError
from ggml_engine.ggml.sampler_config import SamplerConfig


class ByHand:
    """A runner without a thread."""

    def __init__(self, executor: FakeExecutor) -> None:
        now = count()
        self.executor = executor
        self.core = Core(executor, FakeText(), RunnerOptions(), lambda: next(now) / 1000)
        self.runner = Runner.over(self.core)

    def open(self) -> Session:
        opened = self.runner.open_session_async()
        assert self.core.turn()
        return opened.result(0)

    def turns(self, n: int) -> None:
        for _ in range(n):
            assert self.core.turn()

    def end(self) -> None:
        assert not self.runner.shutdown(0)  # nobody else takes the turn
        assert not self.core.turn()


@pytest.fixture
def hand() -> Iterator[ByHand]:
    made = ByHand(FakeExecutor(64, max_batch_tokens=16))
    yield made
    made.end()
    made.executor.check_balance()  # R100


def test_a_turn_is_the_commands_and_one_forward(hand: ByHand) -> None:
    session = hand.open()
    greedy = GenConfig(sampler=SamplerConfig(temperature=0))
    generation = session.generate_async([1, 2, 3], greedy, max_tokens=2)
    assert hand.executor.n_forwards == 0
    hand.turns(1)
    assert hand.executor.n_forwards == 1
    assert (session.position, len(generation.tokens)) == (3, 1)
    hand.turns(1)
    assert generation.tokens == hand.executor.expected([1, 2, 3], 2)


def test_what_an_end_queues_runs_before_the_next_forward(hand: ByHand) -> None:  # R14
    """The end of a cancelled generation is told in a step: what is asked for there must not wait for its forward."""
    first, second = hand.open(), hand.open()
    clones = []
    other = second.generate_async([4, 5], max_tokens=9)

    def on_settled(_: Generation) -> None:
        clones.append((second.position, second.clone_async()))

    generation = first.generate_async([1, 2, 3], max_tokens=9, on_settled=on_settled)
    hand.turns(2)
    generation.cancel()
    hand.turns(3)
    assert generation.reason is Reason.CANCELLED
    [(position, clone)] = clones
    assert clone.result(0).position == position  # of all that is committed: one more, had a forward come first
    assert other.reason is None


def test_what_the_end_of_a_victim_queues_runs_before_the_next_forward(hand: ByHand) -> None:  # R14
    first, second = hand.open(), hand.open()
    clones: list[tuple[int, Any]] = []

    def on_settled(_: Generation) -> None:
        clones.append((hand.executor.n_forwards, second.clone_async(0)))

    other = first.generate_async([1] * 20, max_tokens=80)
    victim = second.generate_async([2] * 20, max_tokens=80, on_settled=on_settled)
    while not clones:
        hand.turns(1)
    assert isinstance(victim.error, PoolFullError)
    [(n_forwards, clone)] = clones
    assert hand.executor.n_forwards == n_forwards
    hand.turns(1)
    assert clone.result(0) is not None
    [call] = hand.executor.calls_of("clone")
    assert call.n_forwards == n_forwards
    assert other.reason is None


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_an_end_asked_for_just_before_the_forward_spares_the_forward(
    hand: ByHand, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:  # R107
    session, other = hand.open(), hand.open()
    generation = session.generate_async(list(range(9)))
    beside = other.generate_async([1], GenConfig(max_tokens=2, sampler=SamplerConfig(temperature=0.0)))
    end = generation.cancel if how == "cancel" else session.close

    def clear_abort() -> None:  # the step is made up by then, and nobody could know of its forward yet
        end()
        FakeExecutor.clear_abort(hand.executor)

    with monkeypatch.context() as patched:
        patched.setattr(hand.executor, "clear_abort", clear_abort)
        hand.turns(2)
    assert generation.reason is Reason.CANCELLED
    assert generation.stats.evaluated_tokens == 0
    hand.turns(3)
    assert beside.result(0)
    assert beside.tokens == hand.executor.expected([1], 2)


def test_a_closed_session_says_so_and_one_that_is_closed_later_is_cancelled(hand: ByHand) -> None:  # R55
    session = hand.open()
    before = session.generate_async([1, 2])
    session.close()
    after = session.generate_async([1, 2])
    hand.turns(2)
    assert before.reason is Reason.CANCELLED
    assert after.reason is Reason.FAILED
    with pytest.raises(ClosedError, match="closed"):
        after.result(0)


def test_a_request_that_cannot_be_keeps_no_session(hand: ByHand) -> None:  # R52
    session = hand.open()
    refused = session.generate_async([-1])
    handle = weakref.ref(session)
    del session
    assert handle() is None  # its close is queued now, not when the engine comes to tell what cannot be
    hand.turns(1)
    assert refused.reason is Reason.FAILED
    assert len(hand.executor.calls_of("close")) == 1


def test_who_waits_for_a_cancelled_future_is_told_when_the_runner_stops() -> None:  # R54
    hand = ByHand(FakeExecutor(64))
    session = hand.open()
    futures = [session.clone_async(), session.rewind_async(0), hand.runner.open_session_async()]
    assert all(future.cancel() for future in futures)
    hand.end()
    assert not wait(futures, 0).not_done


def test_a_snapshot_that_cannot_be_closed_does_not_end_those_who_need_its_cells() -> None:
    class Broken(FakeExecutor):
        def close(self, sequence: int) -> None:
            super().close(sequence)
            if sequence == snapshots[0]:
                raise ComputeError("a close that fails")

    snapshots = [-1]
    hand = ByHand(Broken(32, max_batch_tokens=16))
    first, second = hand.open(), hand.open()
    first.generate_async([1] * 16, max_tokens=1, on_update=lambda _: None)
    hand.turns(2)
    kept = first.snapshot_async()
    hand.turns(1)
    snapshot = kept.result(0)
    assert snapshot is not None
    snapshots[0] = hand.executor.issued[-1]
    first.close()
    generation = second.generate_async([2] * 24, max_tokens=4)
    hand.turns(6)
    assert snapshot.status == "evicted"
    assert generation.reason is Reason.LENGTH
    hand.end()
    hand.executor.check_balance()


def test_a_cancelled_generation_stays_cancelled_when_its_abort_cannot_be_undone() -> None:  # R55
    class Cancelling(FakeExecutor):
        def _is_aborted(self) -> bool:
            generations[0].cancel()
            return super()._is_aborted()

    hand = ByHand(Cancelling(64))
    session = hand.open()
    generations = [session.generate_async([1, 2, 3], max_tokens=4)]
    hand.executor.rewind_faults.add(0, ComputeError("a rewind that fails"))
    hand.turns(1)
    assert generations[0].reason is Reason.CANCELLED
    assert session.status == "poisoned"
    hand.end()
    hand.executor.check_balance()
