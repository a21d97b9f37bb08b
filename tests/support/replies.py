"""Replies for tests: read in one piece and in others, with ids that do not differ between two readings."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ggml_engine.chat.replies import (
    ContentPart,
    ReasoningPart,
    ReplyMessage,
    ReplyParser,
    ReplyPart,
    ToolCallArguments,
    ToolCallBegin,
)

STRING = {"type": "string"}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather in a city.",
            "parameters": {
                "type": "object",
                "properties": {"city": STRING, "days": {"type": "integer"}, "units": {"type": "string"}},
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "", "parameters": {}}},
]

NewParser = Callable[[], ReplyParser]


def read(new_parser: NewParser, pieces: Sequence[str]) -> list[ReplyPart]:
    """The parts of a reply that comes in these pieces; pieces of one thing are joined, ids are counted."""
    parser = new_parser()
    ids = (f"id{n}" for n in itertools.count())
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    return list(_joined(parts, ids))


def _joined(parts: Sequence[ReplyPart], ids: Iterator[str]) -> Iterator[ReplyPart]:
    for kind, group in itertools.groupby(parts, type):
        if kind in (ContentPart, ReasoningPart):
            yield kind("".join(part.text for part in group))  # type: ignore[union-attr, call-arg, arg-type]
        elif kind is ToolCallArguments:
            pieces = list(group)
            yield ToolCallArguments(pieces[0].index, "".join(part.text for part in pieces))  # type: ignore[union-attr]
        else:
            for part in group:
                yield ToolCallBegin(part.index, next(ids), part.name) if isinstance(part, ToolCallBegin) else part


def cuts(text: str) -> Iterator[list[str]]:
    """The text in one piece, in all pairs of pieces, and in pieces of one size."""
    yield [text]
    for at in range(1, len(text)):
        yield [text[:at], text[at:]]
    for size in (1, 2, 3, 5, 8):
        yield [text[at : at + size] for at in range(0, len(text), size)]


def message(new_parser: NewParser, text: str) -> ReplyMessage:
    """The whole reply; that it is the same however the text is cut is asserted."""
    whole = read(new_parser, [text])
    for pieces in cuts(text):
        assert read(new_parser, pieces) == whole, pieces
    return ReplyMessage.of(whole)


def calls(reply: ReplyMessage) -> list[tuple[str, str]]:
    """Names and arguments of the calls."""
    return [(call.name, call.arguments) for call in reply.tool_calls]
