"""What happens while a job runs, in the order in which it does: what the dialects write, as streams or as a whole.

    Progress*  Begun  (Said | Progress)*  Ended for each choice  Finished
or, at any place, Failed and then nothing more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ggml_engine.chat.replies import ReplyMessage, ReplyPart
from ggml_engine.server.errors import HttpProblem

StopReason = Literal["end", "length", "context", "stop", "tool_calls"]


@dataclass(frozen=True, slots=True)
class TokenProbability:
    """A token's text and bytes (None for a control token, which has none), and its logarithmic probability.

    `top` are the likeliest tokens at its place, best first, without `top` of their own.
    """

    text: str
    bytes: bytes | None
    logprob: float
    top: tuple[TokenProbability, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """Counts of tokens; `cached_tokens` of the prompt were not evaluated, since their K/V were there."""

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Progress:
    """So many tokens of those that are to be evaluated are."""

    done: int
    total: int


@dataclass(frozen=True, slots=True)
class Begun:
    """How much of the prompt was there already is known now."""

    usage: Usage


@dataclass(frozen=True, slots=True)
class Said:
    """A part of choice `index`, or none yet beside probabilities of tokens whose text is held back."""

    index: int
    part: ReplyPart | None
    logprobs: tuple[TokenProbability, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """Choice `index` has ended. `stop` is the stop string that was met.

    "length" is `max_tokens`, "context" a context that is full.
    """

    index: int
    reason: StopReason
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """All choices have ended."""

    usage: Usage


@dataclass(frozen=True, slots=True)
class Failed:
    """It came to nothing, or to no end."""

    problem: HttpProblem


Event: TypeAlias = Progress | Begun | Said | Ended | Finished | Failed


@dataclass(slots=True)
class Choice(ReplyMessage):
    """One whole answer."""

    logprobs: list[TokenProbability] = field(default_factory=list)
    reason: StopReason = "end"
    stop: str | None = None


@dataclass(slots=True)
class Answer:
    """What a finished job came to."""

    choices: list[Choice]
    usage: Usage


def collect(events: Iterable[Event], n_choices: int) -> Answer | Failed:
    """The whole answer of a job's events, or how it failed."""
    answer = Answer([Choice() for _ in range(n_choices)], Usage(0))
    failure: Failed | None = Failed(HttpProblem(500, "internal_error", "the answer has no end"))
    for event in events:
        match event:
            case Said(index=index, part=part, logprobs=logprobs):
                answer.choices[index].logprobs += logprobs
                if part is not None:
                    answer.choices[index].add(part)
            case Ended(index=index, reason=reason, stop=stop):
                answer.choices[index].reason, answer.choices[index].stop = reason, stop
            case Finished(usage=usage):
                answer.usage, failure = usage, None
            case Failed():
                return event
    return failure or answer
