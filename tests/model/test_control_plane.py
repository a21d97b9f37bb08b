"""The control plane over a real model: many threads, a fan-out, a long prompt beside a stream."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from real_models import smollm2

from ggml_engine import Engine, GenConfig, Reason, SamplerConfig, Session
from ggml_engine.executor.batch import Batch

WAIT_S = 300
GREEDY = SamplerConfig(temperature=0.0)
PROMPTS = [f"{thing} number {n} is" for thing in ("The house", "A river", "My friend") for n in range(4)]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.load(smollm2(), ctx=8192, deterministic=True) as engine:
        yield engine


def tokens_of(engine: Engine, text: str) -> list[int]:
    return [int(token) for token in engine.vocabulary.encode(text, add_special=True, parse_special=False)]


def used_cells(engine: Engine) -> int:
    gc.collect()
    engine.session().close()  # comes after the closing of those that were dropped
    engine.session().close()
    return int(engine.executor.stats()["cells_used"])


@pytest.mark.parametrize("n_requests", [5, pytest.param(25, marks=pytest.mark.slow)])
def test_sixteen_threads_with_random_cancels_say_what_each_says_alone(engine: Engine, n_requests: int) -> None:
    before = used_cells(engine)
    config = GenConfig(max_tokens=6, sampler=GREEDY, ignore_eos=True)
    alone = [engine.generate(tokens_of(engine, prompt), config) for prompt in PROMPTS]
    expected = []
    for generation in alone:
        assert generation.wait(WAIT_S)
        expected.append(generation.tokens)
    del alone, generation
    wrong: list[object] = []
    reasons: list[Reason | None] = []

    def ask(number: int) -> None:
        rng = random.Random(number)
        try:
            for _ in range(n_requests):
                which = rng.randrange(len(PROMPTS))
                session = engine.session()
                generation = session.generate_async(tokens_of(engine, PROMPTS[which]), config)
                if rng.random() < 0.25:
                    for _update in zip(range(rng.randrange(4)), generation.updates(), strict=False):
                        pass
                    generation.cancel()
                if not generation.wait(WAIT_S):
                    wrong.append("a generation that does not end")
                n = len(generation.tokens)
                if generation.tokens != expected[which][:n] or (generation.reason is Reason.LENGTH and n != 6):
                    wrong.append((which, generation.reason, generation.tokens))
                if session.tokens != (tokens_of(engine, PROMPTS[which]) + generation.tokens)[: session.position]:
                    wrong.append((which, "history", session.tokens))
                reasons.append(generation.reason)
        except BaseException as error:  # a thread's own would be lost
            wrong.append(error)
            raise

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
    assert not wrong
    assert set(reasons) == {Reason.LENGTH, Reason.CANCELLED}
    assert len(reasons) == 16 * n_requests
    assert used_cells(engine) == before


def test_a_fan_out_shares_its_trunk(engine: Engine) -> None:
    before = used_cells(engine)
    fan_out(engine, before)
    assert used_cells(engine) == before  # all handles are gone


def fan_out(engine: Engine, before: int) -> None:
    trunk_prompt = tokens_of(engine, "A library lends what it keeps, to every reader who asks. " * 160)[:2000]
    assert len(trunk_prompt) == 2000
    suffixes = [tokens_of(engine, text) for text in ("\nA title:", "\nIn short,", "\nBut", "\nQ:")]
    config = GenConfig(max_tokens=12, sampler=GREEDY, ignore_eos=True)
    executor, trunk = engine.executor, engine.session()
    n_forwarded = executor.n_forwarded
    used_at: list[int] = []
    taken: list[object] = []

    def clone_four(position: int) -> None:  # on the engine's thread, right after the prompt's last chunk
        used_at.append(executor.cache.used_cells)
        for _ in suffixes:
            future = trunk.clone_async(position)
            future.add_done_callback(lambda _: used_at.append(executor.cache.used_cells))
            taken.append(future)

    story_config = GenConfig(max_tokens=24, sampler=GREEDY, ignore_eos=True, prefill_breakpoints=(2000,))
    story = trunk.generate_async(trunk_prompt, story_config, on_breakpoint=clone_four)
    next(story)
    branches = [future.result(WAIT_S) for future in taken]  # type: ignore[attr-defined]
    taken.clear()
    answers = [branch.generate_async(suffix, config) for branch, suffix in zip(branches, suffixes, strict=True)]
    for generation in [story, *answers]:
        assert generation.wait(WAIT_S)
        assert generation.reason is Reason.LENGTH
    assert used_at == [2000 + before] * 5  # four clones, no cell
    evaluated = story.stats.evaluated_tokens + sum(answer.stats.evaluated_tokens for answer in answers)
    assert evaluated == 2000 + sum(len(suffix) for suffix in suffixes)
    n_decoded = 23 + 4 * 11
    assert executor.n_forwarded - n_forwarded == evaluated + n_decoded

    cold = engine.session().generate(trunk_prompt, GenConfig(max_tokens=24, sampler=GREEDY, ignore_eos=True))
    assert story.tokens == cold.tokens  # the source did not notice
    alone = engine.session().generate(trunk_prompt + suffixes[1], config)
    assert answers[1].tokens == alone.tokens


class Steps:
    """Every step of an executor: tokens of each sequence."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: list[dict[int, int]] = []
        forward_outputs = engine.executor.forward_outputs

        def noted(batch: Batch, needs: Any) -> object:
            ids, counts = np.unique(batch.sequences, return_counts=True)
            self.rows.append(dict(zip(ids.tolist(), counts.tolist(), strict=True)))
            return forward_outputs(batch, needs)

        monkeypatch.setattr(engine.executor, "forward_outputs", noted)


def sequence_of(session: Session) -> int:
    return session._state.sequence


def test_a_stream_and_a_short_prompt_go_on_beside_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.load(smollm2(), ctx=8192) as engine:
        steps = Steps(engine, monkeypatch)
        a, b, c = engine.session(), engine.session(), engine.session()
        stream = a.generate_async(
            tokens_of(engine, "Once upon a time"), GenConfig(max_tokens=2000, sampler=GREEDY, ignore_eos=True)
        )
        for _ in range(12):
            next(stream)
        long_prompt = tokens_of(engine, "The quick brown fox jumps over the lazy dog. " * 80)[:700]
        long = b.generate_async(long_prompt, GenConfig(max_tokens=1))
        for update in long.updates():
            if update.prefill is not None and update.prefill.done:
                break
        n_before = len(steps.rows)
        short = c.generate_async(tokens_of(engine, "The sky is"), GenConfig(max_tokens=1, sampler=GREEDY))
        assert short.wait(WAIT_S)
        assert long.reason is None
        assert long.wait(WAIT_S)
        stream.cancel()
        assert stream.wait(WAIT_S)
        ids = [sequence_of(session) for session in (a, b, c)]
        while_long = [rows for rows in steps.rows if ids[1] in rows]
        assert len(while_long) > 5
        assert all(rows.get(ids[0]) == 1 for rows in while_long)  # the stream gets its row in every step
        first_of_c = next(i for i, rows in enumerate(steps.rows) if ids[2] in rows)
        n_with_prefill = sum(1 for rows in steps.rows[n_before : first_of_c + 1] if ids[1] in rows or ids[2] in rows)
        assert n_with_prefill <= 4  # one for the step that was running
