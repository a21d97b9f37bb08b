"""Items of /v1/responses that a client sends, and what they are as messages of a chat.

Reasoning comes back as text, or sealed: as `encrypted_content`, which a client that keeps nothing else returns.
"""

from __future__ import annotations

import base64
import binascii
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from ggml_engine.server.dialects.parts import CallId, FunctionName, MediaPart, RefusalPart, TextFields, text_of
from ggml_engine.server.dialects.responses_tools import joined
from ggml_engine.server.jobs import Message
from ggml_engine.server.validation import Many, NoEffect, Refused, RequestModel, invalid

_SEAL: Final = "ggml-engine.1."


def sealed(text: str) -> str:
    """A text as the opaque one that `unsealed` takes. It is encoded, and no secret: the reasoning is shown as well."""
    return _SEAL + base64.urlsafe_b64encode(text.encode()).decode("ascii")


def unsealed(token: str) -> str:
    """The text of what `sealed` made. Raises ValueError for anything else."""
    if not token.startswith(_SEAL):
        raise ValueError("another server's")
    data = token.removeprefix(_SEAL)
    return base64.b64decode(data, altchars=b"-_", validate=True).decode()


def _checked_seal(value: str | None) -> str | None:
    try:
        return None if value is None else unsealed(value)
    except (ValueError, binascii.Error):
        raise invalid("is none that this server made: it holds reasoning that cannot be read here") from None


class TextPart(TextFields):
    type: Literal["input_text", "output_text", "text"]
    annotations: NoEffect = None
    logprobs: NoEffect = None


Part = Annotated[TextPart | RefusalPart | MediaPart, Field(discriminator="type")]
Content = str | Many[Part]


class MessageItem(RequestModel):
    type: Literal["message"] = "message"
    role: Literal["user", "system", "developer", "assistant"]
    content: Content
    id: NoEffect = None
    status: NoEffect = None
    phase: NoEffect = None


class CallItem(RequestModel):
    type: Literal["function_call"]
    call_id: CallId
    name: FunctionName
    arguments: str
    id: NoEffect = None
    status: NoEffect = None
    caller: Refused = None
    namespace: FunctionName | None = None


class CallOutputItem(RequestModel):
    type: Literal["function_call_output"]
    call_id: CallId
    output: Content
    id: NoEffect = None
    status: NoEffect = None
    name: NoEffect = None


class ReasoningText(RequestModel):
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(RequestModel):
    type: Literal["reasoning"]
    id: NoEffect = None
    summary: Many[ReasoningText] = Field(default_factory=list)
    content: Many[ReasoningText] | None = None
    encrypted_content: Annotated[str | None, AfterValidator(_checked_seal)] = None
    status: NoEffect = None

    @property
    def text(self) -> str:
        """What was thought; the sealed text, where there is no other."""
        shown = "\n".join(each.text for each in self.content or self.summary)
        return shown or self.encrypted_content or ""


def _kind(item: Any) -> str | None:
    kind = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else None


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind),
]


def messages_of(items: str | list[Item]) -> list[Message]:
    """Items as messages: calls and reasoning belong to the assistant's message that they stand beside."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    for item in items:
        if isinstance(item, CallOutputItem):
            messages.append({"role": "tool", "content": text_of(item.output), "tool_call_id": item.call_id})
        elif isinstance(item, MessageItem) and item.role != "assistant":
            role = "user" if item.role == "user" else "system"
            messages.append({"role": role, "content": text_of(item.content)})
        else:
            _add_to_turn(messages, item)
    return messages


def _add_to_turn(messages: list[Message], item: MessageItem | CallItem | ReasoningItem) -> None:
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if isinstance(item, CallItem):
        function = {"name": joined(item.namespace, item.name), "arguments": item.arguments}
        call = {"id": item.call_id, "type": "function", "function": function}
        if last is None:
            messages.append(last := {"role": "assistant", "content": ""})
        last.setdefault("tool_calls", []).append(call)
        return
    if isinstance(item, ReasoningItem):
        if item.text:
            messages.append({"role": "assistant", "content": "", "reasoning_content": item.text})
        return
    if last is not None and not last["content"] and "tool_calls" not in last:
        last["content"] = text_of(item.content)
    else:
        messages.append({"role": "assistant", "content": text_of(item.content)})
