"""Rewinding sessions."""

from __future__ import annotations

from concurrent.futures import Future

import pytest
from control_bench import PROMPT, assert_failed, bench
from fake_executor import WAIT_S

from ggml_engine.control.generation import Update
from ggml_engine.errors import (
    EngineError,
    InputError,
    PoisonedError,
    PositionError,
    SessionBusyError,
    SessionError,
)


def test_a_rewind_tells_the_new_position() -> None:  # R101
    with bench() as b:
        session = b.session_at()
        for to in (9, 6, 6, 0):
            assert session.rewind_async(to).result(WAIT_S) == to
            assert session.position == to
            assert session.tokens == PROMPT[:to]
            assert b.executor.length_now(session._state.sequence) == to


@pytest.mark.parametrize("to", [-1, 10, 2**63, -(2**63)])
def test_a_position_that_is_not_there_is_refused_and_changes_nothing(to: int) -> None:  # R101
    with bench() as b:
        session = b.session_at()
        before = (session.tokens, session.pending, b.executor.free_cells)
        with pytest.raises(PositionError, match=r"cannot rewind to .*: the session is at position 9"):
            session.rewind_async(to).result(WAIT_S)
        assert (session.tokens, session.pending, b.executor.free_cells) == before
        assert not b.executor.calls_of("rewind")
        assert b.run(session, [4]) == b.expected([*PROMPT, before[1], 4])


@pytest.mark.parametrize("to", [None, "3", 3.0, True])
def test_what_is_no_position_is_refused(to: object) -> None:  # R101
    with bench() as b:
        session = b.session_at()
        with pytest.raises(InputError):
            session.rewind_async(to).result(WAIT_S)  # type: ignore[arg-type]
        assert session.position == 9


def test_a_busy_session_is_not_rewound_now_or_later() -> None:  # R102
    with bench() as b:
        session = b.open()
        with b.executor.holding_forward() as gate:
            generation = b.start(session, PROMPT, 6)
            gate.wait_held()
            future = session.rewind_async(0)
            assert future.done(), "it must be refused at once"
            with pytest.raises(SessionBusyError):
                future.result(0)
        assert generation.result(WAIT_S)
        assert generation.tokens == b.expected(PROMPT, 6)
        assert session.position == len(PROMPT) + 5
        assert not b.executor.calls_of("rewind")


def test_a_rewind_behind_a_generation_that_waits_is_refused() -> None:  # R102
    with bench() as b:
        session, other = b.open(), b.open()
        with b.executor.holding_forward() as gate:
            running = b.start(other, [1], 3)
            gate.wait_held()
            generation = b.start(session, PROMPT, 6)  # queued: the thread is in the forward of another
            future = session.rewind_async(0)
            with pytest.raises(SessionBusyError):
                future.result(0)
        assert generation.result(WAIT_S)
        assert generation.tokens == b.expected(PROMPT, 6)
        assert running.wait(WAIT_S)


def test_after_a_rewind_it_goes_on_like_a_cold_session_of_what_is_left() -> None:  # R103
    with bench() as b:
        session = b.session_at()
        b.run(session, [1], 6)
        for to in (12, 9, 4, 0):
            assert session.rewind_async(to).result(WAIT_S) == to
            assert session.pending is None
            kept = session.tokens
            assert b.run(session, [70 + to], 4) == b.expected([*kept, 70 + to], 4)
            assert session.rewind_async(to).result(WAIT_S) == to


def test_a_clone_keeps_what_its_source_drops() -> None:  # R104
    with bench() as b:
        source = b.session_at()
        child = source.clone_async(7).result(WAIT_S)
        snapshot = source.snapshot_async(9).result(WAIT_S)
        assert child is not None
        assert snapshot is not None
        assert b.executor.cache.used_cells == 9
        assert source.rewind_async(2).result(WAIT_S) == 2
        assert b.executor.cache.used_cells == 9
        snapshot.close()
        b.drain()
        assert b.executor.cache.used_cells == 7
        assert b.run(source, [40], 3) == b.expected([*PROMPT[:2], 40], 3)
        assert b.run(child, [41], 3) == b.expected([*PROMPT[:7], 41], 3)
        assert b.executor.cache.used_cells == 7 + 3 + 3
        child.close()
        b.drain()
        assert b.executor.cache.used_cells == 2 + 3


def test_a_rewind_that_a_callback_asks_for_runs_before_the_next_forward() -> None:  # R105
    with bench() as b:
        session, other = b.open(), b.session_at()
        asked_at: list[int] = []
        futures: list[Future[int]] = []

        def on_update(update: Update) -> None:
            if update.tokens and not asked_at:
                asked_at.append(b.executor.n_forwards)
                futures.append(other.rewind_async(3))

        assert b.start(session, [1], 6, on_update=on_update).result(WAIT_S)
        assert futures[0].result(WAIT_S) == 3
        assert [call.n_forwards for call in b.executor.calls_of("rewind")] == asked_at
        assert b.executor.n_forwards > asked_at[0]


def test_a_poisoned_session_can_only_be_closed() -> None:  # R106
    with bench() as b:
        session = b.session_at()
        b.executor.fail_forward(RuntimeError("the device is gone"))
        assert_failed(b.start(session, [1]), "the device is gone")
        with pytest.raises(PoisonedError, match="the device is gone"):
            session.rewind_async(0).result(WAIT_S)
        assert not b.executor.calls_of("rewind")
        used = b.executor.cache.used_cells
        assert used == 11, "the cells of the failed step are claimed"
        session.close()
        b.drain()
        assert b.executor.cache.used_cells == 0


def test_a_closed_session_is_not_rewound() -> None:  # R101
    with bench() as b:
        session = b.session_at()
        session.close()
        with pytest.raises(SessionError, match="closed"):
            session.rewind_async(0).result(WAIT_S)


def test_an_executor_that_cannot_rewind_says_so() -> None:  # R101
    with bench() as b:
        session = b.session_at()
        b.executor.rewind_faults.add(0, EngineError("not now"))
        with pytest.raises(EngineError, match="not now"):
            session.rewind_async(3).result(WAIT_S)
        assert session.position == 9
