"""Answers of /v1/messages, whole and as events."""

from __future__ import annotations

import json
from typing import Any, Final

from ggml_engine.chat.replies import (
    ContentPart,
    ReasoningPart,
    ReplyPart,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from ggml_engine.server.dialects.rendering import Frame, Head
from ggml_engine.server.events import Answer, Begun, Ended, Event, Finished, Said, StopReason, Usage

STOP_REASONS: Final[dict[StopReason, str]] = {
    "end": "end_turn",
    "stop": "stop_sequence",
    "length": "max_tokens",
    "context": "model_context_window_exceeded",
    "tool_calls": "tool_use",
}


def render_message(head: Head, answer: Answer, *, shows_thinking: bool = True) -> dict[str, Any]:
    """The whole answer: thinking (without its text, where that is not to be shown), text, and calls, as blocks."""
    choice = answer.choices[0]
    content: list[dict[str, Any]] = []
    if choice.reasoning:
        content.append({"type": "thinking", "thinking": choice.reasoning if shows_thinking else "", "signature": ""})
    if choice.content:
        content.append({"type": "text", "text": choice.content})
    for call in choice.calls.values():
        content.append({"type": "tool_use", "id": call.id, "name": call.name, "input": json.loads(call.arguments)})
    ended = {"stop_reason": STOP_REASONS[choice.reason], "stop_sequence": choice.stop}
    return {**_fields(head), "content": content, **ended, "usage": message_usage(answer.usage)}


def message_usage(usage: Usage) -> dict[str, int]:
    """Counts; here `input_tokens` are those that were not cached."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _fields(head: Head) -> dict[str, Any]:
    return {"id": head.id, "type": "message", "role": "assistant", "model": head.model}


class MessageStream:
    """Events of one answer: blocks one after the other, each with its start, deltas and stop."""

    def __init__(self, head: Head, *, shows_thinking: bool = True) -> None:
        self._head = head
        self._shows_thinking = shows_thinking
        self._n_blocks = 0
        self._open: str | None = None
        self._ended: Ended | None = None

    def frames(self, event: Event) -> list[Frame]:
        """The events of an event."""
        match event:
            case Begun(usage=usage):
                return self._begin(usage)
            case Said(part=part) if part is not None:
                return self._say(part)
            case Ended():
                self._ended = event
                return self._close()
            case Finished(usage=usage):
                return self._finish(usage)
        return []

    def _begin(self, usage: Usage) -> list[Frame]:
        message: dict[str, Any] = {**_fields(self._head), "content": [], "usage": message_usage(usage)}
        message |= {"stop_reason": None, "stop_sequence": None}
        return [_frame("message_start", message=message), _frame("ping")]

    def _say(self, part: ReplyPart) -> list[Frame]:
        match part:
            case ContentPart(text=text):
                return self._text(text)
            case ReasoningPart(text=text):
                opened = self._within("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                said = [self._delta({"type": "thinking_delta", "thinking": text})] if self._shows_thinking else []
                return [*opened, *said]
            case ToolCallBegin(id=identifier, name=name):
                block = {"type": "tool_use", "id": identifier, "name": name, "input": {}}
                return [*self._close(), *self._within("tool_use", block)]
            case ToolCallArguments(text=text):
                return [self._delta({"type": "input_json_delta", "partial_json": text})]
            case ToolCallEnd(malformed=text):
                return [*self._close(), *(self._text(text) if text else [])]

    def _text(self, text: str) -> list[Frame]:
        opened = self._within("text", {"type": "text", "text": ""})
        return [*opened, self._delta({"type": "text_delta", "text": text})]

    def _within(self, kind: str, block: dict[str, Any]) -> list[Frame]:
        if self._open == kind:
            return []
        closed = self._close()
        self._open = kind
        return [*closed, _frame("content_block_start", index=self._n_blocks, content_block=block)]

    def _delta(self, delta: dict[str, Any]) -> Frame:
        return _frame("content_block_delta", index=self._n_blocks, delta=delta)

    def _close(self) -> list[Frame]:
        if self._open is None:
            return []
        signed = [self._delta({"type": "signature_delta", "signature": ""})] if self._open == "thinking" else []
        frames = [*signed, _frame("content_block_stop", index=self._n_blocks)]
        self._open = None
        self._n_blocks += 1
        return frames

    def _finish(self, usage: Usage) -> list[Frame]:
        ended = self._ended
        delta = {
            "stop_reason": None if ended is None else STOP_REASONS[ended.reason],
            "stop_sequence": None if ended is None else ended.stop,
        }
        return [_frame("message_delta", delta=delta, usage=message_usage(usage)), _frame("message_stop")]


def _frame(kind: str, **fields: Any) -> Frame:
    return kind, {"type": kind, **fields}
