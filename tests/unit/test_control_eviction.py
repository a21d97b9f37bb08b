"""Which snapshots give up their cells when these run out: only those whose end is of use to somebody."""

from __future__ import annotations

from control_bench import PROMPT, Bench, assert_failed, bench
from fake_executor import WAIT_S

from ggml_engine.control.generation import Reason
from ggml_engine.control.session import Session
from ggml_engine.errors import PoolFullError
from ggml_engine.executor.protocol import Executor

LONG = list(range(20))


def snapshot_of(session: Session, upto: int | None = None) -> Session:
    snapshot = session.snapshot_async(upto).result(WAIT_S)
    assert snapshot is not None
    return snapshot


def parked(b: Bench, token: int, *lengths: int) -> list[Session]:
    """Snapshots of one session at these positions, in that order; the session is closed."""
    with b.session_at([token] * max(lengths)) as session:
        made = [snapshot_of(session, n) for n in lengths]
    b.drain()
    return made


def statuses(*snapshots: Session) -> list[str]:
    return [snapshot.status for snapshot in snapshots]


def test_a_snapshot_whose_cells_a_session_has_is_not_given_up_in_vain() -> None:  # R50
    with bench(capacity=32) as b:
        session = b.session_at([1] * 16)
        whole, part = snapshot_of(session), snapshot_of(session, 5)
        other = b.open()
        failed = b.start(other, LONG)
        assert_failed(failed, "cells")
        assert isinstance(failed.error, PoolFullError)
        assert statuses(whole, part) == ["open", "open"]
        child = whole.clone_async(9).result(WAIT_S)
        assert child is not None
        assert b.run(child, [7], 3) == b.expected([*[1] * 9, 7], 3)


def test_a_snapshot_with_cells_of_its_own_is_given_up_for_them() -> None:  # R50
    with bench(capacity=32) as b:
        session = b.session_at([1] * 16)
        shared, own = snapshot_of(session, 5), snapshot_of(session)
        assert session.rewind_async(8).result(WAIT_S) == 8
        assert b.run(b.open(), LONG, 4) == b.expected(LONG, 4)
        assert statuses(shared, own) == ["open", "evicted"]


def test_of_snapshots_of_one_conversation_only_as_much_is_given_up_as_is_needed() -> None:  # R50
    with bench(capacity=32) as b:
        begin, end = parked(b, 1, 12, 16)
        assert b.run(b.open(), LONG[:18], 2) == b.expected(LONG[:18], 2)
        assert statuses(begin, end) == ["open", "evicted"]


def test_what_was_used_longest_ago_goes_first_among_those_whose_end_frees_cells() -> None:  # R50
    with bench(capacity=48) as b:
        begin, end = parked(b, 1, 12, 16)
        (between,) = parked(b, 2, 12)
        child = end.clone_async(3).result(WAIT_S)  # used last
        assert child is not None
        child.close()
        assert b.run(b.open(), LONG, 4) == b.expected(LONG, 4)
        assert statuses(begin, between, end) == ["open", "evicted", "open"]


def test_snapshots_that_share_cells_with_each_other_alone_give_them_up_together() -> None:  # R50
    with bench(capacity=48) as b:
        old = parked(b, 1, 16, 16)
        new = parked(b, 2, 16, 16)
        assert b.run(b.open(), LONG, 4) == b.expected(LONG, 4)
        assert statuses(*old, *new) == ["evicted", "evicted", "open", "open"]


def test_who_gives_way_leaves_its_cells_to_its_snapshot_which_goes_next() -> None:  # R50
    with bench(capacity=32) as b:
        old, young = b.open(), b.open()
        with b.executor.holding_forward() as gate:
            first = b.start(old, [1], 27)
            gate.wait_held()
            second = b.start(young, PROMPT, 20)
            gate.step()
            gate.step()
            snapshot = young.snapshot_async(len(PROMPT))
        assert first.result(WAIT_S)
        assert first.tokens == b.expected([1], 27)
        assert second.wait(WAIT_S)
        assert second.reason is Reason.FAILED
        assert isinstance(second.error, PoolFullError)
        kept = snapshot.result(WAIT_S)
        assert kept is not None
        assert kept.status == "evicted"


def test_an_executor_that_knows_of_no_sharing_gives_up_what_was_used_longest_ago() -> None:  # R50
    with bench(capacity=32) as b:
        b.executor.count_cells = lambda ids: Executor.count_cells(b.executor, ids)  # type: ignore[method-assign]
        empty, first, second = parked(b, 1, 0, 16, 16)
        assert b.run(b.open(), LONG, 4) == b.expected(LONG, 4)
        assert statuses(empty, first, second) == ["open", "evicted", "evicted"]
