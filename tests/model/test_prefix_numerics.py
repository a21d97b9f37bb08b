"""How far reuse is from a cold run, in numbers: nothing where the geometry is the same, and little elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from agent_conversation import request
from engines import Logits, executor_over, loaded
from real_models import gemma3_270m, smollm2

from ggml_engine import Engine, GenConfig, PrefixCache, SamplerConfig
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.ggml.vocab import Vocabulary
from ggml_engine.models.model import Model

WAIT_S = 600
MODELS = {"S": smollm2, "G": gemma3_270m}
Q8_0 = {"k_type": "q8_0", "v_type": "q8_0"}
KV_TYPES: dict[str, dict[str, Any]] = {
    "f16": {"attention": "matmul"},
    "q8_0": {"attention": "flash", **Q8_0},
    "f16 cells": {"attention": "cells"},
    "q8_0 cells": {"attention": "cells", **Q8_0},
}
CUT, END, N_DECODED = 200, 300, 6
# Of probabilities in ordinary mode: 0.02 was seen here, up to 0.3 where G is unsure of its next token. Products round
# activations to 8 bits, and so a last digit grows.
BOUND = 0.4


@pytest.fixture(scope="module", params=MODELS)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with Engine.load(MODELS[request.param](), ctx=2048, deterministic=True, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    with loaded(MODELS[request.param](), threads=1) as model:
        yield model


def text_tokens(vocabulary: Vocabulary, n: int) -> list[int]:
    """Tokens of text about source code."""
    tokens: list[int] = vocabulary.encode(request(0, 5), add_special=True, parse_special=False).tolist()
    assert len(tokens) >= n
    return tokens[:n]


@pytest.mark.parametrize("seed", [7, 8])
def test_what_is_sampled_from_a_warm_cache_is_what_a_cold_run_samples(engine: Engine, seed: int) -> None:  # R39
    prompt = text_tokens(engine.vocabulary, 200)
    config = GenConfig(max_tokens=16, sampler=SamplerConfig(temperature=0.8, seed=seed), ignore_eos=True, logprobs=16)
    cache = PrefixCache(1)
    with engine.session() as session:
        capture = cache.capture_prompt(session, prompt)
        cold = session.generate_async(prompt, config, capture.wrap())
        assert cold.wait(WAIT_S)
        assert capture.collect(timeout=WAIT_S)
    found = cache.lookup(engine.runner(), prompt, WAIT_S)
    assert found.n_reused == len(prompt) - 1
    assert found.session is not None
    with found.session as session:
        warm = session.generate(prompt[-1:], config, timeout=WAIT_S)
    assert warm.stats.evaluated_tokens == 1
    assert warm.tokens == cold.tokens
    assert warm.logprobs == cold.logprobs
    likeliest = [each.top[0][0] for each in cold.logprobs]
    assert cold.tokens != likeliest, "chance chose nothing: equal tokens show nothing"


# ---- the same geometry: the same cuts, rows in a step, and shape of the cells


@pytest.fixture(scope="module")
def tokens(model: Model) -> list[int]:
    """Of text: on random tokens G is so unsure that nothing could be told from its probabilities."""
    return text_tokens(Vocabulary.load(model.file), END + N_DECODED)


def continued(executor: GgmlExecutor, sequence: int, tokens: list[int], at: int) -> Logits:
    """Forward `tokens` from position `at` on, cut at CUT and END, then one by one; the logits after END and later."""
    cuts = [at, *[cut for cut in (CUT, END) if cut > at], *range(END + 1, len(tokens) + 1)]
    rows = [
        executor.forward(Batch.of_sequence(sequence, tokens[start:stop]))[0] for start, stop in itertools.pairwise(cuts)
    ]
    return np.stack(rows[-N_DECODED - 1 :])


@pytest.mark.parametrize("options", KV_TYPES.values(), ids=KV_TYPES)
def test_clone_replay_and_cold_run_of_one_geometry_give_the_same_bytes(  # R39
    model: Model, tokens: list[int], options: dict[str, Any]
) -> None:
    with executor_over(model, capacity=2048, **options) as executor:
        sequence = executor.open()
        cold = continued(executor, sequence, tokens, 0)
        assert np.isfinite(cold).all()
        executor.rewind(sequence, CUT)
        replay = continued(executor, sequence, tokens, CUT)
        assert replay.tobytes() == cold.tobytes(), f"differ by {np.abs(replay - cold).max()}"
        executor.rewind(sequence, CUT)
        clone = executor.clone(sequence, CUT)
        assert clone is not None
        executor.close(sequence)
        found = continued(executor, clone, tokens, CUT)
        assert found.tobytes() == cold.tobytes(), f"differ by {np.abs(found - cold).max()}"
        executor.rewind(clone, CUT - 1)
        assert tokens[0] != tokens[CUT - 1]
        other = continued(executor, clone, [*tokens[: CUT - 1], tokens[0], *tokens[CUT:]], CUT - 1)
        assert other.tobytes() != cold.tobytes(), "what came before plays no part: equal bytes show nothing"


@pytest.mark.parametrize("options", KV_TYPES.values(), ids=KV_TYPES)
def test_another_geometry_moves_probabilities_little(  # R39 R99
    model: Model, tokens: list[int], options: dict[str, Any]
) -> None:
    with executor_over(model, capacity=2048, **options) as executor:
        sequence = executor.open()
        cold = probabilities(continued(executor, sequence, tokens, 0))
        between = executor.open()
        executor.forward(Batch.of_sequence(between, tokens[:200]))  # what comes now lies behind it
        differences = []
        for at in (END - 1, CUT):  # a row alone that was one of many; cells that lie elsewhere
            clone = executor.clone(sequence, at)
            assert clone is not None
            differences.append(np.abs(probabilities(continued(executor, clone, tokens, at)) - cold).max())
            executor.close(clone)
    print(f"largest differences of probabilities: {differences}")  # noqa: T201 - shown with -s or -rP
    apart = np.abs(cold[1:] - cold[:-1]).max(axis=1)
    assert max(differences) < BOUND, f"probabilities differ by {differences}"
    assert apart.max() > 1.5 * BOUND, f"those of the next position differ by {apart}: the bound shows nothing"


def probabilities(logits: Logits) -> Logits:
    """At temperature 0.8."""
    scaled = np.exp((logits - logits.max(axis=-1, keepdims=True)) / 0.8)
    return scaled / scaled.sum(axis=-1, keepdims=True)
