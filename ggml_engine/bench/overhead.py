"""The share of a step that is not ggml's: Python around a forward, and with it sampling, text and delivery.

What ggml takes is the time inside `Graph.compute`, which is wrapped while the case runs and at no other time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Final

import numpy as np

from ggml_engine.bench.report import ModelReport, Series
from ggml_engine.bench.setting import Setting
from ggml_engine.control.config import GenConfig
from ggml_engine.control.generation import Generation, Update
from ggml_engine.engine import Engine
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.ggml.backends import Graph
from ggml_engine.ggml.sampler_config import SamplerConfig

Interval = tuple[float, float]  # when a compute began and ended, in seconds

SAMPLERS: Final = {
    "greedy": SamplerConfig(temperature=0.0),
    "temperature, top-k 40": SamplerConfig(temperature=0.8, top_k=40, seed=1),
}
_PROMPT = 16
_WARM_STEPS = 4


@contextmanager
def timed_computes(clock: Callable[[], float] = time.perf_counter) -> Iterator[list[Interval]]:
    """The intervals of all graphs that are computed meanwhile, on any thread."""
    intervals: list[Interval] = []
    compute = Graph.compute

    def timed(graph: Graph, *arguments: Any) -> Any:
        began = clock()
        try:
            return compute(graph, *arguments)
        finally:
            intervals.append((began, clock()))

    setattr(Graph, "compute", timed)  # noqa: B010  # an assignment that type checkers refuse
    try:
        yield intervals
    finally:
        setattr(Graph, "compute", compute)  # noqa: B010


def share_outside(intervals: list[Interval], begin: float, end: float) -> float | None:
    """The share of the time between computes of all time, over whole steps in [begin, end]; None for less than one.

    A step is from the begin of its compute to the begin of the next one.
    """
    whole = [interval for interval in intervals if begin <= interval[0] <= end]
    if len(whole) < 2:
        return None
    computed = sum(stop - start for start, stop in whole[:-1])
    return 1 - computed / (whole[-1][0] - whole[0][0])


def python(setting: Setting, report: ModelReport) -> None:
    """The share of a decode step outside of ggml: of the forward alone, and of whole steps of the engine's thread."""
    sizes = setting.sizes
    steps = max(4, sizes.steps)
    width = max(sizes.python_widths)
    prompts = [setting.tokens(_PROMPT, i).tolist() for i in range(width)]
    setting.release()
    with setting.load_engine(width * (_PROMPT + steps + 128) + 256) as engine:
        for n in sorted(set(sizes.python_widths)):
            row = report.row("python", f"{n} sequence{'s' if n > 1 else ''}")
            forward = row.add("of the forward", "share")
            whole = {name: row.add(f"of the step, {name}", "share") for name in SAMPLERS}
            for _ in range(setting.repetitions):
                setting.progress(f"{row.case}, {row.label}: {len(forward.values)} of {setting.repetitions} repetitions")
                with timed_computes() as intervals:
                    _note(forward, _forwards(engine.executor, prompts[:n], steps, intervals))
                for name, sampler in SAMPLERS.items():
                    with timed_computes() as intervals:
                        _note(whole[name], _generations(engine, prompts[:n], sampler, steps, intervals))


def _note(series: Series, share: float | None) -> None:
    if share is not None:
        series.values.append(share)


def _forwards(executor: Any, prompts: list[list[int]], steps: int, intervals: list[Interval]) -> float | None:
    """Steps by hand: nothing else uses the engine now."""
    assert isinstance(executor, GgmlExecutor)
    sequences = [executor.open() for _ in prompts]
    for sequence, prompt in zip(sequences, prompts, strict=True):
        executor.forward(Batch.of_sequence(sequence, prompt, logits="none"))
    tokens = np.array([prompt[0] for prompt in prompts], np.int32)
    names = np.array(sequences, np.int64)
    wanted = np.ones(names.size, np.bool_)
    for step in range(_WARM_STEPS + steps):
        if step == _WARM_STEPS:
            begin = time.perf_counter()
        executor.forward(Batch(tokens, names, wanted))
    end = time.perf_counter()
    for sequence in sequences:
        executor.close(sequence)
    return share_outside(intervals, begin, end)


def _generations(
    engine: Engine, prompts: list[list[int]], sampler: SamplerConfig, steps: int, intervals: list[Interval]
) -> float | None:
    """Sessions that generate together, from where all of them do to where the first one ends.

    The engine's thread waits until all were asked for, so that none has ended before another begins.
    """
    first: list[float] = [0.0] * len(prompts)
    last: list[float] = [0.0] * len(prompts)
    n_tokens = [0] * len(prompts)

    def listener(i: int) -> Callable[[Update], None]:
        def note(update: Update) -> None:  # on the engine's thread, one at a time
            now = time.perf_counter()
            n_tokens[i] += len(update.tokens)
            if n_tokens[i] <= _WARM_STEPS:
                first[i] = now
            last[i] = now

        return note

    config = GenConfig(max_tokens=steps + _WARM_STEPS, sampler=sampler, ignore_eos=True)
    with ExitStack() as opened:
        running: list[Generation] = []
        sessions = [opened.enter_context(engine.session()) for _ in prompts]
        are_asked = threading.Event()
        engine.runner().compute_async(lambda _executor: are_asked.wait())
        try:
            for i, (session, prompt) in enumerate(zip(sessions, prompts, strict=True)):
                running.append(session.generate_async(prompt, config, listener(i)))
        finally:
            are_asked.set()
        for generation in running:
            generation.result()
    return share_outside(intervals, max(first), min(last))
