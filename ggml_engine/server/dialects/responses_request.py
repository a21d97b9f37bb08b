"""The request of /v1/responses."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from ggml_engine.chat.tools import ToolChoice
from ggml_engine.server.dialects.parts import (
    ANY_OBJECT,
    MAX_TOOLS,
    Effort,
    FunctionName,
    JsonSchemaFields,
    TemplateFlags,
    check_tools,
    thinking_of,
)
from ggml_engine.server.dialects.responses_items import Item, messages_of
from ggml_engine.server.dialects.responses_tools import Tool, echoed_tool, functions_of
from ggml_engine.server.dialects.sampling import CountField, SamplingFields, StopField
from ggml_engine.server.errors import HttpProblem
from ggml_engine.server.jobs import MAX_TOP_LOGPROBS, ChatJob, Message
from ggml_engine.server.validation import Disabled, Many, NoEffect, Refused, RequestModel, only, unsupported

LOGPROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"


class NamedTool(RequestModel):
    type: Literal["function"]
    name: FunctionName


class TextFormat(RequestModel):
    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    type: Literal["json_object"]


class JsonSchemaFormat(JsonSchemaFields):
    type: Literal["json_schema"]


class TextConfig(RequestModel):
    format: Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Annotated[Any, AfterValidator(only("medium"))] = None


class Reasoning(RequestModel):
    effort: Effort | None = None
    summary: Annotated[Any, AfterValidator(only("auto"))] = None
    generate_summary: Refused = None
    context: Annotated[Any, AfterValidator(only("auto"))] = None
    mode: Annotated[Any, AfterValidator(only("standard"))] = None


class StreamOptions(RequestModel):
    include_obfuscation: Disabled = None


def _includes(value: list[str] | None) -> list[str]:
    for each in value or []:
        if each not in (LOGPROBS, SEALED_REASONING):
            wanted = f"{LOGPROBS!r} and {SEALED_REASONING!r}"
            raise unsupported(f"of {each!r:.80} is not supported by this server, only {wanted}")
    return value or []


class ResponseRequest(SamplingFields):
    """What a client may say."""

    model: str | None = None
    input: str | Many[Item]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    max_output_tokens: CountField = None
    stop: StopField = None
    include: Annotated[Many[str] | None, AfterValidator(_includes)] = None
    top_logprobs: Annotated[int | None, Field(ge=0, le=MAX_TOP_LOGPROBS)] = None
    text: TextConfig | None = None
    tools: Annotated[Many[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    chat_template_kwargs: TemplateFlags = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] | None = None

    client_metadata: NoEffect = None
    user: NoEffect = None
    safety_identifier: NoEffect = None
    prompt_cache_key: NoEffect = None
    prompt_cache_retention: NoEffect = None
    prompt_cache_options: NoEffect = None
    service_tier: Annotated[Any, AfterValidator(only("auto", "default"))] = None
    truncation: Annotated[Any, AfterValidator(only("disabled"))] = None
    background: Disabled = None
    background_options: Refused = None
    access_programs: Refused = None
    context_management: Refused = None
    conversation: Refused = None
    image: Refused = None
    max_tool_calls: Refused = None
    moderation: Refused = None
    prompt: Refused = None
    chat_template: Refused = None

    def job(self, session: str | None, earlier: tuple[Message, ...] = ()) -> ChatJob:
        """What is asked for, after the messages of an earlier response. Raises HttpProblem (400)."""
        if isinstance(self.input, list) and not self.input:
            raise HttpProblem(400, "invalid_value", "input: the list is empty", "input")
        choice = ToolChoice(self.tool_choice or "auto") if not isinstance(self.tool_choice, NamedTool) else None
        choice = choice or ToolChoice("required", getattr(self.tool_choice, "name", None))
        sampler = self.sampler(self._schema())
        tools = functions_of(self.tools or [])
        system: list[Message] = [{"role": "system", "content": self.instructions}] if self.instructions else []
        effort = self.reasoning.effort if self.reasoning else None
        variables, hints = thinking_of(effort, self.chat_template_kwargs or {})
        asks_logprobs = LOGPROBS in (self.include or ()) or self.top_logprobs is not None
        return ChatJob(
            model=self.model,
            sampler=sampler,
            max_tokens=self.max_output_tokens,
            stop=tuple(self.stop or ()),
            ignore_eos=bool(self.ignore_eos),
            logprobs=(self.top_logprobs or 0) if asks_logprobs else None,
            session=session,
            cache_prompt=self.reads_cache,
            stream=bool(self.stream),
            include_usage=True,
            schema_field="text",
            messages=(*system, *earlier, *self.messages()),
            tools=check_tools(tools, choice, sampler, "text"),
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls is not False,
            variables=variables,
            hints=hints,
        )

    @property
    def seals_reasoning(self) -> bool:
        """Whether items of reasoning are to come with what a client without a memory sends back."""
        return SEALED_REASONING in (self.include or ())

    def messages(self) -> list[Message]:
        """The input as messages, without the instructions, which hold for one response alone."""
        return messages_of(self.input)

    def _schema(self) -> dict[str, Any] | None:
        wanted = self.text.format if self.text else None
        if isinstance(wanted, JsonObjectFormat):
            return ANY_OBJECT
        return wanted.wanted() if isinstance(wanted, JsonSchemaFormat) else None

    def echoed(self) -> dict[str, Any]:
        """The fields of the request that a response repeats, as the API has them."""
        wanted = self.text.format if self.text else None
        text_format: dict[str, Any] = {"type": "text"}
        if wanted is not None:
            text_format = json.loads(wanted.model_dump_json(by_alias=True, exclude_none=True))
        if isinstance(wanted, JsonSchemaFormat):
            text_format.setdefault("name", "answer")
        choice = self.tool_choice
        return {
            "instructions": self.instructions,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata or {},
            "parallel_tool_calls": self.parallel_tool_calls is not False,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": self.reasoning.effort if self.reasoning else None, "summary": None},
            "store": self.store is not False,
            "temperature": self.temperature,
            "text": {"format": text_format},
            "tool_choice": choice.model_dump() if isinstance(choice, NamedTool) else choice or "auto",
            "tools": [echoed_tool(tool) for tool in self.tools or []],
            "top_logprobs": self.top_logprobs,
            "top_p": self.top_p,
            "truncation": "disabled",
        }
