"""Interleaved repetitions: who takes part is timed in turns, and only whole repetitions count.

Knows nothing of engines: a contestant is a pair of functions, a clock is one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Contestant:
    """What is timed is `run`; `reset` brings back the state that it begins from, untimed."""

    name: str
    reset: Callable[[], object]
    run: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some values, the least and the greatest."""

    median: float
    min: float
    max: float


def spread(values: Sequence[float]) -> Spread:
    """Median, least and greatest of at least one value."""
    return Spread(statistics.median(values), min(values), max(values))


def ratios(over: Sequence[float], under: Sequence[float]) -> list[float]:
    """Quotients repetition by repetition; repetitions that one of them lacks do not count."""
    return [a / b for a, b in zip(over, under, strict=False)]


def turns(n: int, repetition: int) -> list[int]:
    """The order of `n` contestants in a repetition: the first one rotates, and the direction changes each time."""
    step = 1 if repetition % 2 == 0 else -1
    return [(repetition + step * i) % n for i in range(n)]


def interleave(
    contestants: Sequence[Contestant],
    repetitions: int,
    *,
    into: Sequence[list[float]],
    clock: Clock = time.perf_counter,
    warm_up: int = 1,
    on_repetition: Callable[[], object] = lambda: None,
) -> None:
    """Time every contestant once per repetition, in rotated order, after `warm_up` rounds that do not count.

    Seconds are appended to the lists of `into`, one for each contestant, when a repetition is whole: whatever
    interrupts it, these stay equally long.
    """
    for repetition in range(-warm_up, repetitions):
        seconds = [0.0] * len(contestants)
        for which in turns(len(contestants), repetition):
            contestant = contestants[which]
            contestant.reset()
            began = clock()
            contestant.run()
            seconds[which] = clock() - began
        if repetition >= 0:
            for values, value in zip(into, seconds, strict=True):
                values.append(value)
        on_repetition()
