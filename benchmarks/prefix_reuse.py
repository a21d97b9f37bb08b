"""What a prefix cache saves, and how far its results are from a cold run: time to the first token, and numerics.

    python benchmarks/prefix_reuse.py [--model NAME_OR_PATH] [--prompt 2048] [--turns 9] [--decoded 32] [--threads N]

Times: in each turn the same prompt is answered cold, by a new session, and warm, by a look-up that reuses all but its
last token; who comes first changes from turn to turn, and a ratio is that of one turn. From the request to the first
token, the look-up included. Numerics, in ordinary mode, for K/V of f16 and q8_0: the tokens after the prompt are forced
upon a cold run and upon clones, so that both see the same history, and the largest differences over all these rows and
the whole vocabulary are given; probabilities are those at temperature 0.8. Run it alone: threads of ggml spin.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import time

import numpy as np
import numpy.typing as npt

from ggml_engine import Engine, GenConfig, PrefixCache, SamplerConfig
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.executor import ExecutorOptions, GgmlExecutor
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.known_models import find_model
from ggml_engine.models.model import Model, load_model

BAR = 1 / 30
N_STEP = 512
TEMPERATURE = 0.8
FIRST_TOKEN = GenConfig(max_tokens=1, sampler=SamplerConfig(temperature=0.0), ignore_eos=True)
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


# ---- times


def cold_s(engine: Engine, prompt: list[int]) -> float:
    start = time.perf_counter()
    with engine.session() as session:
        generation = session.generate(prompt, FIRST_TOKEN)
        took = time.perf_counter() - start
    if generation.stats.evaluated_tokens != len(prompt):
        raise SystemExit(f"a cold run evaluated {generation.stats.evaluated_tokens} of {len(prompt)} tokens")
    return took


def warm_s(engine: Engine, cache: PrefixCache, prompt: list[int]) -> float:
    start = time.perf_counter()
    found = cache.lookup(engine.runner(), prompt)
    if found.session is None:
        raise SystemExit(f"nothing was reused: {found.miss}")
    with found.session as session:
        generation = session.generate(prompt[found.n_reused :], FIRST_TOKEN)
        took = time.perf_counter() - start
    if generation.stats.evaluated_tokens != 1:
        raise SystemExit(f"a warm run evaluated {generation.stats.evaluated_tokens} tokens")
    return took


def report_times(engine: Engine, prompt: list[int], turns: int) -> None:
    cache = PrefixCache(1)
    with engine.session() as session:
        capture = cache.capture_prompt(session, prompt)
        session.generate_async(prompt, FIRST_TOKEN, capture.wrap()).wait()
        capture.collect()
    cold, warm = [], []
    warm_s(engine, cache, prompt)  # its graphs are built
    for turn in range(turns):
        if turn % 2:
            warm.append(warm_s(engine, cache, prompt))
        cold.append(cold_s(engine, prompt))
        if not turn % 2:
            warm.append(warm_s(engine, cache, prompt))
    ratios = sorted(w / c for w, c in zip(warm, cold, strict=True))
    ratio = statistics.median(ratios)
    print(
        f"first token of {len(prompt)} tokens: cold {statistics.median(cold) * 1e3:9.1f} ms, "
        f"warm {statistics.median(warm) * 1e3:7.2f} ms | warm / cold 1/{1 / ratio:.0f} "
        f"(1/{1 / ratios[0]:.0f} to 1/{1 / ratios[-1]:.0f} in {turns} turns), bar 1/{1 / BAR:.0f}: "
        f"{'kept' if ratio <= BAR else 'NOT KEPT'}"
    )


# ---- numerics


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
    parser = argparse.ArgumentParser(description="Prompts that a prefix cache has: time and numerics.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompt", type=int, default=2048)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--decoded", type=int, default=32)
    parser.add_argument("--threads", type=int)
    arguments = parser.parse_args()
    n_prompt = arguments.prompt
    with Engine.load(arguments.model, ctx=3 * n_prompt, threads=arguments.threads) as engine:
        tokens = tokens_of(engine, n_prompt + arguments.decoded)
        report_times(engine, tokens[:n_prompt], arguments.turns)
    with GGUFFile.open(find_model(arguments.model)) as file:
        model = load_model(file, threads=arguments.threads)
        for kv_type in ("f16", "q8_0"):
            report_differences(model, kv_type, tokens, n_prompt)
        model.free()


if __name__ == "__main__":
    main()
