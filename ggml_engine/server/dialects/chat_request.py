"""The request of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from ggml_engine.chat.tools import ToolChoice
from ggml_engine.server.dialects.parts import (
    ANY_OBJECT,
    MAX_TOOLS,
    CallId,
    Effort,
    FunctionFields,
    FunctionName,
    JsonSchemaFields,
    MediaPart,
    RefusalPart,
    TemplateFlags,
    TextFields,
    check_tools,
    text_of,
    thinking_of,
)
from ggml_engine.server.dialects.sampling import ChoicesField, OpenCountField, SamplingFields, StopField
from ggml_engine.server.errors import HttpProblem
from ggml_engine.server.jobs import MAX_TOP_LOGPROBS, ChatJob, Message
from ggml_engine.server.validation import Disabled, Many, NoEffect, Refused, RequestModel, only


class TextPart(TextFields):
    type: Literal["text"]


Part = Annotated[TextPart | RefusalPart | MediaPart, Field(discriminator="type")]
Content = str | Many[Part]


class SystemMessage(RequestModel):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None

    def message(self) -> Message:
        return _named({"role": "system", "content": text_of(self.content)}, self.name)


class UserMessage(RequestModel):
    role: Literal["user"]
    content: Content
    name: str | None = None

    def message(self) -> Message:
        return _named({"role": "user", "content": text_of(self.content)}, self.name)


class CalledFunction(RequestModel):
    name: FunctionName
    arguments: str


class ToolCall(RequestModel):
    id: CallId
    type: Literal["function"] = "function"
    function: CalledFunction
    index: NoEffect = None


class AssistantMessage(RequestModel):
    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    annotations: NoEffect = None
    audio: Refused = None
    function_call: Refused = None

    def message(self) -> Message:
        message: Message = {"role": "assistant", "content": text_of(self.content) or self.refusal or ""}
        if self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": call.function.arguments},
                }
                for call in self.tool_calls
            ]
        return _named(message, self.name)


class ToolMessage(RequestModel):
    role: Literal["tool"]
    content: Content
    tool_call_id: CallId
    name: str | None = None

    def message(self) -> Message:
        found: Message = {"role": "tool", "content": text_of(self.content), "tool_call_id": self.tool_call_id}
        return _named(found, self.name)


def _named(message: Message, name: str | None) -> Message:
    return message if name is None else {**message, "name": name}


AnyMessage = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class Tool(RequestModel):
    type: Annotated[Any, AfterValidator(only("function"))]
    function: FunctionFields


class NamedFunction(RequestModel):
    name: FunctionName


class NamedTool(RequestModel):
    type: Literal["function"]
    function: NamedFunction


class StreamOptions(RequestModel):
    include_usage: bool | None = None
    include_obfuscation: Disabled = None


class TextFormat(RequestModel):
    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """Any object, or as llama.cpp and llama-cpp-python have it, what a schema beside the type says."""

    type: Literal["json_object"]
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")


class JsonSchemaFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: JsonSchemaFields


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]
_FORMAT_FIELD: Final = "response_format"


def schema_of(wanted: TextFormat | JsonObjectFormat | JsonSchemaFormat | None) -> dict[str, Any] | None:
    """The schema that the answer has to have; None for any text."""
    if isinstance(wanted, JsonObjectFormat):
        return ANY_OBJECT if wanted.json_schema is None else wanted.json_schema
    return wanted.json_schema.wanted() if isinstance(wanted, JsonSchemaFormat) else None


class Prediction(RequestModel):
    type: Literal["content"]
    content: Content


class ChatRequest(SamplingFields):
    """What a client may say. `max_completion_tokens` and `max_tokens` are the same; one of them is to be given."""

    model: str | None = None
    messages: Annotated[Many[AnyMessage], Field(min_length=1)]
    max_tokens: OpenCountField = None
    max_completion_tokens: OpenCountField = None
    stop: StopField = None
    n: ChoicesField = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    response_format: ResponseFormat | None = None
    tools: Annotated[Many[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: TemplateFlags = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None
    return_progress: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    user: NoEffect = None
    metadata: NoEffect = None
    safety_identifier: NoEffect = None
    prompt_cache_key: NoEffect = None
    prompt_cache_retention: NoEffect = None
    prompt_cache_options: NoEffect = None
    prediction: Prediction | None = None  # of what the answer may be: it could only make it sooner
    reasoning_format: Annotated[Any, AfterValidator(only("auto", "deepseek"))] = None
    parse_tool_calls: Annotated[Any, AfterValidator(only(True))] = None
    store: Disabled = None
    service_tier: Annotated[Any, AfterValidator(only("auto", "default"))] = None
    modalities: Annotated[Any, AfterValidator(only(["text"]))] = None
    verbosity: Annotated[Any, AfterValidator(only("medium"))] = None
    audio: Refused = None
    moderation: Refused = None
    web_search_options: Refused = None
    functions: Refused = None
    function_call: Refused = None
    chat_template: Refused = None

    def job(self, session: str | None) -> ChatJob:
        """What is asked for. Raises HttpProblem (400) where fields do not go together."""
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise HttpProblem(400, "invalid_value", "max_tokens and max_completion_tokens differ", "max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise HttpProblem(400, "invalid_value", "top_logprobs needs logprobs to be true", "top_logprobs")
        check_stream_options(self.stream, self.stream_options)
        messages, opening = self._messages()
        variables, hints = thinking_of(self.reasoning_effort, self.chat_template_kwargs or {})
        choice = self._tool_choice()
        sampler = self.sampler(schema_of(self.response_format))
        tools = [{**tool.function.tool()} for tool in self.tools or []]
        return ChatJob(
            model=self.model,
            sampler=sampler,
            max_tokens=self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            stop=tuple(self.stop or ()),
            ignore_eos=bool(self.ignore_eos),
            n=self.n or 1,
            logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            session=session,
            cache_prompt=self.reads_cache,
            stream=bool(self.stream),
            include_usage=bool(self.stream_options and self.stream_options.include_usage),
            messages=messages,
            tools=check_tools(tools, choice, sampler, _FORMAT_FIELD),
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            variables=variables,
            hints=hints,
            opening=opening,
            shows_progress=bool(self.return_progress),
        )

    def _messages(self) -> tuple[tuple[Message, ...], str]:
        """The messages, and what the answer begins with: the last of them, where it is to be continued."""
        messages = [each.message() for each in self.messages]
        if not self.continue_final_message:
            if self.add_generation_prompt is False:
                raise _unfit("add_generation_prompt", "of false needs continue_final_message", "unsupported_parameter")
            return tuple(messages), ""
        if self.add_generation_prompt:
            raise _unfit("continue_final_message", "does not go with add_generation_prompt")
        last = messages.pop()
        if last["role"] != "assistant" or not messages:
            raise _unfit("continue_final_message", "needs a last message of the assistant, after others")
        if {"tool_calls", "reasoning_content"} & last.keys():
            raise _unfit("continue_final_message", "continues a text, not calls or reasoning", "unsupported_parameter")
        return tuple(messages), last["content"]

    def _tool_choice(self) -> ToolChoice:
        if isinstance(self.tool_choice, NamedTool):
            return ToolChoice("required", self.tool_choice.function.name)
        return ToolChoice(self.tool_choice or "auto")


def _unfit(param: str, why: str, code: str = "invalid_value") -> HttpProblem:
    return HttpProblem(400, code, f"{param} {why}", param)


def check_stream_options(stream: bool | None, options: StreamOptions | None) -> None:
    """Options of a stream need one. Raises HttpProblem (400)."""
    if options is not None and not stream:
        raise HttpProblem(400, "invalid_value", "stream_options needs stream to be true", "stream_options")
