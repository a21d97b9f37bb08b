"""What scripts that race `OurDriver`s share: their options, a timed step of decoding, and how ratios are shown."""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Sequence

from ggml_engine.bench.driver import TokenIds
from ggml_engine.bench.ours import OurDriver


def parser_of(description: str | None, turns: int) -> argparse.ArgumentParser:
    """A parser with the models, the turns (by default so many) and the threads."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--turns", type=int, default=turns)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser


def decode_seconds(driver: OurDriver, tokens: TokenIds, history: int, n_steps: int) -> float:
    """Of a step of as many sequences as tokens, each with a history; the mean of `n_steps`, after one more."""
    driver.rewind([history] * tokens.size)
    driver.decode(tokens)
    start = time.perf_counter()
    for _ in range(n_steps):
        driver.decode(tokens)
    return (time.perf_counter() - start) / n_steps


def shown(ratios: Sequence[float], digits: int) -> str:
    """Median and spread."""
    median, least, most = statistics.median(ratios), min(ratios), max(ratios)
    return f"{median:.{digits}f} ({least:.{digits}f}..{most:.{digits}f})"
