"""Milliseconds of one step in every form of attention: which is worth taking for how many tokens, over how many rows.

    python benchmarks/attention_forms.py smollm2 gemma3-270m

Decode of one sequence at a history, of several sequences with histories of their own, and chunks of a prompt. What a
history holds is random, and not computed. The forms take turns, and the
ratio to the first one is formed turn by turn: medians, and the spread between the quartiles. K/V f16. Run it alone on
the machine: ggml's threads spin.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import NamedTuple

import numpy as np

from ggml_engine.executor.batch import Batch
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.executor.options import ExecutorOptions
from ggml_engine.ggml.backends import set_data
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.known_models import find_model
from ggml_engine.models.attention import AttentionForm
from ggml_engine.models.model import Model, load_model


class Case(NamedTuple):
    """Steps of `n_tokens` of each of `n_sequences`, at a history; a prompt is read in as many steps as it needs."""

    name: str
    n_sequences: int
    n_tokens: int
    history: int


CASES = [
    *(Case(f"decode at {history}", 1, 1, history) for history in (0, 512, 2048, 4096)),
    *(Case(f"decode {n} at 512 each", n, 1, 512) for n in (2, 4, 8, 16)),
    *(Case(f"prompt of {n}", 1, n, 0) for n in (8, 32, 128, 512, 2048)),
    Case("chunk of 512 at 2048", 1, 512, 2048),
]
CAPACITY = 16 * 576 + 64


class Runs:
    """One executor in a form, with the sequences of a case in it."""

    def __init__(self, model: Model, form: str) -> None:
        self.executor = GgmlExecutor(model, ExecutorOptions(capacity=CAPACITY, attention=form))  # type: ignore[arg-type]
        self._rng = np.random.default_rng(0)

    def begin(self, case: Case) -> None:
        self.sequences = [self.executor.open() for _ in range(case.n_sequences)]
        for sequence in self.sequences if case.history else ():
            step = self.executor.cache.declare(np.full(case.history, sequence, np.int32))
            placement = step.place(step.positions)
            if self.executor.cache.pool.must_grow(placement.extent):
                self.executor.graphs.clear()
                self.executor.cache.pool.grow(placement.extent)
                self._fill()
            placement.commit()

    def _fill(self) -> None:
        some = self._rng.standard_normal(1 << 16).astype(np.float16).view(np.uint8)
        for tensors in self.executor.cache.pool.tensors:
            for tensor in tensors:
                if tensor is not None:
                    set_data(self.executor.model.libraries, tensor, np.resize(some, tensor.span_bytes))

    def seconds(self, case: Case) -> float:
        """One time through the case, and back to where it began."""
        spent = 0.0
        for start in range(0, case.n_tokens, 512):
            n = min(512, case.n_tokens - start)
            sequences = np.repeat(np.array(self.sequences, np.int32), n)
            tokens = self._rng.integers(5, self.executor.n_vocab, sequences.size, dtype=np.int32)
            wants = np.zeros(sequences.size, np.bool_)
            wants[n - 1 :: n] = True
            began = time.perf_counter()
            self.executor.forward(Batch(tokens, sequences, wants))
            spent += time.perf_counter() - began
        for sequence in self.sequences:
            self.executor.rewind(sequence, case.history)
        return spent

    def end(self) -> None:
        for sequence in self.sequences:
            self.executor.close(sequence)


def measured(runs: dict[str, Runs], case: Case, seconds: float) -> None:
    for each in runs.values():
        each.begin(case)
    times: dict[str, list[float]] = {form: [] for form in runs}
    for each in runs.values():
        each.seconds(case)  # builds the graph
    began = time.perf_counter()
    while time.perf_counter() - began < seconds or len(times[next(iter(times))]) < 3:
        for form, each in runs.items():
            times[form].append(each.seconds(case))
    for each in runs.values():
        each.end()
    first = times[next(iter(times))]
    shown = []
    for spent in times.values():
        ratios = sorted(a / b for a, b in zip(first, spent, strict=True))
        low, high = ratios[len(ratios) // 4], ratios[-1 - len(ratios) // 4]
        shown.append(f"{1e3 * statistics.median(spent):8.2f} ({low:.2f}-{high:.2f})")
    print(f"| {case.name} | " + " | ".join(shown) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--forms", default="matmul,matmul_folded,flash,flash_folded")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row of the table")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    options = parser.parse_args()
    forms = [AttentionForm(form).value if form != "auto" else form for form in options.forms.split(",")]
    for name in options.models:
        model = load_model(GGUFFile.open(find_model(name)), threads=options.threads)
        runs = {form: Runs(model, form) for form in forms}
        print(f"\n{name}: ms a step (the first form's time over this one's, quartiles)")
        print("| step | " + " | ".join(forms) + " |\n| --- " * 1 + "|" + " --- |" * (len(forms) + 1))
        for case in CASES:
            if options.only in case.name:
                measured(runs, case, options.seconds)
        for each in runs.values():
            each.executor.close_all()
        model.free()


if __name__ == "__main__":
    main()
