"""What an executor can do while nobody waits: not before the first answer, in slices, and behind everything else."""

from __future__ import annotations

import threading
from collections.abc import Callable

from control_bench import bench
from fake_executor import WAIT_S


class Slices:
    """Idle work that takes so many slices; counts them."""

    def __init__(self, n: int, fails: bool = False) -> None:
        self.n_left = n
        self.n_done = 0
        self._fails = fails
        self._changed = threading.Condition()

    def __call__(self) -> bool:
        with self._changed:
            self.n_done += 1
            self.n_left -= 1
            self._changed.notify_all()
        if self._fails:
            raise RuntimeError("nothing can be measured here")
        return self.n_left > 0

    def wait(self, reached: Callable[[], bool]) -> None:
        with self._changed:
            assert self._changed.wait_for(reached, WAIT_S)


def test_idle_work_begins_after_the_first_answer_and_ends_when_there_is_no_more() -> None:
    with bench() as b:
        b.executor.do_idle_work = slices = Slices(3)  # type: ignore[method-assign]
        session = b.open()
        assert b.open() is not None
        assert slices.n_done == 0
        assert b.run(session, [5]) == b.expected([5])
        slices.wait(lambda: slices.n_left == 0)
        b.open()
        assert slices.n_done == 3


def test_what_arrives_is_served_between_two_slices() -> None:
    with bench() as b:
        b.executor.do_idle_work = slices = Slices(10**9)  # type: ignore[method-assign]
        b.run(b.open(), [5])
        slices.wait(lambda: slices.n_done > 2)
        with b.executor.holding_forward() as gate:
            session = b.open()
            answer = session.generate_async([7])
            gate.wait_held()
            n_before = slices.n_done
            assert slices.n_done == n_before, "no slice runs while there are forwards to do"
        answer.result(WAIT_S)


def test_idle_work_that_fails_is_not_tried_again_and_harms_nobody() -> None:
    with bench() as b:
        b.executor.do_idle_work = slices = Slices(9, fails=True)  # type: ignore[method-assign]
        b.run(b.open(), [5])
        slices.wait(lambda: slices.n_done == 1)
        session = b.open()
        assert b.run(session, [6]) == b.expected([6])
        assert slices.n_done == 1
