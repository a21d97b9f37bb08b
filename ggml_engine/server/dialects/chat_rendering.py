"""Answers of /v1/chat/completions, whole and as chunks."""

from __future__ import annotations

import time
from typing import Any, Final

from ggml_engine.chat.replies import (
    ContentPart,
    ReasoningPart,
    ReplyPart,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from ggml_engine.server.dialects.rendering import Frame, Head, openai_usage, token_logprobs
from ggml_engine.server.events import (
    Answer,
    Begun,
    Choice,
    Ended,
    Event,
    Finished,
    Progress,
    Said,
    StopReason,
    Usage,
)
from ggml_engine.server.jobs import ChatJob

FINISH_REASONS: Final[dict[StopReason, str]] = {
    "end": "stop",
    "stop": "stop",
    "length": "length",
    "context": "length",
    "tool_calls": "tool_calls",
}


def render_chat(head: Head, job: ChatJob, answer: Answer) -> dict[str, Any]:
    """The whole answer."""
    return {
        **head.openai_fields("chat.completion"),
        "choices": [_whole(index, choice, job) for index, choice in enumerate(answer.choices)],
        "usage": openai_usage(answer.usage),
    }


def _whole(index: int, choice: Choice, job: ChatJob) -> dict[str, Any]:
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in choice.calls.values()
    ]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": choice.content if choice.content or not calls else None,
        "refusal": None,
    }
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if calls:
        message["tool_calls"] = calls
    return {
        "index": index,
        "message": message,
        "logprobs": None if job.logprobs is None else _logprobs(token_logprobs(choice.logprobs)),
        "finish_reason": FINISH_REASONS[choice.reason],
    }


def _logprobs(content: list[dict[str, Any]]) -> dict[str, Any]:
    return {"content": content, "refusal": None}


class ChatStream:
    """Chunks of one answer: for every choice its role, then deltas, then why it ended; at last the counts if asked."""

    def __init__(self, head: Head, job: ChatJob) -> None:
        self._head = head
        self._job = job
        self._begun: set[int] = set()
        self._usage = Usage(0)
        self._since = time.monotonic()

    def frames(self, event: Event) -> list[Frame]:
        """The chunks of an event."""
        match event:
            case Begun(usage=usage):
                self._usage, self._since = usage, time.monotonic()
            case Progress(done=done) if self._job.shows_progress:
                return [(None, {**self._fields(), "choices": [], "prompt_progress": self._progress(done)})]
            case Said(index=index, part=part, logprobs=logprobs):
                delta = {} if part is None else _delta(part)
                if delta is None and not logprobs:
                    return []
                written = token_logprobs(logprobs) if logprobs else None
                return [*self._opening(index), self._chunk(index, delta or {}, logprobs=written)]
            case Ended(index=index, reason=reason):
                return [*self._opening(index), self._chunk(index, {}, reason=FINISH_REASONS[reason])]
            case Finished(usage=usage) if self._job.include_usage:
                return [(None, {**self._fields(), "choices": [], "usage": openai_usage(usage)})]
        return []

    def _progress(self, n_done: int) -> dict[str, int]:
        """As llama.cpp's server has it: `total` and `processed` count what was cached, too."""
        cached = self._usage.cached_tokens
        elapsed = round((time.monotonic() - self._since) * 1000)
        return {
            "total": self._usage.prompt_tokens,
            "cache": cached,
            "processed": cached + n_done,
            "time_ms": elapsed,
        }

    def _opening(self, index: int) -> list[Frame]:
        if index in self._begun:
            return []
        self._begun.add(index)
        return [self._chunk(index, {"role": "assistant", "content": "", "refusal": None})]

    def _fields(self) -> dict[str, Any]:
        fields = self._head.openai_fields("chat.completion.chunk")
        return {**fields, "usage": None} if self._job.include_usage else fields

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        reason: str | None = None,
        logprobs: list[dict[str, Any]] | None = None,
    ) -> Frame:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None if logprobs is None else _logprobs(logprobs),
            "finish_reason": reason,
        }
        return None, {**self._fields(), "choices": [choice]}


def _delta(part: ReplyPart) -> dict[str, Any] | None:
    match part:
        case ContentPart(text=text):
            return {"content": text}
        case ReasoningPart(text=text):
            return {"reasoning_content": text}
        case ToolCallBegin(index=index, id=identifier, name=name):
            call = {"index": index, "id": identifier, "type": "function", "function": {"name": name, "arguments": ""}}
            return {"tool_calls": [call]}
        case ToolCallArguments(index=index, text=text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case ToolCallEnd(malformed=text) if text:  # what was begun cannot be taken back: the text follows it
            return {"content": text}
    return None
