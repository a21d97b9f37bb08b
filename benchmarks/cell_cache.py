"""What the cell cache costs: microseconds of Python and numpy per call, with nothing native loaded.

    python benchmarks/cell_cache.py

A step is declare, place, the masks of both windows and commit. Medians; compare only figures of one run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from ggml_engine.pool.cells import CellCache
from ggml_engine.pool.step import Placement

CAPACITY = 32_768


def measure(label: str, action: Callable[[], object], n: int = 200) -> None:
    times = []
    for _ in range(n):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    print(f"{label:66} {statistics.median(times) * 1e6:9.1f} us")


class Batch:
    """Sequences of a cache that are extended together."""

    def __init__(self, cache: CellCache, sequences: list[int]) -> None:
        self.cache = cache
        self.sequences = np.array(sequences, np.int32)

    def place(self, n_each: int = 1) -> Placement:
        positions = [np.arange(n_each, dtype=np.int32) + self.cache.length(s) for s in self.sequences.tolist()]
        return self.cache.declare(np.repeat(self.sequences, n_each)).place(np.concatenate(positions))

    def step(self, n_each: int = 1) -> Placement:
        placement = self.place(n_each)
        for read in placement.reads:
            read.fill_mask(np.empty((placement.cells.size, read.n_rows), np.float16))
        placement.commit()
        return placement


def report(label: str, batch: Batch, n: int = 200) -> None:
    rows = batch.step().rows_read
    measure(f"{label}, rows {rows}", batch.step, n)


def main() -> None:
    cache = CellCache(CAPACITY, windows=(0, 512))
    trunk = cache.open()
    one = Batch(cache, [trunk])
    for _ in range(8):
        one.step(512)

    measure("clone and close of 4,096", lambda: cache.close(cache.clone(trunk, 4096)))
    measure("clone of 4,096 (500 kept open)", lambda: cache.clone(trunk, 4096), 500)
    alone = CellCache(CAPACITY, windows=(0, 512))
    beside_none = Batch(alone, [alone.open()])
    for _ in range(8):
        beside_none.step(512)
    for _ in range(10_000):
        cache.clone(trunk, 4096)
    # Taken in turns: on a shared machine only figures of the same minute can be compared.
    for _ in range(3):
        report("decode 1 x 4,096 alone", beside_none)
        report("decode 1 x 4,096, 10,500 sequences parked", one)
    measure("admission of 512", lambda: cache.can_extend(512, trunk))

    shared = CellCache(CAPACITY, windows=(0,))
    prefix = shared.open()
    for _ in range(4):
        Batch(shared, [prefix]).step(512)
    batch = Batch(shared, [shared.clone(prefix, 2048) for _ in range(16)])
    for _ in range(100):
        batch.step()
    report("decode 16 on 2,048 shared cells, own tails", batch)
    apart = Batch(shared, [shared.open() for _ in range(16)])
    for _ in range(500):
        apart.step()
    report("decode 16 x 500 grown side by side (64-cell runs)", apart)
    report("decode 1 of them", Batch(shared, apart.sequences.tolist()[:1]), 50)

    def prefill() -> None:
        sequence = cache.clone(trunk, 4096)
        Batch(cache, [sequence]).step(512)
        cache.close(sequence)

    measure("prefill 512 after 4,096 (with clone and close)", prefill, 50)
    measure("rewind by one and step", lambda: (cache.rewind(trunk, cache.length(trunk) - 1), one.step()))


if __name__ == "__main__":
    main()
