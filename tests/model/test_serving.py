"""A serving runtime over a real model: what is evaluated is counted, and texts are those of a cold run."""

from __future__ import annotations

from real_models import smollm2

from ggml_engine import Engine, GenConfig, SamplerConfig, ServingOptions, ServingRequest, ServingRuntime

WAIT_S = 300
CONFIG = GenConfig(max_tokens=8, sampler=SamplerConfig(temperature=0.0), ignore_eos=True)
TEXT = "The lighthouse keeper climbed the stairs every evening, lit the lamp and wrote down what he saw out at sea"


def test_sessions_choices_and_the_shared_cache_evaluate_only_what_is_new() -> None:
    options = ServingOptions(prefix_cache_entries=8, max_requests=4)
    with Engine.load(smollm2(), ctx=1024, deterministic=True, threads=1) as engine:
        tokens = [int(token) for token in engine.vocabulary.encode(TEXT, add_special=True, parse_special=False)]
        with engine.session() as session:
            cold = session.generate(tokens, CONFIG, timeout=WAIT_S).tokens
        runner = engine.runner()
        assert runner.options.max_sessions >= options.resident_sessions
        with ServingRuntime(runner, options) as runtime:
            first = runtime.submit(ServingRequest(tokens, CONFIG, session="a"))
            assert first.result(WAIT_S)[0].tokens == cold
            assert first.stats.evaluated_tokens == len(tokens)
            again = runtime.submit(ServingRequest(tokens, CONFIG, n=3))
            assert [choice.tokens for choice in again.result(WAIT_S)] == [cold] * 3
            assert (again.stats.cached_tokens, again.stats.evaluated_tokens) == (len(tokens) - 1, 3)
            history = [*tokens, *cold, *tokens[:3]]
            on = runtime.submit(ServingRequest(history, CONFIG, session="a"))
            assert on.result(WAIT_S)
            assert on.stats.evaluated_tokens == 1 + 3
