"""Speed of reading a prompt of random tokens, by the largest step and the layout of the weights.

    python benchmarks/prefill_steps.py smollm2 gemma3-270m --steps 256,512,1024,2048 --layouts off,bf16,q8_0

Steps and layouts take turns after a warm-up; printed are median tokens/s with their spread, the seconds that loading
took and the memory of the layout. Run it alone on the machine: ggml's threads spin.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time

import numpy as np

from ggml_engine.executor.batch import Batch
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.executor.options import ExecutorOptions
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.known_models import find_model
from ggml_engine.models.model import load_model


def seconds(executor: GgmlExecutor, sequence: int, tokens: list[int], step: int) -> float:
    """Of the whole prompt; logits of its last token alone."""
    executor.rewind(sequence, 0)
    start = time.perf_counter()
    for first in range(0, len(tokens), step):
        piece = tokens[first : first + step]
        executor.forward(Batch.of_sequence(sequence, piece, logits="last" if first + step >= len(tokens) else "none"))
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--steps", default="256,512,1024,2048")
    parser.add_argument("--layouts", default="off")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    for name in options.models:
        found: dict[tuple[str, int], list[float]] = {}
        executors = {}
        for layout in options.layouts.split(","):
            start = time.perf_counter()
            model = load_model(GGUFFile.open(find_model(name)), threads=options.threads, prefill_weights=layout)
            load_s = time.perf_counter() - start
            executor = GgmlExecutor(
                model, ExecutorOptions(capacity=2 * options.prompt, max_batch_tokens=options.prompt)
            )
            executors[layout] = executor, executor.open(), load_s
        tokens = np.random.default_rng(0).integers(10, executor.n_vocab - 10, options.prompt).tolist()
        for turn in range(options.turns + 1):
            for step in map(int, options.steps.split(",")):
                for layout, (executor, sequence, _) in executors.items():
                    measured = seconds(executor, sequence, tokens, step)
                    if turn:
                        found.setdefault((layout, step), []).append(len(tokens) / measured)
        for (layout, step), speeds in found.items():
            executor, _, load_s = executors[layout]
            row = {"model": name, "prompt": len(tokens), "layout": layout, "step": step}
            speed = [round(each) for each in (statistics.median(speeds), min(speeds), max(speeds))]
            row |= {"tokens_per_s": speed[0], "spread": speed[1:], "load_s": round(load_s, 3)}
            mib = round(executor.stats()["prefill_weight_bytes"] / 2**20, 1)
            print(json.dumps(row | {"MiB": mib}), flush=True)


if __name__ == "__main__":
    main()
