"""A forward that is told to stop, and those who shared it."""

from __future__ import annotations

import pytest
from control_bench import PROMPT, Bench, bench
from fake_executor import WAIT_S

from ggml_engine.control.generation import Generation, Reason
from ggml_engine.control.session import Session


def mixed(b: Bench) -> tuple[list[Session], list[Generation]]:
    """A forward that is held: a session decodes, two others begin with their prompts."""
    sessions = [b.open() for _ in range(3)]
    gate = b.executor.forward_gate
    gate.close()
    running = [b.start(sessions[0], [1], 12)]
    gate.wait_held()
    running += [b.start(sessions[1], [2], 12), b.start(sessions[2], PROMPT, 12)]
    gate.step()
    assert len(b.executor.forwards[1].chunks) == 3
    return sessions, running


@pytest.mark.parametrize("how", ["cancel", "close", "drop"])
def test_one_that_is_cancelled_inside_a_mixed_forward_ends_alone(how: str) -> None:  # R107
    with bench() as b:
        sessions, running = mixed(b)
        if how == "cancel":
            running[2].cancel()
        elif how == "close":
            sessions[2].close()
        third = running[2]
        if how == "drop":
            state = third._state
            del third
            running.pop()
            assert b.executor.n_aborts == 1
            b.executor.forward_gate.release()
            assert state.wait_end(WAIT_S)
            assert state.reason is Reason.CANCELLED
        else:
            assert third.wait(WAIT_S), "the held forward was not aborted"
            assert third.reason is Reason.CANCELLED
            assert third.tokens == []
            b.executor.forward_gate.release()
        for i, generation in enumerate(running[:2]):
            assert generation.result(WAIT_S)
            assert generation.tokens == b.expected([i + 1], 12)
            assert sessions[i].status == "open"
        assert b.executor.forwards[1].outcome == "aborted"
        assert len(b.executor.forwards[2].chunks) == 2, "the others' rows are run again"
        if how == "cancel":
            assert sessions[2].position == 0
            assert b.run(sessions[2], [8]) == b.expected([8])


def test_a_cancelled_decode_does_not_disturb_a_step() -> None:  # R107
    with bench() as b:
        _, running = mixed(b)
        running[0].cancel()
        assert b.executor.n_aborts == 0
        b.executor.forward_gate.release()
        assert running[0].wait(WAIT_S)
        assert running[0].reason is Reason.CANCELLED
        for generation, prompt in ((running[1], [2]), (running[2], PROMPT)):
            assert generation.result(WAIT_S)
            assert generation.tokens == b.expected(prompt, 12)


def test_an_abort_that_comes_after_the_forward_stops_no_later_one() -> None:  # R107
    with bench() as b:
        session = b.open()
        b.executor.abort()
        assert b.run(session, PROMPT) == b.expected(PROMPT)


def test_an_abort_that_cannot_be_undone_poisons_only_that_session() -> None:  # R107
    with bench() as b:
        sessions, running = mixed(b)
        b.executor.rewind_faults.add(0, RuntimeError("stuck"))  # of the first of the step
        running[2].cancel()
        assert running[2].wait(WAIT_S)
        b.executor.forward_gate.release()
        first = b.executor.calls_of("rewind")[0].arguments[0]
        broken = next(i for i, session in enumerate(sessions) if session._state.sequence == first)
        assert running[broken].wait(WAIT_S)
        assert sessions[broken].status == "poisoned"
        for i in {0, 1} - {broken}:
            assert running[i].result(WAIT_S)
            assert running[i].tokens == b.expected([i + 1], 12)


def test_a_shutdown_ends_a_forward_that_is_held() -> None:  # R107 R54
    with bench() as b:
        session = b.open()
        with b.executor.holding_forward() as gate:
            generation = b.start(session, PROMPT)
            gate.wait_held()
            assert b.runner.shutdown(WAIT_S), "the held forward was not aborted"
            assert generation.reason is Reason.SHUTDOWN
        assert not b.executor._abort.is_set(), "the executor is left as it was found"
        assert b.executor.cache.used_cells == 0
