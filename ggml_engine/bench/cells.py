"""What cells cost that nobody reads, and what sharing them costs: decode beside parked cells, and a clone."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from ggml_engine.bench.driver import Driver, Room
from ggml_engine.bench.measure import Contestant, interleave
from ggml_engine.bench.ours import OurDriver
from ggml_engine.bench.report import Comparison, ModelReport, Row, Series
from ggml_engine.bench.setting import Setting

_SIDE_BY_SIDE = 8  # parked sequences that grow beside the active one
_RUN = 64
_CLONES = 20  # of one repetition


def parked(setting: Setting, report: ModelReport) -> None:
    """Decode one sequence alone, beside cells parked behind it, and beside sequences that grew together with it.

    Against llama.cpp, its unified buffer is measured with and without parked cells as well; in a split one each
    sequence has a buffer of its own, which nobody else reads.
    """
    sizes = setting.sizes
    steps, history = sizes.steps_of(1), sizes.parked_history
    row = report.row("parked", f"1 sequence at {history}, {sizes.parked} cells parked")
    longest = max(history + steps, sizes.parked // _SIDE_BY_SIDE)
    n_sequences = 1 + max(sizes.parked // history + 1, _SIDE_BY_SIDE)
    # one capacity for all: it bounds what a read is rounded up to, and other reads cannot be compared
    n_cells = history + steps + 2 * _SIDE_BY_SIDE * _RUN + max(sizes.parked, _SIDE_BY_SIDE * history)
    room = Room(n_sequences, max(history + steps, -(-n_cells // n_sequences)))
    if reason := setting.too_long(longest) or setting.too_large(3 * room.n_cells):
        row.skipped["ours"] = reason
        return
    made: list[Driver] = []
    try:
        ours: dict[str, Callable[[Driver], None]] = {
            "alone": lambda driver: _grow(setting, driver, 0, history),
            "parked behind": lambda driver: _park_behind(setting, driver, history, sizes.parked),
            "parked between": lambda driver: _park_between(setting, driver, history, sizes.parked),
        }
        for name, begin in ours.items():
            setting.progress(f"parked: preparing {name}")
            made.append(OurDriver(setting.model, setting.options(), room, name))
            begin(made[-1])
        if setting.against_llama_cpp:
            made += _of_llama_cpp(setting, row, room)
        series = {each.name: row.add(each.name, "s", steps) for each in made}
        for name in ("parked behind", "parked between"):
            row.comparisons.append(Comparison(f"speed {name} / alone", series["alone"], series[name]))
        for flash in ("flash", "no flash"):
            if beside := series.get(f"llama.cpp {flash}, unified, parked behind"):
                alone = series[f"llama.cpp {flash}, unified, alone"]
                row.comparisons.append(Comparison(f"llama.cpp {flash}, unified, parked behind / alone", alone, beside))
        _decode(setting, row, made, list(series.values()), history, steps)
    finally:
        for driver in made:
            driver.close()


def _of_llama_cpp(setting: Setting, row: Row, room: Room) -> list[Driver]:
    from ggml_engine.bench.llama_cpp import MODES, LlamaCppDriver, n_cells_of  # noqa: PLC0415

    made: list[Driver] = []
    for mode in (mode for mode in MODES if mode.unified):
        if reason := setting.too_large(2 * n_cells_of(mode, room)):
            row.skipped[f"llama.cpp {mode.name}"] = reason
            continue
        for name, n_parked in (("alone", 0), ("parked behind", setting.sizes.parked)):
            setting.progress(f"parked: preparing llama.cpp {mode.name}, {name}")
            driver = LlamaCppDriver(setting.llama_cpp, mode, room, f"llama.cpp {mode.name}, {name}")
            made.append(driver)
            _park_behind(setting, driver, setting.sizes.parked_history, n_parked)
    return made


def _grow(setting: Setting, driver: Driver, sequence: int, n: int) -> None:
    if n > 0:
        driver.prefill(sequence, setting.tokens(n, sequence))


def _park_behind(setting: Setting, driver: Driver, history: int, n_parked: int) -> None:
    """Copies of the active sequence, in cells of their own, and one more for the rest."""
    _grow(setting, driver, 0, history)
    n = n_parked // history
    if n:
        driver.copy(1 + n)
    _grow(setting, driver, 1 + n, n_parked - n * history)


def _park_between(setting: Setting, driver: Driver, history: int, n_parked: int) -> None:
    others = range(1, 1 + _SIDE_BY_SIDE)
    for start in range(0, history, _RUN):
        for sequence in (0, *others):
            _grow(setting, driver, sequence, min(_RUN, history - start))
    for sequence in others:
        _grow(setting, driver, sequence, n_parked // _SIDE_BY_SIDE - history)


def _decode(setting: Setting, row: Row, drivers: list[Driver], series: list[Series], history: int, steps: int) -> None:
    tokens = setting.tokens(steps, 1000).reshape(steps, 1)
    setting.progress(f"{row.case}, {row.label}")

    def run(driver: Driver) -> None:
        for each in tokens:
            driver.decode(each)

    contestants = [
        Contestant(driver.name, partial(driver.rewind, [history]), partial(run, driver)) for driver in drivers
    ]
    interleave(contestants, setting.repetitions, into=[each.values for each in series])


def clone(setting: Setting, report: ModelReport) -> None:
    """Clone a prefix: the time, and what it takes of cells and of K/V."""
    n = setting.sizes.clone_prefix
    row = report.row("clone", f"a prefix of {n}")
    if reason := setting.too_long(n):
        row.skipped["ours"] = reason
        return
    driver = OurDriver(setting.model, setting.options(), Room(1, n + 1))
    try:
        setting.progress("clone: reading the prefix")
        driver.prefill(0, setting.tokens(n))
        executor = driver.executor
        source = next(iter(executor.cache.open_sequences))
        before = executor.stats()
        times, cells, n_bytes = row.add("time", "s"), row.add("cells taken", "cells"), row.add("K/V added", "bytes")
        for _ in range(setting.repetitions * _CLONES):
            began = time.perf_counter()
            made = executor.clone(source, n)
            took = time.perf_counter() - began
            if made is None:
                row.skipped["ours"] = "the cache has no clones"
                return
            after = executor.stats()
            executor.close(made)
            times.values.append(took)
            cells.values.append(float(after["cells_used"] - before["cells_used"]))
            n_bytes.values.append(float(after["kv_bytes"] - before["kv_bytes"]))
    finally:
        driver.close()
