"""Answers of /v1/responses: a response is built item by item, and every step of that is an event of the stream.

A whole response is what the same steps come to. Text, reasoning and calls are items of their own, in the order in which
the model wrote them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any, Final

from ggml_engine.chat.replies import (
    ContentPart,
    ReasoningPart,
    ReplyPart,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from ggml_engine.server.dialects.rendering import Frame, Head, new_id, token_logprobs
from ggml_engine.server.dialects.responses_items import sealed
from ggml_engine.server.dialects.responses_tools import Spelled
from ggml_engine.server.errors import HttpProblem
from ggml_engine.server.events import Answer, Begun, Choice, Ended, Event, Finished, Said, TokenProbability, Usage

_INCOMPLETE: Final = ("length", "context")


def render_response(
    head: Head, echoed: dict[str, Any], answer: Answer, *, names: Spelled | None = None, seals_reasoning: bool = False
) -> dict[str, Any]:
    """The whole response."""
    stream = ResponseStream(head, echoed, names=names, seals_reasoning=seals_reasoning)
    for event in _events(answer):
        stream.frames(event)
    return stream.response


def _events(answer: Answer) -> Iterator[Event]:
    choice: Choice = answer.choices[0]
    yield Begun(answer.usage)
    if choice.reasoning:
        yield Said(0, ReasoningPart(choice.reasoning))
    if choice.content:
        yield Said(0, ContentPart(choice.content), tuple(choice.logprobs))
    for index, call in choice.calls.items():
        yield Said(0, ToolCallBegin(index, call.id, call.name))
        yield Said(0, ToolCallArguments(index, call.arguments))
        yield Said(0, ToolCallEnd(index))
    yield Ended(0, choice.reason, choice.stop)
    yield Finished(answer.usage)


class ResponseStream:
    """Events of one response, numbered from 0; `response` is what it has come to."""

    def __init__(
        self, head: Head, echoed: dict[str, Any], *, names: Spelled | None = None, seals_reasoning: bool = False
    ) -> None:
        self._names = names or {}
        self._seals_reasoning = seals_reasoning
        self._n_events = 0
        self._item: dict[str, Any] | None = None  # the one that is being written
        self._held: list[dict[str, Any]] = []  # probabilities of tokens that are in no text yet
        self._ended: Ended | None = None
        self.response: dict[str, Any] = {
            "id": head.id,
            "object": "response",
            "created_at": head.created,
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": head.model,
            "output": [],
            "usage": None,
            "user": None,
            **echoed,
        }

    def frames(self, event: Event) -> list[Frame]:
        """The events of an event."""
        match event:
            case Begun():
                return [
                    self._frame("response.created", response=self._snapshot()),
                    self._frame("response.in_progress", response=self._snapshot()),
                ]
            case Said(part=part, logprobs=logprobs):
                return self._say(part, logprobs)
            case Ended(reason=reason):
                self._ended = event
                return self._close("incomplete" if reason in _INCOMPLETE else "completed")
            case Finished(usage=usage):
                return self._finish(usage)
        return []

    def failure(self, problem: HttpProblem) -> Frame:
        """The last event of a response that comes to no end."""
        self.response["status"] = "failed"
        self.response["error"] = {"code": "server_error", "message": problem.message}
        return self._frame("response.failed", response=self._snapshot())

    # ---- items

    def _say(self, part: ReplyPart | None, logprobs: tuple[TokenProbability, ...]) -> list[Frame]:
        self._held += [{**each, "bytes": each["bytes"] or []} for each in _listed(logprobs)]
        match part:
            case ContentPart(text=text):
                return self._text(text)
            case ReasoningPart(text=text):
                return self._reasoning(text)
            case ToolCallBegin(id=identifier, name=name):
                return [*self._close(), *self._call(identifier, name)]
            case ToolCallArguments(text=text):
                return self._arguments(text)
            case ToolCallEnd(malformed=text):
                return [*self._close("incomplete" if text else "completed"), *(self._text(text) if text else [])]
        return []

    def _text(self, text: str) -> list[Frame]:
        frames = []
        if self._item is None or self._item["type"] != "message":
            item = {"type": "message", "id": new_id("msg_"), "role": "assistant", "content": []}
            frames = [*self._close(), self._open(item)]
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            frames.append(self._part("response.content_part.added", part))
        part = self._current["content"][0]
        logprobs, self._held = self._held, []
        part["text"] += text
        part["logprobs"] += logprobs
        frames.append(self._within("response.output_text.delta", delta=text, logprobs=logprobs))
        return frames

    def _reasoning(self, text: str) -> list[Frame]:
        frames = []
        if self._item is None or self._item["type"] != "reasoning":
            frames = [
                *self._close(),
                self._open({"type": "reasoning", "id": new_id("rs_"), "summary": [], "content": []}),
            ]
            frames.append(self._part("response.content_part.added", {"type": "reasoning_text", "text": ""}))
        self._current["content"][0]["text"] += text
        frames.append(self._within("response.reasoning_text.delta", delta=text))
        return frames

    def _call(self, identifier: str, name: str) -> list[Frame]:
        item = {"type": "function_call", "id": new_id("fc_"), "call_id": identifier, "name": name, "arguments": ""}
        return [self._open({**item, **self._names.get(name, {})})]

    def _arguments(self, text: str) -> list[Frame]:
        item = self._current
        item["arguments"] += text
        return [self._frame("response.function_call_arguments.delta", **self._at(), delta=text)]

    @property
    def _current(self) -> dict[str, Any]:
        if self._item is None:
            raise AssertionError("a part of an item that was not begun")
        return self._item

    def _open(self, item: dict[str, Any]) -> Frame:
        item["status"] = "in_progress"
        self.response["output"].append(item)
        self._item = item
        return self._frame("response.output_item.added", output_index=self._index, item=_copy(item))

    def _close(self, status: str = "completed") -> list[Frame]:
        """The item that is being written, if there is one, is done."""
        item = self._item
        if item is None:
            return []
        frames = []
        if item["type"] == "function_call":
            done = {"arguments": item["arguments"], "name": item["name"]}
            frames.append(self._frame("response.function_call_arguments.done", **self._at(), **done))
        else:
            part = item["content"][0]
            if item["type"] == "message":
                part["logprobs"] += self._held
                self._held = []
                done = {"text": part["text"], "logprobs": part["logprobs"]}
                frames.append(self._within("response.output_text.done", **done))
            else:
                frames.append(self._within("response.reasoning_text.done", text=part["text"]))
                if self._seals_reasoning:
                    item["encrypted_content"] = sealed(part["text"])
            frames.append(self._within("response.content_part.done", part=dict(part)))
        item["status"] = status
        frames.append(self._frame("response.output_item.done", output_index=self._index, item=_copy(item)))
        self._item = None
        return frames

    def _finish(self, usage: Usage) -> list[Frame]:
        ended = self._ended
        is_whole = ended is None or ended.reason not in _INCOMPLETE
        self.response["status"] = "completed" if is_whole else "incomplete"
        if is_whole:
            self.response["completed_at"] = int(time.time())
        else:
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.response["usage"] = {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }
        return [self._frame(f"response.{self.response['status']}", response=self._snapshot())]

    # ---- events

    @property
    def _index(self) -> int:
        return len(self.response["output"]) - 1

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._current["id"], "output_index": self._index}

    def _within(self, kind: str, **fields: Any) -> Frame:
        return self._frame(kind, **self._at(), content_index=0, **fields)

    def _part(self, kind: str, part: dict[str, Any]) -> Frame:
        self._current["content"].append(part)
        return self._within(kind, part={**part, **({"logprobs": []} if "logprobs" in part else {})})

    def _frame(self, kind: str, **fields: Any) -> Frame:
        number, self._n_events = self._n_events, self._n_events + 1
        return kind, {"type": kind, "sequence_number": number, **fields}

    def _snapshot(self) -> dict[str, Any]:
        return {**self.response, "output": [_copy(item) for item in self.response["output"]]}


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    """The item as it is now."""
    copied = dict(item)
    if "content" in item:
        copied["content"] = [dict(part) for part in item["content"]]
    return copied


def _listed(logprobs: tuple[TokenProbability, ...]) -> list[dict[str, Any]]:
    listed = token_logprobs(logprobs)
    for each in listed:
        each["top_logprobs"] = [{**other, "bytes": other["bytes"] or []} for other in each["top_logprobs"]]
    return listed
