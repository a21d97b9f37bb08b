"""How far the results of a reused prefix are from a cold run: logits and probabilities.

    python benchmarks/prefix_reuse.py [--model NAME_OR_PATH] [--prompt 2048] [--decoded 32] [--threads N]

In ordinary mode, for K/V of f16 and q8_0: the tokens after the prompt are forced upon a cold run and upon clones, so
that both see the same history, and the largest differences over all these rows and the whole vocabulary are given;
probabilities are those at temperature 0.8. What is gained in time, `ggml-engine bench --only warm` measures.
"""

from __future__ import annotations

import argparse
import itertools
import random

import numpy as np
import numpy.typing as npt

from ggml_engine import Engine
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.executor.options import ExecutorOptions
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.known_models import find_model
from ggml_engine.models.model import Model, load_model

N_STEP = 512
TEMPERATURE = 0.8
WHO = (
    "The miller",
    "A young clerk",
    "Her neighbour",
    "The old captain",
    "Nobody in the village",
    "My sister",
    "The guard",
)
DID = ("counted", "carried home", "had forgotten", "wrote down", "looked for", "sold", "repaired", "talked about")
WHAT = ("the broken lamps", "a letter from the coast", "three sacks of grain", "the key of the tower", "an unpaid bill")
WHEN = ("before the rain came", "on the second day", "while the others slept", "as every winter", "without a word")

Logits = npt.NDArray[np.float32]


def text(n_sentences: int) -> str:
    """Sentences that do not repeat each other, the same in every run."""
    rng = random.Random(0)
    lists = (WHO, DID, WHAT, WHEN)
    return " ".join(" ".join(map(rng.choice, lists)) + "." for _ in range(n_sentences))


def tokens_of(engine: Engine, n: int) -> list[int]:
    """`n` tokens of text."""
    tokens: list[int] = engine.vocabulary.encode(text(n // 8), add_special=True, parse_special=False).tolist()
    if len(tokens) < n:
        raise SystemExit(f"the text has {len(tokens)} tokens, {n} are needed")
    return tokens[:n]


def forced(executor: GgmlExecutor, sequence: int, tokens: list[int], n_prompt: int) -> Logits:
    """Forward what a sequence lacks of `tokens`, those after the prompt one by one; the rows from its end on."""
    at = executor.length(sequence)
    starts = [*range(at, n_prompt, N_STEP), *range(n_prompt, len(tokens) + 1)]
    rows = [
        executor.forward(Batch.of_sequence(sequence, tokens[start:stop]))[0]
        for start, stop in itertools.pairwise(starts)
    ]
    return np.stack(rows[n_prompt - len(tokens) - 1 :])


def probabilities(logits: Logits) -> Logits:
    scaled = np.exp((logits - logits.max(axis=-1, keepdims=True)) / TEMPERATURE)
    return scaled / scaled.sum(axis=-1, keepdims=True)


def report_differences(model: Model, kv_type: str, tokens: list[int], n_prompt: int) -> None:
    options = ExecutorOptions(capacity=3 * len(tokens) + 512, k_type=kv_type, v_type=kv_type)
    executor = GgmlExecutor(model, options)
    cold = executor.open()
    wanted = forced(executor, cold, tokens, n_prompt)
    for label, at in (("all but the last token", n_prompt - 1), ("the first 37 %", n_prompt * 37 // 100)):
        clone = executor.clone(cold, at)
        if clone is None:
            raise SystemExit("this executor has no clones")
        found = forced(executor, clone, tokens, n_prompt)
        executor.close(clone)
        moved = np.abs(probabilities(found) - probabilities(wanted))
        print(
            f"K/V {kv_type:5} reused {label:22} largest difference of {len(found)} rows: "
            f"logits {np.abs(found - wanted).max():7.4f}, probabilities {moved.max():7.4f} "
            f"(at most {moved.sum(axis=1).max() / 2:6.4f} of a row's mass), "
            f"likeliest token the same in {(found.argmax(axis=1) == wanted.argmax(axis=1)).sum()}"
        )
    executor.close_all()


def main() -> None:
    parser = argparse.ArgumentParser(description="How far results of a reused prefix are from a cold run.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--decoded", type=int, default=32)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    n_prompt = arguments.prompt
    with Engine.load(arguments.model, ctx=512, threads=arguments.threads) as engine:
        tokens = tokens_of(engine, n_prompt + arguments.decoded)
    with GGUFFile.open(find_model(arguments.model)) as file:
        model = load_model(file, threads=arguments.threads)
        for kv_type in ("f16", "q8_0"):
            report_differences(model, kv_type, tokens, n_prompt)
        model.free()


if __name__ == "__main__":
    main()
