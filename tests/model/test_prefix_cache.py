"""The prefix cache over real models: what is forwarded is counted, and what comes out is what a cold run says."""

from __future__ import annotations

import numpy as np
from agent_conversation import request
from real_models import gemma3_270m, smollm2

from ggml_engine import Engine, GenConfig, Generation, Lookup, MissReason, PrefixCache, SamplerConfig, Session

WAIT_S = 300
CONFIG = GenConfig(max_tokens=5, sampler=SamplerConfig(temperature=0.0), ignore_eos=True, logprobs=3)


def generated(session: Session, tokens: list[int]) -> Generation:
    """A whole generation."""
    return session.generate(tokens, CONFIG, timeout=WAIT_S)


def captured(engine: Engine, cache: PrefixCache, tokens: list[int]) -> Generation:
    """A cold generation whose prompt and end are put into the cache."""
    with engine.session() as session:
        capture = cache.capture_prompt(session, tokens)
        generation = session.generate_async(tokens, CONFIG, capture.wrap(), on_settled=capture.at_end())
        assert generation.wait(WAIT_S)
        assert capture.collect(timeout=WAIT_S)
    return generation


def check_same(engine: Engine, found: Lookup, tokens: list[int], cold: Generation) -> None:
    """The continuation of what was found is that of a cold run, to the last bit of its probabilities."""
    assert found.session is not None
    with found.session as session:
        warm = generated(session, tokens[found.n_reused :])
    assert warm.stats.reused_tokens == found.n_reused
    assert warm.stats.evaluated_tokens == len(tokens) - found.n_reused
    assert warm.tokens == cold.tokens
    assert warm.logprobs == cold.logprobs


def test_a_repeated_prompt_of_smollm2_forwards_one_token() -> None:  # R39 R40
    with Engine.load(smollm2(), ctx=1024, deterministic=True, threads=1) as engine:
        cache = PrefixCache(8)
        text = (
            "The lighthouse keeper climbed the stairs every evening, lit the lamp and wrote down what he saw out at sea"
        )
        prompt = engine.vocabulary.encode(text, add_special=True, parse_special=False).tolist()
        prompt = [*prompt, *prompt][:23]
        assert len(prompt) == 23
        cold = captured(engine, cache, prompt)
        forwarded = engine.executor.stats()["tokens_forwarded"]
        found = cache.lookup(engine.runner(), prompt, WAIT_S)
        assert found.n_reused == 22
        assert found.miss is None
        check_same(engine, found, prompt, cold)
        assert engine.executor.stats()["tokens_forwarded"] == forwarded + 1 + CONFIG.max_tokens - 1  # type: ignore[operator]
        # the next turn: the last token of the reply, and what is new
        turn = [*prompt, *cold.tokens, *prompt[:4]]
        found = cache.lookup(engine.runner(), turn, WAIT_S)
        assert found.n_reused == 23 + 4
        with engine.session() as session:
            check_same(engine, found, turn, generated(session, turn))
        changed = [*prompt]
        changed[10] = prompt[11]
        found = cache.lookup(engine.runner(), changed, WAIT_S)
        assert found.n_reused == 10
        assert found.miss is not None
        assert found.miss.reason is MissReason.DIFFERS
        assert found.miss.prompt_text in engine.vocabulary.decode(changed)
        assert found.miss.snapshot_text in engine.vocabulary.decode(prompt)
        cell = engine.executor.bytes_per_cell
        assert cache.n_bytes(WAIT_S) == (23 + 4) * cell


def test_a_change_behind_the_window_of_gemma_3_reads_the_rest_again() -> None:  # R36 R39
    with Engine.load(gemma3_270m(), ctx=2048, deterministic=True, threads=1) as engine:
        cache = PrefixCache(2)
        prompt = np.random.default_rng(5).integers(1000, 200_000, 600).tolist()
        captured(engine, cache, prompt)
        changed = [*prompt]
        changed[300] = prompt[300] + 1
        found = cache.lookup(engine.runner(), changed, WAIT_S)
        assert found.n_reused == 300
        assert found.miss is not None
        assert found.miss.position == 300
        with engine.session() as session:
            cold = generated(session, changed)
        check_same(engine, found, changed, cold)


def test_the_second_of_two_equal_prompts_of_2048_tokens_forwards_one_token() -> None:  # R40
    with Engine.load(smollm2(), ctx=4096, threads=1) as engine:
        cache = PrefixCache(1)
        text = "\n".join(request(turn, 5) for turn in range(6))
        prompt = engine.vocabulary.encode(text, add_special=True, parse_special=False).tolist()[:2048]
        assert len(prompt) == 2048
        cold = captured(engine, cache, prompt)
        assert cold.stats.evaluated_tokens == 2048
        before = engine.runner().stats()
        found = cache.lookup(engine.runner(), prompt, WAIT_S)
        assert found.session is not None
        with found.session as session:
            warm = generated(session, prompt[found.n_reused :])
        assert (warm.stats.evaluated_tokens, warm.stats.reused_tokens) == (1, 2047)
        after = engine.runner().stats()
        assert after["prefill_tokens"] - before["prefill_tokens"] == 1  # R58
        assert after["steps"] - before["steps"] == CONFIG.max_tokens
