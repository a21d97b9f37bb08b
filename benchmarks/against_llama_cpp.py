"""Speed and memory beside llama-cpp-python, on the same libraries and threads.

    python benchmarks/against_llama_cpp.py smollm2 gemma3-270m

Per model and attention mode: prefill of 512 random tokens, decode of 32 at 512. The two engines take turns, seven
times after a warm-up; the ratio is formed turn by turn (time of llama-cpp-python over ours: above 1 is ours ahead).
K/V f16, full-size windows. `--start` measures whole processes: start to first token, and their peak memory. Run it
alone on the machine: ggml's threads spin.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import numpy as np

from ggml_engine.executor.batch import Batch
from ggml_engine.executor.executor import ExecutorOptions, GgmlExecutor
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.known_models import find_model
from ggml_engine.models.model import load_model

N_PREFILL = 512
N_DECODE = 32
PROMPT = "The capital of France is"


class Ours:
    def __init__(self, model: str, attention: str, threads: int) -> None:
        self.model = load_model(GGUFFile.open(find_model(model)), threads=threads)
        self.executor = GgmlExecutor(self.model, ExecutorOptions(capacity=4096, attention=attention))
        self.sequence = self.executor.open()
        self.n_vocab = self.model.hp.n_vocab

    def reset(self) -> None:
        self.executor.rewind(self.sequence, 0)

    def eval(self, tokens: list[int]) -> None:
        self.executor.forward(Batch.of_sequence(self.sequence, tokens))


class Theirs:
    def __init__(self, model: str, attention: str, threads: int) -> None:
        from llama_cpp import Llama

        self.llama = Llama(
            str(find_model(model)), n_ctx=4096, n_batch=512, n_ubatch=512, n_threads=threads, n_threads_batch=threads,
            verbose=False, flash_attn=attention == "flash", swa_full=True,
        )  # fmt: skip

    def reset(self) -> None:
        self.llama.reset()

    def eval(self, tokens: list[int]) -> None:
        self.llama.eval(tokens)


def time_of(action: Callable[[], None]) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def turn(engine: Ours | Theirs, tokens: list[int]) -> tuple[float, float]:
    engine.reset()
    prefill = time_of(lambda: engine.eval(tokens[:N_PREFILL]))
    decode = time_of(lambda: [engine.eval([token]) for token in tokens[N_PREFILL:]] and None)
    return prefill, decode


def compare(model: str, attention: str, threads: int, turns: int) -> dict[str, object]:
    engines = (Ours(model, attention, threads), Theirs(model, attention, threads))
    rng = np.random.default_rng(0)
    tokens = rng.integers(10, engines[0].n_vocab - 10, N_PREFILL + N_DECODE).tolist()
    times: list[list[tuple[float, float]]] = [[], []]
    for n in range(turns + 1):
        for which in (0, 1) if n % 2 else (1, 0):
            measured = turn(engines[which], tokens)
            if n:
                times[which].append(measured)
    result: dict[str, object] = {"model": model, "attention": attention, "threads": threads, "turns": turns}
    for i, (name, count) in enumerate((("prefill", N_PREFILL), ("decode", N_DECODE))):
        ratios = [theirs[i] / ours[i] for ours, theirs in zip(times[0], times[1], strict=True)]
        result[name] = {
            "ours_tokens_per_s": round(count / statistics.median(t[i] for t in times[0]), 1),
            "theirs_tokens_per_s": round(count / statistics.median(t[i] for t in times[1]), 1),
            "ratio_median": round(statistics.median(ratios), 3),
            "ratio_min": round(min(ratios), 3),
            "ratio_max": round(max(ratios), 3),
        }
    return result


START = {
    "ours": (
        "import sys; from ggml_engine import Engine, GenConfig, SamplerConfig; "
        "e = Engine.load(sys.argv[1], ctx=512); "
        "next(iter(e.generate(sys.argv[2], GenConfig(max_tokens=1, sampler=SamplerConfig.greedy())))); "
    ),
    "theirs": (
        "import sys; from llama_cpp import Llama; "
        "m = Llama(sys.argv[1], n_ctx=512, verbose=False); "
        "next(iter(m(sys.argv[2], max_tokens=1, temperature=0.0, stream=True))); "
    ),
}
REPORT = "import resource, os; print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss); os._exit(0)"


def start(model: str, turns: int) -> dict[str, object]:
    path = str(find_model(model))
    seconds: dict[str, list[float]] = {name: [] for name in START}
    peaks: dict[str, list[int]] = {name: [] for name in START}
    for n in range(turns + 1):
        for name, code in START.items():
            began = time.perf_counter()
            run = subprocess.run(
                [sys.executable, "-c", code + REPORT, path, PROMPT], check=True, capture_output=True, text=True
            )
            if n:
                seconds[name].append(time.perf_counter() - began)
                peaks[name].append(int(run.stdout.split()[-1]))
    ratios = [theirs / ours for ours, theirs in zip(seconds["ours"], seconds["theirs"], strict=True)]
    return {
        "model": model,
        "start_to_first_token_s": {name: round(statistics.median(times), 3) for name, times in seconds.items()},
        "ratio_median": round(statistics.median(ratios), 3),
        "peak_MiB": {name: round(statistics.median(kib) / 1024, 1) for name, kib in peaks.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--start", action="store_true", help="whole processes instead of single steps")
    options = parser.parse_args()
    for model in options.models:
        if options.start:
            print(json.dumps(start(model, options.turns)))
            continue
        for attention in ("matmul", "flash"):
            print(json.dumps(compare(model, attention, options.threads, options.turns)), flush=True)
    print(f"peak of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024:.0f} MiB", file=sys.stderr)


if __name__ == "__main__":
    main()
