"""What parked sessions cost an active one: decoding beside them and without them, and the clone of a prefix.

    python benchmarks/parked_cells.py [--model NAME_OR_PATH] [--history 512] [--parked 8192] [--steps 32] [--turns 7]

Three executors over one model, alike but for what was done with them: nothing parked, parked cells in one piece behind
the session, and parked sessions that were grown side by side with it in runs. They decode in turns, since machines
drift; a ratio is that of the medians. Run it alone: threads of ggml spin.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np

from ggml_engine.executor.batch import Batch
from ggml_engine.executor.executor import ExecutorOptions, GgmlExecutor
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.known_models import find_model
from ggml_engine.models.model import Model, load_model

N_SIDE_BY_SIDE = 8


class Session:
    """One active sequence, and what is parked beside it."""

    def __init__(self, label: str, model: Model, capacity: int, history: int) -> None:
        self.label = label
        self.executor = GgmlExecutor(model, ExecutorOptions(capacity=capacity))
        self.rng = np.random.default_rng(0)
        self.sequence = self.executor.open()
        self.history = history
        self.times: list[float] = []

    def grow(self, sequence: int, n: int) -> None:
        tokens = self.rng.integers(5, self.executor.model.hp.n_vocab - 5, n)
        for start in range(0, n, 512):
            self.executor.forward(Batch.of_sequence(sequence, tokens[start : start + 512], logits="none"))

    def park_behind(self, n: int) -> None:
        self.grow(self.sequence, self.history)
        while n > 0:
            self.grow(self.executor.open(), min(n, 1024))
            n -= 1024

    def park_between(self, n: int) -> None:
        others = [self.executor.open() for _ in range(N_SIDE_BY_SIDE)]
        for start in range(0, self.history, 64):
            self.grow(self.sequence, min(64, self.history - start))
            for other in others:
                self.grow(other, 64)
        for other in others:
            self.grow(other, max(0, n // N_SIDE_BY_SIDE - self.executor.length(other)))

    def decode(self, n: int) -> None:
        """Takes the time of each step, and comes back to where it began."""
        for _ in range(n):
            token = self.rng.integers(5, self.executor.model.hp.n_vocab - 5, 1)
            start = time.perf_counter()
            self.executor.forward(Batch.of_sequence(self.sequence, token))
            self.times.append(time.perf_counter() - start)
        self.executor.rewind(self.sequence, self.history)

    def report(self, alone_s: float) -> None:
        median_s = statistics.median(self.times)
        stats = self.executor.stats()
        print(
            f"{self.label:36} {median_s * 1e3:9.3f} ms a token  {alone_s / median_s:6.3f} of the speed alone  "
            f"{stats['cells_used']:6} cells used of {self.executor.cache.pool.rows} stored  "
            f"{stats['moves']} moves of {stats['cells_moved']} cells"
        )


def measure_clone(model: Model, n: int, turns: int) -> None:
    session = Session("clone", model, n + 64, n)
    session.park_behind(0)
    executor = session.executor
    rows, used = executor.cache.pool.rows, executor.cache.used_cells
    times = []
    for _ in range(turns * 20):
        start = time.perf_counter()
        clone = executor.clone(session.sequence, n)
        times.append(time.perf_counter() - start)
        executor.close(clone)
    clone = executor.clone(session.sequence, n)
    print(
        f"clone of {n} cells {statistics.median(times) * 1e6:9.1f} us, {executor.cache.used_cells - used} cells taken, "
        f"{executor.cache.pool.rows - rows} rows added"
    )
    executor.close_all()


def main() -> None:
    parser = argparse.ArgumentParser(description="Decode beside parked cells and without them.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--history", type=int, default=512)
    parser.add_argument("--parked", type=int, default=8192)
    parser.add_argument("--prefix", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    with GGUFFile.open(find_model(arguments.model)) as file:
        model = load_model(file, threads=arguments.threads)
        n_side = N_SIDE_BY_SIDE * (max(arguments.history, arguments.parked // N_SIDE_BY_SIDE) + 128)
        # One capacity for all: it bounds what a read is rounded up to, so another one would compare other reads.
        capacity = arguments.history + arguments.steps + 64 + max(n_side, arguments.parked + 1024)
        alone = Session("nothing parked", model, capacity, arguments.history)
        alone.park_behind(0)
        behind = Session("parked behind", model, capacity, arguments.history)
        behind.park_behind(arguments.parked)
        between = Session("parked between, in runs", model, capacity, arguments.history)
        between.park_between(arguments.parked)
        sessions = [alone, behind, between]
        for session in sessions:  # graphs are built, caches are warm
            session.decode(arguments.steps)
            session.times.clear()
        for turn in range(arguments.turns):
            for session in sessions if turn % 2 else sessions[::-1]:
                session.decode(arguments.steps)
        for session in sessions:
            session.report(statistics.median(alone.times))
            session.executor.close_all()
        measure_clone(model, arguments.prefix, arguments.turns)
        model.free()


if __name__ == "__main__":
    main()
