"""The requests of /v1/messages and /v1/messages/count_tokens, as Anthropic's clients make them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ggml_engine.chat.tools import ToolChoice
from ggml_engine.server.dialects.parts import MAX_TOOLS, FunctionName, MediaPart, TemplateFlags, check_tools
from ggml_engine.server.dialects.sampling import SamplingFields, StopField
from ggml_engine.server.errors import HttpProblem
from ggml_engine.server.jobs import ChatJob, Message
from ggml_engine.server.validation import Disabled, Many, NoEffect, Refused, RequestModel, invalid, only

CallId = Annotated[str, Field(min_length=1, max_length=256)]


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


class MessageFields(RequestModel):
    role: Literal["user", "assistant"]
    content: str | Many[Block]

    def messages(self) -> list[Message]:
        """Results of tools are messages of their own; a result stands before what the user says beside it."""
        if isinstance(self.content, str):
            return [{"role": self.role, "content": self.content}]
        if self.role == "assistant":
            return [self._assistant(self.content)]
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


def _blocks_of_roles(messages: list[MessageFields]) -> list[MessageFields]:
    allowed = {"user": (TextBlock, ToolResultBlock), "assistant": (TextBlock, ToolUseBlock, ThinkingBlock)}
    for number, message in enumerate(messages):
        for block in message.content if isinstance(message.content, list) else ():
            if not isinstance(block, allowed[message.role]):
                raise invalid(f"message {number}: a {block.type} block is not part of a message of {message.role}")
    return messages


class Tool(RequestModel):
    type: Annotated[Any, AfterValidator(only("custom"))] = None
    name: FunctionName
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None
    cache_control: NoEffect = None
    eager_input_streaming: NoEffect = None
    defer_loading: Disabled = None
    allowed_callers: Annotated[Any, AfterValidator(only(["direct"]))] = None
    input_examples: Refused = None

    def tool(self) -> dict[str, Any]:
        """The tool as chat templates know one."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": self.input_schema}}


class AutoChoice(RequestModel):
    type: Literal["auto", "any"]
    disable_parallel_tool_use: bool | None = None


class NoneChoice(RequestModel):
    type: Literal["none"]


class NamedChoice(RequestModel):
    type: Literal["tool"]
    name: FunctionName
    disable_parallel_tool_use: bool | None = None


class ThinkingEnabled(RequestModel):
    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=1)]
    display: Annotated[Any, AfterValidator(only("summarized"))] = None


class ThinkingAdaptive(RequestModel):
    type: Literal["adaptive"]
    display: Annotated[Any, AfterValidator(only("summarized"))] = None


class ThinkingDisabled(RequestModel):
    type: Literal["disabled"]


Thinking = Annotated[ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled, Field(discriminator="type")]


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    format: OutputFormat | None = None
    effort: Refused = None


class PromptFields(SamplingFields):
    """What a prompt is made of: all of a request for counting."""

    model: str | None = None
    messages: Annotated[Many[MessageFields], Field(min_length=1), AfterValidator(_blocks_of_roles)]
    system: str | Many[TextBlock] | None = None
    tools: Annotated[Many[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: Annotated[AutoChoice | NoneChoice | NamedChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    chat_template_kwargs: TemplateFlags = None
    cache_control: NoEffect = None
    speed: Annotated[Any, AfterValidator(only("standard"))] = None
    user_profile_id: Refused = None
    workspace_id: Refused = None

    def _job(self, session: str | None, **rest: Any) -> ChatJob:
        messages = [each for message in self.messages for each in message.messages()]
        opening = ""
        if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
            opening = messages.pop()["content"].rstrip()
        if not messages:
            raise HttpProblem(400, "invalid_value", "messages: there is none of the user", "messages")
        if self.system:
            messages.insert(0, {"role": "system", "content": _text(self.system)})
        wanted = self.output_config.format if self.output_config else None
        sampler = self.sampler(wanted.json_schema if wanted else None)
        choice = self._tool_choice()
        flags = dict(self.chat_template_kwargs or {})
        if self.thinking is not None:
            flags.setdefault("enable_thinking", not isinstance(self.thinking, ThinkingDisabled))
        return ChatJob(
            model=self.model,
            sampler=sampler,
            session=session,
            messages=tuple(messages),
            tools=check_tools([tool.tool() for tool in self.tools or []], choice, sampler, "output_config"),
            tool_choice=choice,
            parallel_tool_calls=not getattr(self.tool_choice, "disable_parallel_tool_use", False),
            variables=flags,
            opening=opening,
            schema_field="output_config",
            **rest,
        )

    def _tool_choice(self) -> ToolChoice:
        match self.tool_choice:
            case NamedChoice(name=name):
                return ToolChoice("required", name)
            case AutoChoice(type="any"):
                return ToolChoice("required")
            case NoneChoice():
                return ToolChoice("none")
        return ToolChoice()


class CountRequest(PromptFields):
    """What a client may ask the length of."""

    def job(self) -> ChatJob:
        """The prompt that is counted. Raises HttpProblem (400)."""
        return self._job(None)


class MessagesRequest(PromptFields):
    """What a client may say."""

    max_tokens: Annotated[int, Field(ge=1, le=2**31 - 1)]
    stop_sequences: StopField = None
    stream: bool | None = None

    metadata: NoEffect = None
    service_tier: Annotated[Any, AfterValidator(only("auto", "standard_only"))] = None
    container: Refused = None
    context_management: Refused = None
    diagnostics: Refused = None
    inference_geo: Refused = None
    mcp_servers: Refused = None

    def job(self, session: str | None) -> ChatJob:
        """What is asked for. Raises HttpProblem (400) where fields do not go together."""
        return self._job(
            session,
            max_tokens=self.max_tokens,
            stop=tuple(self.stop_sequences or ()),
            ignore_eos=bool(self.ignore_eos),
            stream=bool(self.stream),
            include_usage=True,
        )
