"""What the dialects' renderers share: heads of answers, counts, and probabilities as OpenAI's API writes them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from ggml_engine.server.events import Event, TokenProbability, Usage

Frame: TypeAlias = tuple[str | None, dict[str, Any]]
"""An event of a stream: its name, where the dialect names events, and its data."""


@dataclass(frozen=True, slots=True)
class Head:
    """What every part of an answer repeats. `created` is in seconds since 1970."""

    id: str
    created: int
    model: str

    @classmethod
    def new(cls, prefix: str, model: str) -> Head:
        """Of an answer that begins now."""
        return cls(new_id(prefix), int(time.time()), model)


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return prefix + secrets.token_hex(12)


class StreamRenderer(Protocol):
    """Writes a job's events as those of a dialect's stream."""

    def frames(self, event: Event) -> list[Frame]:
        """What an event comes to; failures are not written here."""


def openai_usage(usage: Usage) -> dict[str, Any]:
    """Counts as chat completions and completions have them."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def token_logprobs(probabilities: Iterable[TokenProbability]) -> list[dict[str, Any]]:
    """Probabilities as chat completions have them: text, bytes and likeliest tokens beside each."""
    return [{**_entry(each), "top_logprobs": [_entry(other) for other in each.top]} for each in probabilities]


def _entry(probability: TokenProbability) -> dict[str, Any]:
    return {
        "token": probability.text,
        "logprob": probability.logprob,
        "bytes": None if probability.bytes is None else list(probability.bytes),
    }
