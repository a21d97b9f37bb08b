"""`Engine` on a real model: what an application that embeds it leans on."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
from real_models import gemma3_270m, smollm2

from ggml_engine import (
    CancelledError,
    ChatTemplateError,
    ClosedError,
    ContextLengthError,
    Engine,
    GenConfig,
    InputError,
    OptionError,
    SamplerConfig,
)

GREEDY = GenConfig(max_tokens=12, sampler=SamplerConfig(temperature=0.0))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(smollm2(), ctx=1024, deterministic=True) as engine:
        yield engine


def used_cells(engine: Engine) -> int:
    gc.collect()
    engine.session().close()  # comes after the closing of those that were dropped
    return int(engine.executor.stats()["cells_used"])


def test_the_pieces_of_a_generation_are_its_text_and_stay_readable(engine: Engine) -> None:
    generation = engine.generate("The capital of France is", GREEDY)
    assert generation.reason is None
    assert "".join(generation) == generation.text
    assert generation.reason is not None
    assert generation.stats.generated_tokens == len(generation.tokens) <= 12


def test_a_dropped_generation_gives_its_cells_back(engine: Engine) -> None:
    before = used_cells(engine)
    generation = engine.generate("One two three four five", GREEDY)
    next(generation)
    assert used_cells(engine) > before
    del generation
    assert used_cells(engine) == before


def test_cancel_from_another_thread_ends_at_the_next_step(engine: Engine) -> None:
    generation = engine.generate("Count to a hundred: 1, 2, 3,", GenConfig(max_tokens=200, sampler=GREEDY.sampler))
    next(generation)
    threading.Thread(target=generation.cancel).start()
    n_after = sum(1 for _ in generation)
    assert generation.reason is not None
    assert generation.reason.value == "cancelled"
    assert n_after < 150


def test_generations_on_several_threads_take_turns_and_equal_those_alone(engine: Engine) -> None:
    prompts = [f"The number after {n} is" for n in range(4)]
    alone = [engine.generate(prompt, GREEDY).result() for prompt in prompts]
    together: list[str] = [""] * len(prompts)

    def run(n: int) -> None:
        together[n] = engine.generate(prompts[n], GREEDY).result()

    threads = [threading.Thread(target=run, args=(n,)) for n in range(len(prompts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert together == alone


def test_a_turn_of_a_conversation_forwards_only_what_is_new(engine: Engine) -> None:
    talk = engine.conversation(system="Answer in one word.")
    first = talk.send("What colour is the sky?", GREEDY)
    assert first.result()
    second = talk.send("And grass?", GREEDY)
    assert second.result()
    assert second.stats.reused_tokens > first.stats.prompt_tokens - 2
    assert second.stats.evaluated_tokens == second.stats.prompt_tokens - second.stats.reused_tokens
    roles = [message["role"] for message in talk.messages]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    # the same tokens from nothing give the same reply
    fresh = engine.chat(talk.messages[:-1], GREEDY)
    assert fresh.result() == second.text


def test_an_unfinished_reply_counts_as_said_so_far(engine: Engine) -> None:
    talk = engine.conversation()
    reply = talk.send("Tell me a long story.", GREEDY)
    next(reply)
    said = reply.text
    assert talk.messages[-1] == {"role": "assistant", "content": said}
    following = talk.send("Stop.", GREEDY)
    assert reply.reason is not None
    assert reply.reason.value == "cancelled"
    assert following.result()


def test_a_stop_string_is_found_across_tokens_and_not_shown(engine: Engine) -> None:
    whole = engine.generate("The capital of France is", GREEDY).result()
    stop = whole[5:9]
    config = GenConfig(max_tokens=12, sampler=GREEDY.sampler, stop=(stop,))
    cut = engine.generate("The capital of France is", config)
    assert cut.result() == whole[: whole.index(stop)]
    assert cut.reason is not None
    assert cut.reason.value == "stop"


def test_a_prompt_that_is_too_long_is_refused_with_both_counts(engine: Engine) -> None:
    before = used_cells(engine)
    with pytest.raises(ContextLengthError) as caught:
        engine.generate([5] * 1025, GREEDY)
    assert (caught.value.requested, caught.value.limit) == (1025, 1024)
    assert used_cells(engine) == before


def test_a_full_context_ends_with_length(engine: Engine) -> None:
    generation = engine.generate([5] * 1020, GenConfig(sampler=GREEDY.sampler, ignore_eos=True))
    generation.result()
    assert generation.reason is not None
    assert generation.reason.value == "length"
    assert generation.stats.generated_tokens == 5  # four more cells, and one token that is not in a cell


@pytest.mark.parametrize("tokens", [[], [-1], [2**63], [True], [1.5], [49152]])
def test_bad_token_ids_are_refused(engine: Engine, tokens: list[int]) -> None:
    with pytest.raises(InputError):
        engine.generate(tokens, GREEDY)


def test_loading_reports_progress_and_can_be_cancelled() -> None:
    seen: list[tuple[int, int]] = []
    Engine.load(smollm2(), ctx=64, progress=lambda done, total: seen.append((done, total))).close()
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1][0] == seen[-1][1] > 0
    with pytest.raises(CancelledError):
        Engine.load(smollm2(), ctx=64, cancel=lambda: True)


def test_a_closed_engine_says_so() -> None:
    engine = Engine.load(smollm2(), ctx=64)
    generation = engine.generate("Hello", GREEDY)
    next(generation)
    engine.close()
    engine.close()
    with pytest.raises(ClosedError):
        generation.result()
    with pytest.raises(ClosedError):
        engine.generate("Hello", GREEDY)


def test_a_base_model_without_a_template_says_what_to_do_instead() -> None:
    with Engine.load(gemma3_270m(), ctx=64) as engine:
        with pytest.raises(ChatTemplateError, match="no chat template"):
            engine.chat("Hello")
        assert engine.generate("The capital of France is", GREEDY).result()


@pytest.mark.parametrize("ctx", [0, -1, True, 1.5, 2**50])
def test_an_impossible_context_is_refused(ctx: int) -> None:
    with pytest.raises(OptionError):
        Engine.load(smollm2(), ctx=ctx)
