"""Messages of Anthropic's clients: their blocks, and what they are as messages of a chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import Field

from ggml_engine.server.dialects.parts import CallId, FunctionName, MediaPart
from ggml_engine.server.jobs import Message
from ggml_engine.server.validation import Many, NoEffect, Refused, RequestModel, invalid

BILLING_HEADER: Final = "x-anthropic-billing-header:"
"""How a block of a system prompt begins that is a header of the client's to its provider, another in every request."""


class TextBlock(RequestModel):
    type: Literal["text"]
    text: str
    cache_control: NoEffect = None
    citations: Refused = None


class ToolUseBlock(RequestModel):
    type: Literal["tool_use"]
    id: CallId
    name: FunctionName
    input: dict[str, Any]
    cache_control: NoEffect = None
    caller: NoEffect = None


class ToolResultBlock(RequestModel):
    type: Literal["tool_result"]
    tool_use_id: CallId
    content: str | Many[Annotated[TextBlock | MediaPart, Field(discriminator="type")]] | None = None
    is_error: bool | None = None
    cache_control: NoEffect = None

    def text(self) -> str:
        """The result; an error says so, since chat templates have no place for that."""
        text = _text(self.content or "")
        return f"Error: {text}" if self.is_error else text


class ThinkingBlock(RequestModel):
    type: Literal["thinking"]
    thinking: str
    signature: NoEffect = None


Block = Annotated[TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | MediaPart, Field(discriminator="type")]


def _text(content: str | list[Any]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(block.text for block in content if isinstance(block, TextBlock))


def system_text(content: str | Sequence[Any]) -> str:
    """A system prompt, without the blocks that are no text for a model."""
    if isinstance(content, str):
        return content
    texts = [block.text for block in content if isinstance(block, TextBlock)]
    return "\n".join(text for text in texts if not text.startswith(BILLING_HEADER))


class MessageFields(RequestModel):
    role: Literal["user", "assistant", "system"]
    content: str | Many[Block]

    def messages(self) -> list[Message]:
        """Results of tools are messages of their own; a result stands before what the user says beside it."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        if self.role == "assistant":
            return [self._assistant(self.content)]
        if self.role == "system":
            return [{"role": "system", "content": system_text(self.content)}]
        found: list[Message] = []
        text: list[str] = []
        for block in self.content:
            if isinstance(block, ToolResultBlock):
                found.append({"role": "tool", "content": block.text(), "tool_call_id": block.tool_use_id})
            elif isinstance(block, TextBlock):
                text.append(block.text)
        if text or not found:
            found.append({"role": "user", "content": "\n".join(text)})
        return found

    def _assistant(self, blocks: list[Block]) -> Message:
        message: Message = {"role": "assistant", "content": _text(blocks)}
        thinking = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
        calls = [
            {
                "id": block.id,
                "type": "function",
                "function": {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)},
            }
            for block in blocks
            if isinstance(block, ToolUseBlock)
        ]
        if thinking:
            message["reasoning_content"] = thinking
        if calls:
            message["tool_calls"] = calls
        return message


def blocks_of_roles(messages: list[MessageFields]) -> list[MessageFields]:
    """The messages. Raises where a block is none of its role's."""
    allowed: dict[str, tuple[type, ...]] = {
        "user": (TextBlock, ToolResultBlock),
        "assistant": (TextBlock, ToolUseBlock, ThinkingBlock),
        "system": (TextBlock,),
    }
    for number, message in enumerate(messages):
        for block in message.content if isinstance(message.content, list) else ():
            if not isinstance(block, allowed[message.role]):
                raise invalid(f"message {number}: a {block.type} block is not part of a message of {message.role}")
    return messages
