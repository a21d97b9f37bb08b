"""The prefix cache over Gemma 3, whose windowed layers see 512 tokens back: reuse works wherever a prompt changes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from agent_conversation import request
from real_models import gemma3_270m

from ggml_engine import Engine, GenConfig, Generation, PrefixCache, SamplerConfig, Session

WAIT_S = 600
WINDOW = 512
CONFIG = GenConfig(max_tokens=4, sampler=SamplerConfig(temperature=0.0), ignore_eos=True, logprobs=16)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(gemma3_270m(), ctx=8192, deterministic=True, threads=1) as engine:
        assert WINDOW in engine.executor.model.hp.window
        yield engine


@pytest.fixture(scope="module")
def prompt(engine: Engine) -> list[int]:
    """1,500 tokens of text about source code."""
    text = "\n".join(request(turn, 5) for turn in range(4))
    tokens: list[int] = engine.vocabulary.encode(text, add_special=True, parse_special=False).tolist()
    assert len(tokens) > 1500
    return tokens[:1500]


def generated(session: Session, tokens: list[int]) -> Generation:
    return session.generate(tokens, CONFIG, timeout=WAIT_S)


def cold(engine: Engine, tokens: list[int]) -> Generation:
    """A run that computes everything."""
    with engine.session() as session:
        generation = generated(session, tokens)
    assert generation.stats.evaluated_tokens == len(tokens)
    return generation


def assert_same(found: Generation, wanted: Generation) -> None:
    """Equal to the last bit of the probabilities."""
    assert found.tokens == wanted.tokens
    assert found.logprobs == wanted.logprobs


@pytest.mark.slow
def test_what_changes_far_behind_the_window_and_what_is_rewound_past_it(engine: Engine, prompt: list[int]) -> None:
    # R36 R39 R40 R65 R103
    cache = PrefixCache(2)
    with engine.session() as session:
        capture = cache.capture_prompt(session, prompt)
        first = session.generate_async(prompt, CONFIG, capture.wrap())
        assert first.wait(WAIT_S)
        assert capture.collect(timeout=WAIT_S)
    changed = [*prompt]
    changed[700] = prompt[701]
    assert changed[700] != prompt[700]
    found = cache.lookup(engine.runner(), changed, WAIT_S)
    assert found.n_reused == 700
    assert found.session is not None
    with found.session as session:
        warm = generated(session, changed[700:])
        assert warm.stats.evaluated_tokens == 1500 - 700
        unlike = cold(engine, changed)
        assert_same(warm, unlike)
        assert unlike.logprobs != first.logprobs, "the change is not seen: equality shows nothing"
        # back to where the window has not been for long
        assert session.rewind_async(900).result(WAIT_S) == 900
        again = generated(session, prompt[:20])
    assert again.stats.evaluated_tokens == 20
    assert_same(again, cold(engine, [*changed[:900], *prompt[:20]]))


def test_twenty_turns_past_the_window_evaluate_what_is_new(engine: Engine, prompt: list[int]) -> None:  # R36 R40
    cache = PrefixCache(4)
    history: list[int] = []
    for turn in range(20):
        asked = prompt[60 * turn : 60 * turn + 25 + turn]
        history += asked
        found = cache.lookup(engine.runner(), history, WAIT_S)
        session = found.session or engine.session()
        capture = cache.capture_prompt(session, history)
        generation = session.generate_async(history[found.n_reused :], CONFIG, on_settled=capture.at_end())
        assert generation.wait(WAIT_S)
        # the last token of a reply was sampled, and never forwarded
        assert generation.stats.evaluated_tokens == len(asked) + (turn > 0)
        assert capture.collect(timeout=WAIT_S)
        session.close()
        last = [*history]
        history += generation.tokens
    assert len(last) > WINDOW + 200
    assert_same(generation, cold(engine, last))
