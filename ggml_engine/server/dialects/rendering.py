"""What the dialects' renderers share: heads of answers, counts, and probabilities as OpenAI's API writes them."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeAlias

from ggml_engine.server.events import Event, TokenProbability, Usage
from ggml_engine.server.hosted_model import HostedModel

_FINGERPRINT_DIGITS: Final = 10

Frame: TypeAlias = tuple[str | None, dict[str, Any]]
"""An event of a stream: its name, where the dialect names events, and its data."""


@dataclass(frozen=True, slots=True)
class Head:
    """What every part of an answer repeats. `created` is in seconds since 1970."""

    id: str
    created: int
    model: str
    fingerprint: str = ""

    @classmethod
    def new(cls, prefix: str, model: HostedModel) -> Head:
        """Of an answer of a model that begins now."""
        return cls(new_id(prefix), int(time.time()), model.name, model.fingerprint)

    @property
    def system_fingerprint(self) -> str | None:
        """As OpenAI's API has it: another one says that the model, or how it is executed, is another."""
        return f"fp_{self.fingerprint[:_FINGERPRINT_DIGITS]}" if self.fingerprint else None

    def openai_fields(self, kind: str) -> dict[str, Any]:
        """What answers and chunks of chat completions and completions begin with; `kind` is what they are."""
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.system_fingerprint,
        }


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
