"""Which prompts a serving runtime captures, and how lanes come and go. `R` numbers: rules of the contract."""

from __future__ import annotations

from typing import Any

import pytest
from control_bench import PROMPT
from fake_executor import WAIT_S
from serving_bench import Ear, Serving, serving, wait_for

ENDS = ("initial", "every")


def two_turns_and_a_cancel(s: Serving) -> tuple[list[int], list[int]]:
    """Two turns of the session "a", and a third one that is cancelled; the first two prompts."""
    first = list(PROMPT)
    second = [*s.turn("a", first), 50, 51]
    history = s.turn("a", second)
    with s.b.executor.holding_forward() as gate:
        reply = s.submit([*history, 60, 61], session="a")
        gate.wait_held()
        reply.cancel()
    assert reply.wait(WAIT_S)
    s.drain()
    return first, second


def test_initial_keeps_the_first_prompt_and_every_the_later_ones_too() -> None:  # R75
    reused = {}
    for end in ENDS:
        with serving(prefix_cache_entries=8, prefix_checkpoint_prompt_end=end) as s:
            first, second = two_turns_and_a_cancel(s)
            reused[end] = s.reused(second, session="b")
    assert reused == {"initial": len(first), "every": len(second) - 1}
    assert reused["initial"] != reused["every"]


def test_a_saved_prompt_takes_no_clone_and_no_lane() -> None:  # R78
    with serving(prefix_cache_entries=8, prefix_capture_slots=1) as s:
        s.ask()
        assert s.n_clones == 1
        other = [40, 41, 42]
        for _ in range(4):
            s.ask()
        assert s.n_clones == 1 + 4, "each repeat is a look-up, and no capture"
        with s.b.executor.holding_forward(after=1) as gate:
            ear = Ear()
            repeat = s.submit(PROMPT, 6, ear)
            gate.wait_held()  # the second step of the repeat: it had its chance to take the lane
            assert ear.first_token.is_set()
            assert s.runtime.stats()["lanes_in_use"] == 0
            new = s.submit(other, 2, session="b")
        assert new.result(WAIT_S)
        assert repeat.result(WAIT_S)
        s.drain()
        assert other in s.keys


def test_a_lane_is_free_when_its_clone_has_settled_and_the_turn_goes_on() -> None:  # R79
    with serving(prefix_cache_entries=8, prefix_capture_slots=1) as s:
        with s.b.executor.holding_forward(after=1) as gate:
            a = s.submit(PROMPT, 8)
            gate.wait_held()  # the second step of A: its clone came before
            assert s.control_barrier()
            assert s.keys == [PROMPT]
            assert s.runtime.stats()["lanes_in_use"] == 0
            b = s.submit([40, 41, 42], 1)
            while not b.wait(0.02):
                gate.release_one()
            wait_for(lambda: [40, 41, 42] in s.keys, "B's prompt was not captured beside A")
            assert a.state == "decode"
        assert a.result(WAIT_S)


def test_the_control_thread_waits_for_no_clone() -> None:  # R80
    with serving(prefix_cache_entries=8) as s:
        ear = Ear()
        with s.b.executor.holding_clone() as gate:
            a = s.submit(PROMPT, 3, ear)
            gate.wait_held()
            b = s.submit([40, 41], 2)
            opened = s.b.runner.open_session_async()
            for _ in range(3):  # b is looked up, and its session asked for, each after what was posted before
                assert s.control_barrier(), "the control thread waits for the engine"
            assert b.state == "prefill"
            assert not s.keys
            assert s.runtime.stats()["lanes_in_use"] == 1
        assert a.result(WAIT_S)
        assert b.result(WAIT_S)
        opened.result(WAIT_S).close()


@pytest.mark.parametrize("session", [None, "a"])
def test_a_prompt_whose_request_was_cancelled_while_it_was_cloned_is_kept(session: str | None) -> None:  # R82
    with serving(prefix_cache_entries=8, prefix_capture_slots=1, max_requests=1) as s:
        prompt = [11, 12, 13, 14]
        with s.b.executor.holding_clone() as gate:
            reply = s.submit(prompt, 9, session=session)
            gate.wait_held()
            reply.cancel()
            assert s.runtime.stats()["lanes_in_use"] == 1
        assert reply.wait(WAIT_S)
        s.drain()
        stats = s.runtime.stats()
        assert (stats["lanes_in_use"], stats["running"], stats["cancelled"]) == (0, 0, 1)
        assert s.reused(prompt, session="other") == 3


def test_closing_a_session_drops_its_snapshot_before_the_request_ends() -> None:  # R83
    with serving(prefix_cache_entries=8) as s:
        n_closed: list[int] = []

        class Noting(Ear):
            def on_settled(self, index: int, choice: Any) -> None:
                n_closed.append(s.b.executor.n_closed)

        with s.b.executor.holding_clone() as gate:
            reply = s.submit(PROMPT, 9, Noting(), session="a")
            gate.wait_held()
            s.runtime.close_session("", "a")
            assert reply.state == "decode", "the request has ended before its snapshot settled"
        assert reply.wait(WAIT_S)
        s.drain()
        closes = [call.arguments[0] for call in s.b.executor.calls_of("close")]
        (clone,) = [call.result for call in s.b.executor.calls_of("clone")]
        assert closes[0] == clone, "the source was closed before the snapshot that nobody wants"
        assert n_closed[0] >= 1
        assert not s.keys
        assert s.n_open == 0
        assert not s.runtime.sessions()


