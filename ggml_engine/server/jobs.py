"""What a request of any dialect comes to: a job that knows neither HTTP nor a dialect's names.

A dialect checks its request and makes a job of it; `generation` runs the job and says what happens as `events`; the
dialect writes these in its own words. Values only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from ggml_engine.chat.tools import ToolChoice
from ggml_engine.ggml.sampler_config import SamplerConfig

MAX_CHOICES: Final = 128
MAX_PROMPTS: Final = 32
MAX_TOP_LOGPROBS: Final = 20

Message = dict[str, Any]
Prompt = str | tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationJob:
    """What jobs have in common.

    `max_tokens` None means until the model ends or the context is full. `logprobs` is how many of the likeliest tokens
    are named beside each one, None for no probabilities at all. `session` is the name of a conversation whose K/V are
    kept. `cache_prompt` False evaluates the whole prompt, whatever is cached of it. `include_usage` asks for counts at
    the end of a stream. `model` None is the server's first; `schema_field` is what the dialect calls the field that a
    schema came in.
    """

    model: str | None
    sampler: SamplerConfig
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    session: str | None = None
    cache_prompt: bool = True
    stream: bool = False
    include_usage: bool = False
    schema_field: str = "response_format"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatJob(GenerationJob):
    """An answer to messages.

    `messages` have a `role` (system, user, assistant, tool), a text as `content`, and where they are there
    `tool_calls`, `tool_call_id`, `name`, `reasoning_content`, as OpenAI's API has them. `tools` are its function tools.
    `variables` reach the chat template by their names, and are refused where it does not read them; `hints` are left
    out there. `opening` is text that the answer begins with: it is given, not generated. `shows_progress` asks a stream
    for how far the prompt is read.
    """

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: ToolChoice = field(default_factory=ToolChoice)
    parallel_tool_calls: bool = True
    variables: Mapping[str, Any] = field(default_factory=dict)
    hints: Mapping[str, Any] = field(default_factory=dict)
    opening: str = ""
    shows_progress: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionJob(GenerationJob):
    """What goes on after each of `prompts` (texts, or token ids); `echo` puts the prompt before it."""

    prompts: tuple[Prompt, ...]
    echo: bool = False
