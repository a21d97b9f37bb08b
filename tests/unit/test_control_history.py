"""Pending tokens, whole histories, and what samplers see of the past."""

from __future__ import annotations

import numpy as np
import pytest
from control_bench import PROMPT, Bench, assert_failed, bench, greedy
from fake_executor import WAIT_S, keys_of, logits_after
from fake_text import penalised

from ggml_engine.control.config import GenConfig
from ggml_engine.control.generation import Generation, Reason
from ggml_engine.control.session import Session
from ggml_engine.ggml.sampler_config import SamplerConfig

ENDS = ("length", "stop string", "stop token", "end token", "cancel", "callback")


def first_turn(b: Bench, session: Session, how: str) -> Generation:
    """A first turn that ends in one of the ways, after four tokens (cancelled: when it is noticed)."""
    tokens = b.expected(PROMPT, 4)
    options: dict[str, object] = {}
    if how == "stop string":
        options["stop"] = [b.text.shown(tokens[2:])[2:]]
    if how == "stop token":
        options["stop_tokens"] = {tokens[3]}
    if how == "end token":
        b.text.ends = {tokens[3]}
    made: list[Generation] = []

    def on_update(update: object) -> None:
        if how == "cancel" and len(made[0].tokens) == 4:
            made[0].cancel()
        if how == "callback" and len(made[0].tokens) == 4:
            raise ValueError("enough")

    with b.executor.holding_forward() as gate:
        limit = 4 if how == "length" else 20
        made.append(session.generate_async(PROMPT, greedy(**options), on_update, max_tokens=limit))
        gate.wait_held()
    assert made[0].wait(WAIT_S)
    return made[0]


REASONS = {
    "length": Reason.LENGTH,
    "stop string": Reason.STOP,
    "stop token": Reason.STOP,
    "end token": Reason.FINISHED,
    "cancel": Reason.CANCELLED,
    "callback": Reason.FAILED,
}


@pytest.mark.parametrize("how", ENDS)
def test_the_last_token_is_pending_whatever_ended_the_turn(how: str) -> None:  # R109
    with bench() as b:
        session = b.open()
        first = first_turn(b, session, how)
        assert first.reason is REASONS[how]
        assert first.tokens == b.expected(PROMPT, 4)
        assert session.pending == first.tokens[-1]
        assert session.tokens == [*PROMPT, *first.tokens[:-1]]
        assert session.position == len(PROMPT) + 3
        assert b.executor.keys(session._state.sequence) == session.tokens
        b.text.ends = set()
        history = [*PROMPT, *first.tokens, 60, 61]
        assert b.run(session, [60, 61], 4) == b.expected(history, 4)
        assert b.executor.keys(session._state.sequence)[: len(history)] == history


@pytest.mark.parametrize("how", ENDS)
def test_by_delta_and_by_whole_history_is_the_same(how: str) -> None:  # R109
    with bench() as b:
        by_delta, by_whole = b.open(), b.open()
        first = first_turn(b, by_delta, how)
        b.text.ends = set()
        assert first_turn(b, by_whole, how).tokens == first.tokens
        b.text.ends = set()
        whole = by_whole.generate_from([*PROMPT, *first.tokens, 60, 61], greedy(max_tokens=4))
        assert whole.result(WAIT_S)
        delta = b.run(by_delta, [60, 61], 4)
        assert whole.tokens == delta
        assert whole.stats.reused_tokens == len(PROMPT) + 3
        assert whole.stats.evaluated_tokens == 3
        assert by_whole.tokens == by_delta.tokens
        sequences = [session._state.sequence for session in (by_delta, by_whole)]
        assert b.executor.keys(sequences[0]) == b.executor.keys(sequences[1])


def test_a_whole_history_keeps_the_longest_common_prefix() -> None:  # R109
    with bench() as b:
        session = b.session_at()
        for tokens, kept in (
            ([*PROMPT[:5], 90, 91], 5),
            (PROMPT, 5),
            (PROMPT, 8),  # all of it is there, and the last token is forwarded all the same
            (PROMPT[:3], 2),
            ([1], 0),
        ):
            generation = session.generate_from(tokens, greedy(max_tokens=1))
            assert generation.result(WAIT_S)
            assert generation.tokens == b.expected(tokens, 1)
            assert generation.stats.reused_tokens == kept
            assert generation.stats.evaluated_tokens == len(tokens) - kept >= 1
            assert session.tokens == tokens


def test_a_token_that_was_pending_and_not_committed_stays_pending() -> None:  # R109
    with bench() as b:
        session = b.session_at()
        pending = session.pending
        with b.executor.holding_forward() as gate:
            generation = b.start(session, [7, 8], 5)
            gate.wait_held()
            generation.cancel()
            assert generation.wait(WAIT_S)
        assert generation.reason is Reason.CANCELLED
        assert session.position == len(PROMPT)
        assert session.pending == pending
        assert b.run(session, [7]) == b.expected([*PROMPT, pending, 7])


