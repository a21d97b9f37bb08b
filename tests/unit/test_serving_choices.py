"""Several choices for one prompt: its cells are shared, and it is evaluated once."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from control_bench import PROMPT, greedy
from fake_executor import WAIT_S
from serving_bench import Ear, serving

from ggml_engine.control.config import GenConfig
from ggml_engine.control.generation import Reason, Update
from ggml_engine.errors import OptionError, PoolFullError
from ggml_engine.ggml.sampler_config import MAX_SEED, SamplerConfig
from ggml_engine.pool.cells import CellCache
from ggml_engine.serving.choice_lengths import most_tokens, most_tokens_each
from ggml_engine.serving.request import ServingRequest


def test_a_prompt_is_evaluated_once_for_all_choices() -> None:
    with serving() as s:
        reply = s.submit(PROMPT, 4, n=4)
        for choice in reply.result(WAIT_S):
            assert choice.tokens == s.b.expected(PROMPT, 4)
        assert reply.stats.evaluated_tokens == len(PROMPT) + 3, "each of the others forwards the last token"
        assert (reply.stats.prompt_tokens, reply.stats.cached_tokens) == (len(PROMPT), 0)
        assert reply.stats.generated_tokens == 16
        assert [call.arguments[1] for call in s.b.executor.calls_of("clone")] == [len(PROMPT) - 1] * 3
        forwarded = sum(len(chunk.tokens) for forward in s.b.executor.forwards for chunk in forward.chunks)
        assert forwarded == len(PROMPT) + 3 + 4 * 3
        s.drain()
        assert s.n_open == 0


def test_choices_share_the_cells_of_the_prompt() -> None:
    with serving() as s:
        with s.b.executor.holding_forward(after=2) as gate:
            reply = s.submit(PROMPT, 6, n=3)
            gate.wait_held()
            gate.step()
            # the last token of the prompt, and what came, is each one's own
            assert s.b.executor.cache.used_cells <= len(PROMPT) - 1 + 3 * 4
        assert reply.result(WAIT_S)


def test_choices_differ_by_their_seeds_and_each_is_what_its_seed_gives() -> None:
    with serving() as s:
        config = GenConfig(max_tokens=6, sampler=SamplerConfig(temperature=5.0, seed=MAX_SEED))
        request = ServingRequest(PROMPT, config, n=3)
        assert [request.config_of(i).sampler.seed for i in range(3)] == [MAX_SEED, 0, 1]
        reply = s.runtime.submit(request)
        found = [choice.tokens for choice in reply.result(WAIT_S)]
        for i, tokens in enumerate(found):
            alone = s.runtime.submit(ServingRequest(PROMPT, request.config_of(i)))
            assert alone.result(WAIT_S)[0].tokens == tokens
        assert len({tuple(tokens) for tokens in found}) == 3


def test_a_listener_hears_of_every_choice_and_once_of_each_end() -> None:
    with serving(max_batch_tokens=4) as s:
        ear = Ear()
        reply = s.submit(PROMPT, 3, ear, n=3)
        assert reply.wait(WAIT_S)
        assert sorted(ear.settled) == [0, 1, 2]
        for index in range(3):
            told = [update for i, update in ear.updates if i == index]
            assert [t for update in told for t in update.tokens] == s.b.expected(PROMPT, 3)
            assert "".join(update.text for update in told) == reply.choices[index].text != ""
        progress = [(i, update.prefill.done) for i, update in ear.updates if update.prefill is not None]
        assert progress == [(0, 0), (0, 4), (0, 8), (0, 9)]


@pytest.mark.parametrize("n_faults", [1, 2])
def test_a_choice_whose_clone_is_refused_evaluates_the_prompt_itself(n_faults: int) -> None:
    with serving() as s:
        for i in range(n_faults):
            s.b.executor.fail_clone(RuntimeError("no"), i)
        reply = s.submit(PROMPT, 4, n=3)
        for choice in reply.result(WAIT_S):
            assert choice.tokens == s.b.expected(PROMPT, 4)
        assert reply.stats.evaluated_tokens == len(PROMPT) * (1 + n_faults) + (2 - n_faults)


def test_the_first_choice_is_the_named_sessions() -> None:
    with serving(prefix_cache_entries=4) as s:
        history = [*PROMPT, *s.ask(PROMPT, session="a", n=3).choices[0].tokens]
        assert [info.name for info in s.runtime.sessions()] == ["a"]
        assert s.reused([*history, 5], session="a") == len(history) - 1
        assert s.keys == [PROMPT]


def test_more_choices_than_compute_at_once_are_refused() -> None:
    with serving(max_requests=4) as s:
        with pytest.raises(OptionError, match=r"n is 5, at most 4 compute at once \(max_requests\)"):
            s.submit(n=5)
        for n in (0, -1, True, 1.5):
            with pytest.raises(OptionError, match="n is how many choices"):
                s.submit(n=n)
        s.ask(n=4)


def test_choices_count_as_generations_that_compute() -> None:
    with serving(max_requests=4) as s:
        with s.b.executor.holding_forward() as gate:
            first = s.submit(n=3)
            gate.wait_held()
            second, third = s.submit(n=2), s.submit(n=1)
            assert s.runtime.stats()["running"] == 3
            assert (second.state, third.state) == ("queued", "queued"), "the order is that of the submits"
        for reply in (first, second, third):
            assert reply.result(WAIT_S)


@pytest.mark.parametrize("after", [0, 1, 2, 4])
def test_a_cancel_ends_all_choices(after: int) -> None:
    with serving(prefix_cache_entries=2) as s:
        ear = Ear()
        with s.b.executor.holding_forward(after=after) as gate:
            reply = s.submit(PROMPT, 50, ear, n=3)
            gate.wait_held()
            reply.cancel()
        assert reply.wait(WAIT_S)
        assert {choice.reason for choice in reply.choices} == {Reason.CANCELLED}
        assert sorted(ear.settled) == [0, 1, 2]
        assert s.runtime.stats()["cancelled"] == 1


def test_choices_of_a_prompt_that_fails_fail_with_it() -> None:
    with serving() as s:
        s.b.executor.fail_forward(RuntimeError("broken"))
        reply = s.submit(n=3)
        assert reply.wait(WAIT_S)
        assert [choice.reason for choice in reply.choices] == [Reason.FAILED] * 3
        assert all("broken" in str(choice.error) for choice in reply.choices)
        with pytest.raises(Exception, match="broken"):
            reply.result(WAIT_S)


def test_what_a_listener_raises_ends_its_choice() -> None:  # R31
    with serving() as s:

        class Raising(Ear):
            def on_update(self, index: int, update: Update) -> None:
                if index == 1 and update.tokens:
                    raise RuntimeError("the window was closed")

            def on_settled(self, index: int, choice: Any) -> None:
                super().on_settled(index, choice)
                raise RuntimeError("and so was this")

        ear = Raising()
        reply = s.submit(PROMPT, 4, ear, n=3)
        assert reply.wait(WAIT_S)
        assert [choice.reason for choice in reply.choices] == [Reason.LENGTH, Reason.FAILED, Reason.LENGTH]
        assert sorted(ear.settled) == [0, 1, 2]


def test_log_probabilities_of_the_prompt_are_the_first_choices() -> None:
    with serving() as s:
        reply = s.runtime.submit(ServingRequest(PROMPT, greedy(max_tokens=2, logprobs=1, prompt_logprobs=0), n=2))
        first, second = reply.result(WAIT_S)
        assert len(first.prompt_logprobs) == len(PROMPT)
        assert not second.prompt_logprobs
        assert len(first.logprobs) == len(second.logprobs) == 2


# ---- choices that have no room together


@pytest.mark.parametrize(("n", "each"), [(1, 24), (2, 12), (3, 8), (5, 4), (24, 1)])
def test_choices_that_would_outgrow_the_cells_together_end_with_their_parts(n: int, each: int) -> None:
    with serving(capacity=32) as s:
        reply = s.submit(PROMPT, 50, n=n)
        for choice in reply.result(WAIT_S):
            assert choice.reason is Reason.LENGTH
            assert choice.tokens == s.b.expected(PROMPT, each)
        s.drain()
        assert not s.b.executor.cache.used_cells


def test_choices_that_fit_have_all_that_was_asked_for() -> None:
    with serving(capacity=32) as s:
        for n, n_tokens in ((2, 12), (3, 8), (8, 3)):
            s.ask(PROMPT, n_tokens, n=n)


def test_choices_that_have_no_room_for_one_token_each_are_refused() -> None:
    with serving(capacity=16) as s:
        with pytest.raises(OptionError, match="n is 9: the 16 cells of the context have no room for a prompt of 9 tok"):
            s.submit(PROMPT, 1, n=9)
        assert not s.b.executor.calls
        s.ask(PROMPT, 1, n=8)


def test_where_it_is_not_known_what_choices_share_they_are_not_bounded() -> None:
    with serving(capacity=48, clones=False) as s:
        s.ask(PROMPT, 16, n=2)
        assert most_tokens_each(len(PROMPT), 3, 48, 1) == 13
        assert most_tokens(s.b.executor, len(PROMPT), 3, 48) == most_tokens(s.b.executor, len(PROMPT), 1, 48) == 40


@pytest.mark.parametrize("seed", range(8))
def test_the_part_of_a_choice_is_what_the_cells_have_room_for(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        run = rng.choice([1, 4, 16])
        cache = CellCache(rng.randint(1, 160), run=run, read_block=run)
        n, n_prompt = rng.randint(1, 6), rng.randint(1, cache.capacity)
        each = most_tokens_each(n_prompt, n, cache.capacity, run)
        for n_tokens, fits in ((each, True), (each + 1, False)):
            shared = opened(cache, n_prompt - 1)
            choices = [cache.clone(shared, n_prompt - 1) for _ in range(n)]
            cache.close(shared)
            if n_tokens:
                step = np.repeat(np.array(choices, np.int32), n_tokens)
                if fits:
                    cache.declare(step)
                else:
                    with pytest.raises(PoolFullError):
                        cache.declare(step)
            for choice in choices:
                cache.close(choice)


def opened(cache: CellCache, n: int) -> int:
    """A sequence of `n` tokens."""
    sequence = cache.open()
    if n:
        placement = cache.declare(np.full(n, sequence, np.int32)).place(np.arange(n, dtype=np.int32))
        placement.commit()
    return sequence
