"""A coding agent's conversation over SmolLM2: each turn evaluates what is new, in one session or out of a prefix cache.

Twelve turns; the seventh is asked again differently, and goes on from there; the tenth is cancelled and tried again.
What is new follows from the script and the length of replies alone: see `agent_conversation.expected`.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, field

import pytest
from agent_conversation import SHORT, WHOLE, Known, Size, converse
from prefix_bench import reusable
from real_models import smollm2

from ggml_engine import Engine, GenConfig, Generation, PrefixCache, Reason, SamplerConfig, Session, Update

WAIT_S = 600
CONTEXT = 8192


@dataclass
class Agent:
    """Sends whole histories, and compares what is evaluated with what was captured."""

    engine: Engine
    how: Known
    n_reply: int
    session: Session | None = None
    cache: PrefixCache = field(default_factory=lambda: PrefixCache(64))
    known: list[list[int]] = field(default_factory=list)  # what was captured
    evaluated: list[int] = field(default_factory=list)
    replies: list[list[int]] = field(default_factory=list)
    n_tokens: int = 0  # of the longest history

    def ask(self, prompt: list[int]) -> list[int]:
        """The reply to a history."""
        generation = self._generate(prompt, self.n_reply)
        assert generation.reason is Reason.LENGTH
        self.replies.append(generation.tokens)
        self.n_tokens = max(self.n_tokens, len(prompt) + len(generation.tokens))
        return generation.tokens

    def ask_and_cancel(self, prompt: list[int]) -> None:
        """As `ask`, cancelled by the caller when the reply has begun."""
        assert self._generate(prompt, 400, cancels=True).reason is Reason.CANCELLED

    def _generate(self, prompt: list[int], n: int, *, cancels: bool = False) -> Generation:
        sampler = SamplerConfig(temperature=0.8, seed=len(self.evaluated))
        config = GenConfig(max_tokens=n, sampler=sampler, ignore_eos=True)
        has_begun = threading.Event()

        def begins(update: Update) -> None:
            if update.tokens:
                has_begun.set()

        if self.how == "session":
            self.session = session = self.session or self.engine.session()
            self.known = [session.tokens]
            generation = session.generate_from(prompt, config, begins)
        else:
            found = self.cache.lookup(self.engine.runner(), prompt, WAIT_S)
            session = found.session or self.engine.session()
            capture = self.cache.capture_prompt(session, prompt)
            takes_prompt = self.how == "every" or (self.how == "initial" and not self.evaluated)
            generation = session.generate_async(
                prompt[found.n_reused :],
                config,
                capture.wrap(begins) if takes_prompt else begins,
                on_settled=capture.at_end() if self.how == "end" else None,
            )
        if cancels:
            assert has_begun.wait(WAIT_S)
            generation.cancel()
        assert generation.wait(WAIT_S)
        assert generation.error is None
        stats = generation.stats
        assert stats.evaluated_tokens == len(prompt) - reusable(prompt, self.known)
        assert stats.reused_tokens == reusable(prompt, self.known)
        self.evaluated.append(stats.evaluated_tokens)
        if self.how != "session":
            capture.collect(timeout=WAIT_S)
            if takes_prompt:
                self.known.append(list(prompt))
            if self.how == "end":
                self.known.append([*prompt, *generation.tokens[:-1]])
            session.close()
        return generation


def converse_over(engine: Engine, how: Known, size: Size) -> Agent:
    """The whole conversation; what each request evaluated is what is new in it."""
    agent = Agent(engine, how, size.n_reply)
    encode = functools.partial(engine.vocabulary.encode, add_special=False, parse_special=True)
    history = converse(agent, lambda text: encode(text).tolist(), how, size)
    if how == "session":
        assert agent.session is not None
        assert agent.session.tokens == history[:-1]
    if agent.session is not None:
        agent.session.close()
    return agent


def test_a_short_conversation_evaluates_what_is_new_and_replies_as_a_live_session_does() -> None:  # R39 R40 R75 R109
    replies_as_live("end")


@pytest.mark.slow
def test_so_it_does_whatever_is_captured() -> None:  # R75
    replies_as_live("every", "initial")


def replies_as_live(*hows: Known) -> None:
    """In deterministic mode what is reused changes no token, sampled ones included."""
    with Engine.load(smollm2(), ctx=4096, deterministic=True, threads=1) as engine:
        live = converse_over(engine, "session", SHORT)
        for how in hows:
            agent = converse_over(engine, how, SHORT)
            assert agent.replies == live.replies, how
        assert len({tuple(reply) for reply in live.replies}) > 1, "replies that are all alike show nothing"


@pytest.mark.slow
@pytest.mark.parametrize("how", ["session", "every"])  # the other ways: in short ones
def test_a_whole_conversation_evaluates_what_is_new(how: Known) -> None:  # R40 R75 R109
    # more cells than the model's context has: what leaves a shared run of cells begins another one
    with Engine.load(smollm2(), ctx=2 * CONTEXT) as engine:
        agent = converse_over(engine, how, WHOLE)
    assert 7000 < agent.n_tokens < 7500 < CONTEXT
