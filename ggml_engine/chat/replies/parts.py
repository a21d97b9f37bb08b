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
    """A whole reply. `calls` are those that are complete, by their index."""

    content: str = ""
    reasoning: str = ""
    calls: dict[int, ToolCall] = field(default_factory=dict)

    @property
    def tool_calls(self) -> list[ToolCall]:
        """The calls in their order."""
        return list(self.calls.values())

    @classmethod
    def of(cls, parts: Iterable[ReplyPart]) -> ReplyMessage:
        """All parts of a reply in one."""
        made = cls()
        for part in parts:
            made.add(part)
        return made

    def add(self, part: ReplyPart) -> None:
        """Take a part in; a call that is not complete is text of the content."""
        match part:
            case ContentPart(text=text):
                self.content += text
            case ReasoningPart(text=text):
                self.reasoning += text
            case ToolCallBegin(index=index, id=identifier, name=name):
                self.calls[index] = ToolCall(identifier, name, "")
            case ToolCallArguments(index=index, text=text):
                self.calls[index].arguments += text
            case ToolCallEnd(index=index, malformed=text) if text:
                del self.calls[index]
                self.content += text
