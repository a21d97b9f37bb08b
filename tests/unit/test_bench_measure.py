"""Interleaved repetitions, on a clock of their own."""

from __future__ import annotations

import pytest

from ggml_engine.bench.measure import Contestant, Spread, interleave, ratios, spread, turns


class FakeClock:
    """Time that passes only where somebody works."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def worker(self, name: str, seconds: float, log: list[str], reset_s: float = 100.0) -> Contestant:
        """Works for so long, and needs long to begin from where it should."""

        def run() -> None:
            log.append(name)
            self.now += seconds

        def reset() -> None:
            self.now += reset_s

        return Contestant(name, reset, run)


def test_only_the_work_is_timed_and_the_warm_up_does_not_count() -> None:
    clock, log = FakeClock(), []
    into: list[list[float]] = [[], []]
    told = []
    interleave(
        [clock.worker("a", 2.0, log), clock.worker("b", 3.0, log)], 4, into=into, clock=clock,
        on_repetition=lambda: told.append(len(into[0])),
    )  # fmt: skip
    assert into == [[2.0] * 4, [3.0] * 4]
    assert log.count("a") == log.count("b") == 5
    assert told == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("n", [1, 2, 3, 5])
def test_everyone_takes_one_turn_in_a_repetition_and_everyone_begins_once(n: int) -> None:
    orders = [turns(n, repetition) for repetition in range(n)]
    assert all(sorted(order) == list(range(n)) for order in orders)
    assert sorted(order[0] for order in orders) == list(range(n))


def test_nobody_always_follows_the_same_one() -> None:
    followed = {tuple(turns(3, repetition)[i : i + 2]) for repetition in range(6) for i in (0, 1)}
    assert len(followed) == 6


def test_the_order_changes_from_repetition_to_repetition() -> None:
    clock, log = FakeClock(), []
    workers = [clock.worker(name, 1.0, log) for name in "abc"]
    interleave(workers, 3, into=[[], [], []], clock=clock, warm_up=0)
    assert [log[i : i + 3] for i in (0, 3, 6)] == [["a", "b", "c"], ["b", "a", "c"], ["c", "a", "b"]]


def test_an_interrupted_repetition_leaves_whole_ones() -> None:
    clock = FakeClock()
    done = []

    def run() -> None:
        done.append(1)
        if len(done) == 6:
            raise KeyboardInterrupt

    into: list[list[float]] = [[], []]
    workers = [Contestant(name, lambda: None, run) for name in "ab"]
    with pytest.raises(KeyboardInterrupt):
        interleave(workers, 5, into=into, clock=clock, warm_up=1)
    assert [len(values) for values in into] == [1, 1]


def test_a_spread_is_median_least_and_greatest() -> None:
    assert spread([3.0, 1.0, 2.0, 10.0]) == Spread(2.5, 1.0, 10.0)


def test_ratios_are_formed_repetition_by_repetition() -> None:
    assert ratios([2.0, 9.0, 8.0], [1.0, 3.0]) == [2.0, 3.0]