@pytest.mark.parametrize("end", ENDS)
def test_sessions_that_open_together_capture_each_its_first_prompt(end: str) -> None:  # R84
    with serving(prefix_cache_entries=8, prefix_checkpoint_prompt_end=end) as s:
        prompts = [[20 + i, 1, 2, 3] for i in range(4)]
        with s.b.executor.holding_forward() as gate:
            replies = [s.submit(prompts[0], 3, session="0")]
            gate.wait_held()
            replies += [s.submit(prompt, 3, session=str(i)) for i, prompt in enumerate(prompts[1:], 1)]
        for reply in replies:
            assert reply.result(WAIT_S)
        s.drain()
        assert sorted(s.keys) == prompts


def test_a_busy_lane_keeps_nobody_from_looking_up_and_the_owner_its_snapshot() -> None:  # R86
    with serving(prefix_cache_entries=8, prefix_capture_slots=1, max_batch_tokens=16) as s:
        warm = [30, 31, 32, 33]
        s.ask(warm)
        with s.b.executor.holding_clone() as gate:
            owner = s.submit(PROMPT, 3)
            gate.wait_held()
            assert s.runtime.stats()["lanes_in_use"] == 1
            # neither of them is cached, so that nothing but the lane keeps the second from being captured
            other = s.submit([*warm, 70, 71], 3)
            assert s.control_barrier()
        assert owner.result(WAIT_S)
        assert other.result(WAIT_S)
        assert other.stats.cached_tokens == len(warm)
        s.drain()
        assert PROMPT in s.keys


def test_a_request_finds_no_lane_and_is_not_captured() -> None:
    with serving(prefix_cache_entries=8, prefix_capture_slots=1, max_batch_tokens=64) as s:
        lane = s.runtime._lanes.take()
        assert lane is not None
        s.ask()
        assert s.n_clones == 0
        lane.release()
        lane.release()
        assert s.runtime.stats()["lanes_in_use"] == 0
        s.ask()
        assert s.keys == [PROMPT]


def test_requests_without_a_name_share_the_cache() -> None:  # R87
    with serving(prefix_cache_entries=8) as s:
        assert s.reused(PROMPT) == 0
        assert s.reused(PROMPT) == len(PROMPT) - 1
        assert s.reused([*PROMPT, 3, 4]) == len(PROMPT)


@pytest.mark.parametrize(("ring", "reused"), [(None, len(PROMPT) - 1), (64, 0)])
def test_one_conversation_takes_one_entry_where_a_longer_one_serves_for_it(
    ring: int | None, reused: int
) -> None:  # R88
    with serving(prefix_cache_entries=4, prefix_checkpoint_prompt_end="every", ring=ring) as s:
        s.turn("a", PROMPT)
        history = [60, 61, 62]
        for turn in range(4):
            history = [*s.turn("b", history), 63 + turn]
        # without that, the four turns of B take the four entries: docs/serving.md says how many a cache needs then
        assert s.reused(PROMPT, session="c") == reused
        assert len(s.keys) == (2 if ring is None else 4)


def test_a_growing_conversation_without_a_name_takes_one_entry() -> None:  # R88
    with serving(prefix_cache_entries=4) as s:
        history = list(PROMPT)
        for turn in range(4):
            history = [*history, *s.ask(history).choices[0].tokens, 60 + turn]
        assert len(s.keys) == 1
        assert s.reused(PROMPT) == len(PROMPT) - 1


def test_a_policy_says_alone_where_a_prompt_is_captured() -> None:  # R89
    for end in ENDS:
        with serving(
            prefix_cache_entries=8, prefix_checkpoint_prompt_end=end, prefix_checkpoint_policy=lambda *_: {2}
        ) as s:
            history = s.turn("a", PROMPT)
            assert s.reused([*history, 7], session="a") == len(history) - 1
            assert [call.arguments[1] for call in s.b.executor.calls_of("clone")] == [2]
            assert s.keys == [PROMPT[:2]]


def test_an_interval_captures_every_so_many_tokens_and_the_first_end() -> None:
    with serving(prefix_cache_entries=8, prefix_checkpoint_interval=4, ring=64) as s:
        history = [*s.turn("a", PROMPT), *range(20, 26)]
        assert sorted(s.keys) == sorted([PROMPT[:4], PROMPT[:8], PROMPT])
        s.turn("a", history)
        assert [len(key) for key in s.keys] == [4, 8, 9, 16]
        assert s.reused([*PROMPT[:8], 90, 91]) == 8


def test_a_snapshot_serves_while_its_turn_is_still_decoding() -> None:  # R92
    with serving(prefix_cache_entries=8) as s:
        with s.b.executor.holding_forward(after=1) as gate:
            a = s.submit(PROMPT, 12)
            gate.wait_held()
            assert s.control_barrier()
            b = s.submit(PROMPT, 1)
            while not b.wait(0.02):
                gate.release_one()
            assert b.stats.cached_tokens == len(PROMPT) - 1
            assert b.stats.evaluated_tokens == 1
            assert a.state == "decode"
            assert len(a.choices[0].tokens) < 12
        assert a.result(WAIT_S)


@pytest.mark.parametrize("fault", [RuntimeError("no"), 1])
def test_a_clone_that_fails_ends_neither_the_request_nor_its_lane(fault: Any) -> None:  # R81
    with serving(prefix_cache_entries=8, prefix_capture_slots=1) as s:
        s.b.executor.fail_clone(fault)
        s.ask()
        assert not s.keys
        assert s.runtime.stats()["lanes_in_use"] == 0
        s.ask()
        assert s.keys == [PROMPT]


def test_nothing_is_cloned_without_a_cache() -> None:
    with serving() as s:
        history = s.turn("a", PROMPT)
        s.ask()
        assert s.reused([*history, 5], session="a") == len(history) - 1
        assert s.n_clones == 0
