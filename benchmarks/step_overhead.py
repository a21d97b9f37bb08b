"""What a decode step costs beside the computation: shares of control plane, sampling, and Python in the executor.

    python benchmarks/step_overhead.py [--model NAME_OR_PATH] [--sessions 1 16] [--steps 64] [--turns 5] [--threads N]

Sessions decode side by side through a `Runner`, each with a handle that nobody reads meanwhile. The engine's thread is
timed at the borders of its parts; "compute" is ggml's own, all else is Python and sampling. Shares are medians over
turns of the sums over a turn's steps, with the least and the most. Run it alone: threads of ggml spin.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ggml_engine.control.config import GenConfig
from ggml_engine.control.runner import Runner
from ggml_engine.control.scheduler import Scheduler
from ggml_engine.control.text import VocabularyText
from ggml_engine.control.work import Work
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.executor.inputs import GraphInputs
from ggml_engine.executor.options import ExecutorOptions
from ggml_engine.executor.result_rows import ResultRows
from ggml_engine.ggml.backends import Graph
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.sampler_config import SamplerConfig
from ggml_engine.ggml.vocab import Vocabulary
from ggml_engine.known_models import find_model
from ggml_engine.models.model import Model, load_model

CONFIGS: dict[str, SamplerConfig] = {
    "greedy": SamplerConfig.greedy(),
    "top-k 40": SamplerConfig(temperature=0.8, top_k=40, seed=1),
    "whole row": SamplerConfig(temperature=0.8, top_k=0, seed=1),
}
# Each part with those inside it, whose time is their own.
PARTS: dict[str, tuple[type, str]] = {
    "scheduler": (Scheduler, "step"),
    "executor": (GgmlExecutor, "forward_outputs"),
    "fill inputs": (GraphInputs, "fill"),
    "compute": (Graph, "compute"),
    "find candidates": (ResultRows, "needed"),
    "draw": (Work, "draw"),
}


@dataclass
class Times:
    """Seconds by part, without those of the parts inside it."""

    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    n_steps: int = 0
    _inside: list[float] = field(default_factory=list)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            begun = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.perf_counter() - begun
                self.seconds[name] += took - self._inside.pop()
                if self._inside:
                    self._inside[-1] += took
                else:
                    self.n_steps += 1

        return call


@contextlib.contextmanager
def timing(times: Times) -> Iterator[None]:
    """The parts of every step are timed meanwhile."""
    before = {name: getattr(kind, attribute) for name, (kind, attribute) in PARTS.items()}
    for name, (kind, attribute) in PARTS.items():
        setattr(kind, attribute, times.timed(name, before[name]))
    try:
        yield
    finally:
        for name, (kind, attribute) in PARTS.items():
            setattr(kind, attribute, before[name])


def measure(model: Model, text: VocabularyText, config: SamplerConfig, n_sessions: int, n_steps: int) -> Times:
    """Parts of `n_steps` decode steps of so many sessions."""
    executor = GgmlExecutor(model, ExecutorOptions(capacity=n_sessions * (n_steps + 128)))
    rng = np.random.default_rng(0)
    times = Times()
    n_vocab = model.hp.n_vocab
    with Runner(executor, text) as runner:
        sessions = [runner.open_session() for _ in range(n_sessions)]
        wanted = GenConfig(sampler=config, ignore_eos=True)

        def decode(tokens: list[int], n: int) -> None:
            handles = [session.generate_async(tokens, wanted, max_tokens=n) for session in sessions]
            for handle in handles:
                handle.wait()

        decode(rng.integers(5, n_vocab - 5, 16).tolist(), 8)  # graphs are built
        with timing(times):
            decode([5], n_steps)
    executor.close_all()
    return times


def share_of(times: Times) -> dict[str, float]:
    """Shares of the whole by part, and "Python and sampling": all but the computation."""
    whole = sum(times.seconds.values())
    shares = {name: times.seconds[name] / whole for name in PARTS}
    return {**shares, "Python and sampling": 1 - shares["compute"]}


def report(label: str, found: Sequence[Times]) -> None:
    step_s = statistics.median(sum(times.seconds.values()) / times.n_steps for times in found)
    print(f"{label}: {step_s * 1e3:.2f} ms a step, median of {len(found)} turns")
    shares = [share_of(times) for times in found]
    for name in shares[0]:
        values = sorted(share[name] for share in shares)
        middle = statistics.median(values)
        print(f"  {name:20} {middle:8.2%} ({values[0]:.2%} to {values[-1]:.2%})  {middle * step_s * 1e6:9.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description="Shares of a decode step.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--sessions", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--configs", nargs="+", default=["greedy", "top-k 40"], choices=list(CONFIGS))
    parser.add_argument("--steps", type=int, default=64)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    with GGUFFile.open(find_model(arguments.model)) as file:
        text = VocabularyText(Vocabulary.load(file))
        model = load_model(file, threads=arguments.threads)
        found: dict[str, list[Times]] = defaultdict(list)
        for _ in range(arguments.turns):
            for n_sessions in arguments.sessions:
                for name in arguments.configs:
                    times = measure(model, text, CONFIGS[name], n_sessions, arguments.steps)
                    found[f"{name}, {n_sessions} sessions"].append(times)
        for label, turns in found.items():
            report(label, turns)
        model.free()


if __name__ == "__main__":
    main()