def test_a_cancel_before_the_beginning_loses_nothing() -> None:  # R109
    with bench() as b:
        session, other = b.session_at(), b.open()
        pending = session.pending
        with b.executor.holding_forward() as gate:
            running = b.start(other, [1], 2)
            gate.wait_held()
            generation = b.start(session, [7, 8], 5)
            generation.cancel()
        assert generation.wait(WAIT_S)
        assert generation.reason is Reason.CANCELLED
        assert session.pending == pending
        assert b.run(session, [7]) == b.expected([*PROMPT, pending, 7])
        assert running.wait(WAIT_S)


def test_a_callback_that_raises_at_once_loses_nothing() -> None:  # R109
    def refuse(update: object) -> None:
        raise ValueError("no")

    with bench() as b:
        session = b.session_at()
        pending = session.pending
        assert_failed(b.start(session, [7, 8], 5, on_update=refuse), "ValueError: no")
        assert (session.tokens, session.pending) == (PROMPT, pending)
        assert b.run(session, [7]) == b.expected([*PROMPT, pending, 7])


# ---- penalties


PENALTY = GenConfig(sampler=SamplerConfig(temperature=0.0, repeat_penalty=4.0, repeat_last_n=12))


def with_penalty(history: list[int], n: int) -> list[int]:
    """The tokens that a cold session of `history` generates under the penalty, in plain Python."""
    seen, made = list(history), []
    for _ in range(n):
        row = logits_after(keys_of(seen), 97)
        made.append(penalised(row, seen[-12:], PENALTY.sampler))
        seen.append(made[-1])
    return made


def test_the_penalty_of_these_tests_does_something() -> None:  # R110
    history = [*PROMPT, *(logits_after(keys_of(PROMPT), 97).argsort()[::-1][:8].tolist())]
    assert with_penalty(history[: len(PROMPT)], 8) == with_penalty(PROMPT, 8)
    assert np.isclose(logits_after(keys_of(PROMPT), 97).max(), 8.0)
    repeated = [*PROMPT, next_of(PROMPT)]
    assert any(with_penalty([*h], 30) != greedy_of(h, 30) for h in (PROMPT, repeated))


def next_of(history: list[int]) -> int:
    return int(logits_after(keys_of(history), 97).argmax())


def greedy_of(history: list[int], n: int) -> list[int]:
    seen = list(history)
    for _ in range(n):
        seen.append(next_of(seen))
    return seen[len(history) :]


@pytest.mark.parametrize("upto", [9, 6])
def test_a_clone_is_penalised_for_its_inherited_prefix(upto: int) -> None:  # R110
    with bench() as b:
        source = b.session_at()
        child = source.clone_async(upto).result(WAIT_S)
        assert child is not None
        # what would come without a penalty is made part of the prefix, so that a sampler that forgot it would choose it
        generation = child.generate([33], PENALTY, max_tokens=30, timeout=WAIT_S)
        history = [*PROMPT[:upto], 33]
        assert generation.tokens == with_penalty(history, 30)
        assert b.text.samplers[-1].prompts == [history]


def test_penalties_see_the_sessions_own_tokens_over_turns_and_nobody_elses() -> None:  # R110
    with bench() as b:
        one, two = b.open(), b.open()
        histories: dict[Session, list[int]] = {one: [], two: []}
        for turn in range(4):
            with b.executor.holding_forward() as gate:
                running = []
                for session, history in histories.items():
                    pending = [] if session.pending is None else [session.pending]
                    delta = [(13 * turn + session.id) % 97, 50 + session.id]
                    history.extend([*pending, *delta])
                    running.append((session, session.generate_async(delta, PENALTY, max_tokens=10)))
                    if len(running) == 1:
                        gate.wait_held()
            for session, generation in running:
                assert generation.result(WAIT_S)
                assert generation.tokens == with_penalty(histories[session], 10)
                histories[session].extend(generation.tokens[:-1])


def test_a_rewound_session_is_penalised_for_what_is_left() -> None:  # R110
    with bench() as b:
        session = b.session_at()
        assert session.rewind_async(4).result(WAIT_S) == 4
        generation = session.generate([20], PENALTY, max_tokens=20, timeout=WAIT_S)
        assert generation.tokens == with_penalty([*PROMPT[:4], 20], 20)


def test_every_sampler_is_closed() -> None:  # R100
    with bench() as b:
        session = b.open()
        for _ in range(3):
            b.run(session, [1], 2)
        assert len(b.text.samplers) == 3
        assert all(sampler.is_closed for sampler in b.text.samplers)
