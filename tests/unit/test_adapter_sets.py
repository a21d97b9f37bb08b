"""Adapters in the control plane, on an executor without a model: who shares a step, a clone and a snapshot with whom."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from adapters import FakeAdapter
from control_bench import PROMPT, Bench, bench, greedy
from fake_executor import WAIT_S
from prefix_bench import look

from ggml_engine.control.prefix_cache import PrefixCache
from ggml_engine.control.prefix_match import MissReason
from ggml_engine.control.session import Session
from ggml_engine.control.step_plan import GroupTurns, StepCost, Want, plan_step
from ggml_engine.errors import OptionError
from ggml_engine.models.adapter_set import NO_ADAPTERS, AdapterSet

A, B = FakeAdapter("a"), FakeAdapter("b")
SETS = [(), ((A, 1.0),), ((A, 0.5),), ((B, 1.0),), ((A, 1.0), (B, 1.0)), ((B, 1.0), (A, 1.0))]


def open_with(b: Bench, adapters: Any) -> Session:
    return b.runner.open_session(WAIT_S, adapters=adapters)


# ---- sets


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([A], "pairs"),
        ([(A,)], "pairs"),
        (["ab"], "pairs"),
        ([("path.gguf", 1.0)], "pairs"),
        ([(A, "1")], "number"),
        ([(A, True)], "number"),
        ([(A, None)], "number"),
        ([(A, float("nan"))], "finite"),
        ([(A, float("-inf"))], "finite"),
        ([(A, 1e39)], "finite"),
        ([(A, 1.0), (B, 1.0), (A, 0.5)], "twice"),
    ],
)
def test_what_is_no_set_is_refused(pairs: Any, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        AdapterSet.of(pairs)
    with bench() as b:
        with pytest.raises(OptionError, match=message):
            open_with(b, pairs)
        with pytest.raises(OptionError, match=message):
            PrefixCache(1).lookup(b.runner, PROMPT, WAIT_S, adapters=pairs)


def test_scales_are_rounded_to_32_bits_and_none_of_0_is_kept() -> None:
    assert AdapterSet.of([(A, 0.1)]) == AdapterSet.of([(A, float(np.float32(0.1)))])
    assert AdapterSet.of([(A, 0), (B, 2)]) == AdapterSet.of([(B, np.float64(2))])
    assert AdapterSet.of([(A, 0.0)]) == AdapterSet.of([(A, 1e-50)]) == NO_ADAPTERS
    assert len({AdapterSet.of(pairs) for pairs in SETS}) == len(SETS)


# ---- sessions


def test_sessions_of_different_adapters_run_at_the_same_time_and_each_as_if_alone() -> None:
    with bench() as b:
        sessions = [open_with(b, pairs) for pairs in SETS for _ in range(2)]
        running = [b.start(session, [*PROMPT, i // 2], 12) for i, session in enumerate(sessions)]
        for i, generation in enumerate(running):
            assert generation.wait(WAIT_S)
            expected = b.executor.expected([*PROMPT, i // 2], 12, AdapterSet.of(SETS[i // 2]))
            assert generation.tokens == expected
        assert [session.adapters for session in sessions] == [pairs for pairs in SETS for _ in range(2)]
        assert max(len(forward.chunks) for forward in b.executor.forwards) == 2


def test_a_clone_and_a_snapshot_have_the_adapters_of_their_source() -> None:
    with bench() as b:
        source = open_with(b, [(A, 0.5)])
        source.generate(PROMPT, greedy(max_tokens=1), timeout=WAIT_S)
        for future in (source.clone_async(5), source.snapshot_async(5)):
            child = future.result(WAIT_S)
            assert child is not None
            assert child.adapters == ((A, 0.5),)
            assert child.fingerprint == source.fingerprint != b.executor.fingerprint
            assert b.run(child, [7], 3) == b.executor.expected([*PROMPT[:5], 7], 3, AdapterSet.of([(A, 0.5)]))


def test_an_executors_own_adapters_are_taken_where_nothing_is_asked_for() -> None:
    with bench() as b:
        own = AdapterSet.of([(B, 2.0)])
        type(b.executor).adapters, before = own, type(b.executor).adapters
        try:
            assert b.open().adapters == own.scaled
            assert open_with(b, []).adapters == ()
            cache = PrefixCache(4)
            session = b.session_at()
            assert cache.insert(session, PROMPT, timeout=WAIT_S)
            assert look(b, cache, [*PROMPT, 3]).n_reused == len(PROMPT)
            assert cache.lookup(b.runner, [*PROMPT, 3], WAIT_S, adapters=()).n_reused == 0
        finally:
            type(b.executor).adapters = before


# ---- prefixes


def test_a_snapshot_serves_prompts_of_its_own_adapters_and_scale_alone() -> None:  # R25
    with bench() as b:
        for i, kept in enumerate(SETS):
            cache = PrefixCache(8)
            session = open_with(b, kept)
            session.generate(PROMPT, greedy(max_tokens=1), timeout=WAIT_S)
            assert cache.insert(session, PROMPT, timeout=WAIT_S)
            for j, wanted in enumerate(SETS):
                found = cache.lookup(b.runner, [*PROMPT, 3], WAIT_S, adapters=wanted)
                if i != j:
                    assert found.session is None
                    assert found.miss is not None
                    assert found.miss.reason is MissReason.FOREIGN
                    continue
                assert found.n_reused == len(PROMPT)
                assert found.session is not None
                assert found.session.adapters == wanted
                expected = b.executor.expected([*PROMPT, 3], 4, AdapterSet.of(wanted))
                assert b.run(found.session, [3], 4) == expected


def test_the_same_prompt_under_two_adapters_is_two_entries() -> None:  # R25
    with bench() as b:
        cache = PrefixCache(8, replace_extended=True)
        for pairs in SETS:
            session = open_with(b, pairs)
            capture = cache.capture_prompt(session, PROMPT)
            session.generate_from(PROMPT, greedy(max_tokens=2), on_update=capture.wrap()).wait(WAIT_S)
            assert capture.collect(timeout=WAIT_S)
        assert len(cache) == len(SETS)


# ---- whose step is next


def test_groups_take_turns_and_nobody_waits_for_more_steps_than_there_are_others() -> None:
    turns = GroupTurns()
    waited = dict.fromkeys(range(4), 0)
    present: list[int] = []
    for step in range(60):
        if step % 3 == 0 and len(present) < 4:
            present.insert(0, len(present))  # newcomers come first in the queue
        chosen = turns.next([group for group in present for _ in range(group + 1)])
        for group in present:
            waited[group] = 0 if group == chosen else waited[group] + 1
            assert waited[group] < len(present)


def test_groups_that_come_and_go_do_not_keep_one_that_waits_from_its_turn() -> None:
    turns = GroupTurns()
    assert turns.next(["old", "first"]) == "old"
    served = [turns.next([f"new {i}", "old", f"new {i + 1}"]) for i in range(12)]
    assert served.count("old") >= 3


def test_every_group_gets_its_share_of_the_steps() -> None:
    with bench() as b:
        sessions = [open_with(b, SETS[0]) for _ in range(6)] + [open_with(b, SETS[1]), open_with(b, SETS[3])]
        for generation in b.start_together(sessions, 20):
            assert generation.wait(WAIT_S)
        one_of_many, alone = sessions[0]._state.sequence, sessions[-1]._state.sequence
        order = [chunk.sequence for forward in b.executor.forwards[8:40] for chunk in forward.chunks]
        assert abs(order.count(one_of_many) - order.count(alone)) <= 3


def test_a_prompt_is_read_in_small_pieces_also_while_another_group_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = [Want(100, 100, False)]
    assert plan_step(prompt, 512, 16, 0) == [100]
    assert plan_step(prompt, 512, 16, 0, others_stream=True) == [16]
    monkeypatch.setattr(StepCost, "prefill_budget", lambda _: 16)
    with bench(max_batch_tokens=64, capacity=2048) as b:
        stream, reader = open_with(b, SETS[1]), open_with(b, SETS[3])
        with b.executor.holding_forward(after=3) as gate:
            streaming = b.start(stream, [1], 60)
            gate.wait_held()
            reading = b.start(reader, list(range(1, 91)), 1)
            gate.release()
            assert streaming.wait(WAIT_S)
            assert reading.wait(WAIT_S)
        chunks = b.executor.chunks_of(reader._state.sequence)
        assert [chunk.stop - chunk.start for chunk in chunks] == [16] * 5 + [10]
