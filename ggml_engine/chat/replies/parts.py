"""What a reply is made of: `ReplyPart`, as a parser gives them, and `ReplyMessage`, all of them put together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class ContentPart:
    """A piece of the answer, without any markup."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """A piece of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A call of a tool that was given. `index` counts the calls of the reply from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the call's arguments; all pieces of a complete call are one JSON object."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEnd:
    """The last part of a call.

    `malformed` is empty when the call is complete. Else the model did not finish it, or wrote no JSON: it is the text
    of the whole call up to there, markup included, for those who can still show it in place of the call. What follows
    comes as content.
    """

    index: int
    malformed: str = ""


ReplyPart = ContentPart | ReasoningPart | ToolCallBegin | ToolCallArguments | ToolCallEnd


@dataclass(slots=True)
class ToolCall:
    """A complete call: `arguments` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


@dataclass(slots=True)
class ReplyMessage:
    """A whole reply."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def of(cls, parts: Iterable[ReplyPart]) -> ReplyMessage:
        """All parts of a reply in one; calls that are not complete are text of its content."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: dict[int, tuple[ToolCallBegin, list[str]]] = {}
        for part in parts:
            if isinstance(part, ContentPart):
                content.append(part.text)
            elif isinstance(part, ReasoningPart):
                reasoning.append(part.text)
            elif isinstance(part, ToolCallBegin):
                calls[part.index] = part, []
            elif isinstance(part, ToolCallArguments):
                calls[part.index][1].append(part.text)
            elif part.malformed:
                content.append(part.malformed)
                del calls[part.index]
        made = [ToolCall(begin.id, begin.name, "".join(pieces)) for begin, pieces in calls.values()]
        return cls("".join(content), "".join(reasoning), made)
