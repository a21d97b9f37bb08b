"""Steps in the forms of attention that were measured on this machine against those that are usual, in turns.

    python benchmarks/calibrated_attention.py smollm2 gemma3-270m
    python benchmarks/calibrated_attention.py smollm2 gemma3-270m --without-kernel

Measures attention anew first, and says how long that took and which forms follow from it; then prints for every step
the median milliseconds of the usual forms and their ratio to the measured ones, median and spread: above 1 the measured
ones are faster. Run it alone on the machine: ggml's threads spin. Nothing is kept in the user's cache directory.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable

import numpy as np
from driven import decode_seconds, parser_of, shown

from ggml_engine.bench.driver import Room, TokenIds
from ggml_engine.bench.ours import OurDriver
from ggml_engine.executor import planned_rows
from ggml_engine.executor.executor import ExecutorOptions
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.known_models import find_model
from ggml_engine.models.model import Model, load_model

_SEQUENCES = 16
_ROOM = Room(_SEQUENCES * 300 + 4096, _SEQUENCES)
_STEPS = 8


def prefill(driver: OurDriver, tokens: TokenIds) -> float:
    """Seconds of a prompt."""
    driver.clear()
    start = time.perf_counter()
    driver.prefill(0, tokens)
    return time.perf_counter() - start


def race(usual: OurDriver, measured: OurDriver, turns: int, seconds: Callable[[OurDriver], float]) -> str:
    """Both in turns, after one that does not count."""
    pairs = [(seconds(usual), seconds(measured)) for _ in range(turns + 1)][1:]
    ratios = [first / second for first, second in pairs]
    ms = statistics.median(first for first, _ in pairs) * 1e3
    return f"{ms:9.2f} ms  {shown(ratios, 3)}"


def compare(name: str, model: Model, turns: int) -> None:
    """Print all rows of a model."""
    first = OurDriver(model, ExecutorOptions(capacity=1), _ROOM)
    start = time.perf_counter()
    first.executor.attention.measure_all()
    print(f"{name}: measured in {time.perf_counter() - start:.2f} s")
    second = OurDriver(model, ExecutorOptions(capacity=1, calibrate=True), _ROOM)
    for what, driver in (("usual", first), ("measured", second)):
        plan = driver.executor.attention
        print(f"  {what}: V in {plan.kv_format.v_layout}, {', '.join(sorted(form.value for form in plan.forms))}")
    random = np.random.default_rng(0)
    for width, history in ((1, 0), (1, 512), (1, 2048), (2, 256), (8, 256), (16, 256)):
        tokens = random.integers(0, model.hp.n_vocab, history, dtype=np.int32)
        for driver in (first, second):
            driver.clear()
            driver.prefill(0, tokens)
            driver.copy(width)
        row = race(
            first,
            second,
            turns,
            lambda driver, n=width, m=history: decode_seconds(driver, tokens_of(random, model, n), m, _STEPS),
        )
        print(f"  decode {width} at {history}".ljust(24) + row, flush=True)
    for n in (128, 512):
        tokens = tokens_of(random, model, n)
        print(f"  prompt of {n}".ljust(24) + race(first, second, turns, lambda driver, t=tokens: prefill(driver, t)))
    first.close()
    second.close()


def tokens_of(random: np.random.Generator, model: Model, n: int) -> TokenIds:
    """Random ids."""
    return random.integers(0, model.hp.n_vocab, n, dtype=np.int32)


def main() -> None:
    parser = parser_of(__doc__, turns=5)
    parser.add_argument("--without-kernel", action="store_true", help="as where nothing was compiled")
    options = parser.parse_args()
    if options.without_kernel:
        planned_rows.find_kernel = lambda: None
    with tempfile.TemporaryDirectory() as directory:
        os.environ["XDG_CACHE_HOME"] = directory
        for name in options.models:
            compare(name, load_model(GGUFFile.open(find_model(name)), threads=options.threads), options.turns)


if __name__ == "__main__":
    main()
