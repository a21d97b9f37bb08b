"""Steps of few tokens with the second layout of weights against the file's own, in turns: from how many on it pays.

    python benchmarks/prefill_threshold.py smollm2 gemma3-270m --layouts bf16,q8_0 --turns 6

Every step uses the layout, whatever `MIN_TOKENS` is. Sequences decode side by side behind a prefix that they share.
Printed are median milliseconds without it, and their ratio to those with it, median and spread: above 1 it pays. Run it
alone on the machine: ggml's threads spin.
"""

from __future__ import annotations

import statistics

import numpy as np
from driven import decode_seconds, parser_of, shown

from ggml_engine.bench.driver import Room
from ggml_engine.bench.ours import OurDriver
from ggml_engine.executor.options import ExecutorOptions
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.known_models import find_model
from ggml_engine.models import prefill_weights
from ggml_engine.models.model import load_model

_PREFIX = 256
_STEPS = 2


def main() -> None:
    parser = parser_of(__doc__, turns=6)
    parser.add_argument("--layouts", default="bf16,q8_0")
    parser.add_argument("--widths", default="2,3,4,6,8,12,16")
    options = parser.parse_args()
    prefill_weights.MIN_TOKENS = 1
    widths = list(map(int, options.widths.split(",")))
    room = Room(_PREFIX + max(widths) * 40, max(widths))
    for name in options.models:
        file, random, drivers = GGUFFile.open(find_model(name)), np.random.default_rng(0), {}
        for layout in ("off", *options.layouts.split(",")):
            model = load_model(file, threads=options.threads, prefill_weights=layout)
            drivers[layout] = OurDriver(model, ExecutorOptions(capacity=1), room)
        prefix, *_, tokens = random.integers(0, model.hp.n_vocab, (2, max(_PREFIX, *widths)), dtype=np.int32)
        for width in widths:
            for driver in drivers.values():
                driver.clear()
                driver.prefill(0, prefix[:_PREFIX])
                driver.share(width)
            turns = [
                {layout: decode_seconds(driver, tokens[:width], _PREFIX, _STEPS) for layout, driver in drivers.items()}
                for _ in range(options.turns + 1)
            ][1:]
            row = f"{name}, {width} tokens: {statistics.median(turn['off'] for turn in turns) * 1e3:.2f} ms"
            for layout in options.layouts.split(","):
                ratios = [turn["off"] / turn[layout] for turn in turns]
                row += f"  {layout} {shown(ratios, 2)}"
            print(row, flush=True)


if __name__ == "__main__":
    main()
