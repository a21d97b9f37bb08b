"""`Reply`: the handle of one request, and `Choice`, one of the answers to it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from ggml_engine.control.generation import Generation, GenerationStats, Reason, Update
from ggml_engine.control.logprobs import TokenLogprobs
from ggml_engine.errors import ClosedError, WouldBlockError

ReplyState = Literal["queued", "prefill", "decode", "done"]


class Listener(Protocol):
    """Who is told of a reply, on any thread: it must not wait. What `on_update` raises ends the choice as failed."""

    def on_update(self, index: int, update: Update) -> object:
        """What is new of a choice: progress of the prefill (of the first one), tokens and text."""

    def on_settled(self, index: int, choice: Choice) -> object:
        """A choice has ended, once; the reply is done with the last one."""


class Choice:
    """One answer: a generation, once it has begun. What there is so far can be read from any thread."""

    def __init__(self, index: int, n_prompt: int) -> None:
        self.index = index
        self._generation: Generation | None = None
        self._unbegun = GenerationStats(prompt_tokens=n_prompt)
        self._reason: Reason | None = None
        self._error: BaseException | None = None

    @property
    def tokens(self) -> list[int]:
        """Tokens sampled so far, the end token included."""
        return [] if self._generation is None else self._generation.tokens

    @property
    def text(self) -> str:
        """Text so far."""
        return "" if self._generation is None else self._generation.text

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Of the tokens so far, where they were asked for."""
        return [] if self._generation is None else self._generation.logprobs

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None]:
        """Of the evaluated prompt tokens, where they were asked for: the first choice has them."""
        return [] if self._generation is None else self._generation.prompt_logprobs

    @property
    def reason(self) -> Reason | None:
        """Why it ended; None while it has not."""
        return self._reason or self.stats.reason

    @property
    def error(self) -> BaseException | None:
        """What it failed with."""
        if self._error is not None or self._generation is None:
            return self._error
        return self._generation.error

    @property
    def stats(self) -> GenerationStats:
        """Counts and times so far."""
        return self._unbegun if self._generation is None else self._generation.stats

    # ---- the runtime's

    def begin(self, generation: Generation) -> None:
        """It is this generation from here on."""
        self._generation = generation

    def end(self, reason: Reason, error: BaseException | None = None) -> None:
        """It has ended, whatever becomes of a generation of it."""
        self._reason, self._error = reason, error

    def cancel(self) -> None:
        """End the generation, where there is one."""
        if (generation := self._generation) is not None:
            generation.cancel()

    def __repr__(self) -> str:
        return f"<Choice {self.index}, {'running' if self.reason is None else self.reason.value}>"


@dataclass(frozen=True, slots=True)
class ReplyStats:
    """Where a request is, and what it took so far.

    `queued_s` is from its submission until its prompt was begun. Of its `prompt_tokens` `cached_tokens` were not
    evaluated, since their K/V was there; `evaluated_tokens` counts prompt tokens that were, in all choices.
    """

    state: ReplyState
    queued_s: float
    prompt_tokens: int
    cached_tokens: int
    evaluated_tokens: int
    generated_tokens: int


class Reply:
    """What became of a request so far. Usable from any thread; dropping it ends nothing."""

    def __init__(self, n: int, n_prompt: int, may_wait: Callable[[], bool], submitted_at: float) -> None:
        self.choices = tuple(Choice(index, n_prompt) for index in range(n))
        self.state: ReplyState = "queued"
        self._cancel: Callable[[], object] = _ignore
        self._may_wait = may_wait
        self._n_prompt = n_prompt
        self._submitted_at = submitted_at
        self._waited_s = 0.0
        self._done = threading.Event()

    def cancel(self) -> None:
        """End it, in whatever state it is: what it held is free before the next step. Idempotent; does not wait."""
        self._cancel()

    def wait(self, timeout: float | None = None) -> bool:
        """Until all choices have ended, and what they held was given back; False when `timeout` seconds passed before.

        Raises WouldBlockError in a callback.
        """
        if not self._done.is_set() and not self._may_wait():
            raise WouldBlockError("a callback cannot wait for a reply: its own thread has to see to it")
        return self._done.wait(timeout)

    def result(self, timeout: float | None = None) -> tuple[Choice, ...]:
        """The choices when all have ended. Raises what the first of them failed with, ClosedError, TimeoutError."""
        if not self.wait(timeout):
            raise TimeoutError(f"the reply was not done in {timeout} s")
        for choice in self.choices:
            if choice.error is not None:
                raise choice.error
            if choice.reason is Reason.SHUTDOWN:
                raise ClosedError("the runtime was shut down")
        return self.choices

    @property
    def stats(self) -> ReplyStats:
        """Counts and times so far."""
        each = [choice.stats for choice in self.choices]
        return ReplyStats(
            self.state,
            self._waited_s + each[0].queued_s,
            self._n_prompt,
            each[0].reused_tokens,
            sum(stats.evaluated_tokens for stats in each),
            sum(stats.generated_tokens for stats in each),
        )

    # ---- the runtime's

    def bind(self, cancel: Callable[[], object]) -> None:
        """Cancel by this."""
        self._cancel = cancel

    def note_begun(self, now: float) -> None:
        """It has left the queue."""
        self.state, self._waited_s = "prefill", now - self._submitted_at

    def note_done(self) -> None:
        """All that is to be told was told."""
        self.state = "done"
        self._done.set()

    def __repr__(self) -> str:
        return f"<Reply {self.state}, {len(self.choices)} choices>"


def _ignore() -> None:
    """Nothing to cancel yet."""
