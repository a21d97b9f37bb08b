"""What it gains to choose the tokens of many sessions by several threads: milliseconds of a decode step, in turns.

For samplers that go over whole rows of logits (top-p without top-k), where `RunnerOptions.sampling_threads` counts.
"""

from __future__ import annotations

import argparse
import statistics
import time

from ggml_engine.control.config import GenConfig
from ggml_engine.control.options import RunnerOptions
from ggml_engine.control.runner import Runner
from ggml_engine.control.text import VocabularyText
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.executor.options import ExecutorOptions
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.sampler_config import SamplerConfig
from ggml_engine.ggml.vocab import Vocabulary
from ggml_engine.known_models import find_model
from ggml_engine.models.model import Model, load_model


def step_ms(model: Model, text: VocabularyText, n_sessions: int, n_steps: int, threads: int) -> float:
    """Milliseconds of a step of so many sessions, the first ones left out."""
    executor = GgmlExecutor(model, ExecutorOptions(capacity=n_sessions * 128))
    with Runner(executor, text, RunnerOptions(sampling_threads=threads)) as runner:
        sessions = [runner.open_session() for _ in range(n_sessions)]
        samplers = [SamplerConfig(temperature=0.8, top_k=0, top_p=0.9, seed=i) for i in range(n_sessions)]
        for n in (3, n_steps):
            begun = time.perf_counter()
            handles = [
                session.generate_async([5, 6, 7], GenConfig(sampler=sampler, ignore_eos=True), max_tokens=n)
                for session, sampler in zip(sessions, samplers, strict=True)
            ]
            for handle in handles:
                handle.wait()
            took = time.perf_counter() - begun
    executor.close_all()
    return took / n_steps * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description="One thread that chooses tokens against several.")
    parser.add_argument("--model", default="gemma3-270m")
    parser.add_argument("--sessions", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    with GGUFFile.open(find_model(arguments.model)) as file:
        text = VocabularyText(Vocabulary.load(file))
        model = load_model(file)
        found: dict[int, list[float]] = {1: [], arguments.threads: []}
        for turn in range(arguments.turns + 1):
            for threads, values in found.items():
                ms = step_ms(model, text, arguments.sessions, arguments.steps, threads)
                if turn:
                    values.append(ms)
        for threads, values in found.items():
            print(
                f"{threads} threads: {statistics.median(values):.1f} ms a step ({min(values):.1f}..{max(values):.1f})"
            )
        ratios = sorted(one / other for one, other in zip(*found.values(), strict=True))
        print(f"one thread / {arguments.threads}: {statistics.median(ratios):.2f} ({ratios[0]:.2f}..{ratios[-1]:.2f})")
        model.free()


if __name__ == "__main__":
    main()
