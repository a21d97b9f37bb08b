"""The requests of /v1/messages and /v1/messages/count_tokens, as Anthropic's clients make them."""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, Field

from ggml_engine.chat.tools import ToolChoice
from ggml_engine.server.dialects.anthropic_blocks import MessageFields, TextBlock, blocks_of_roles, system_text
from ggml_engine.server.dialects.anthropic_context import ContextManagement
from ggml_engine.server.dialects.parts import MAX_TOOLS, FunctionName, TemplateFlags, check_tools
from ggml_engine.server.dialects.sampling import SamplingFields, StopField
from ggml_engine.server.errors import HttpProblem
from ggml_engine.server.jobs import ChatJob
from ggml_engine.server.validation import Disabled, Many, NoEffect, Refused, RequestModel, only

_THINKING: Final = "enable_thinking"


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
    """The model may think, for so many tokens at most; one that cannot thinks for none."""

    type: Literal["enabled"]
    budget_tokens: Annotated[int, Field(ge=1)]
    display: Literal["summarized", "omitted"] | None = None


class ThinkingAdaptive(RequestModel):
    """The model thinks as it sees fit."""

    type: Literal["adaptive"]
    display: Literal["summarized", "omitted"] | None = None


class ThinkingDisabled(RequestModel):
    type: Literal["disabled"]


Thinking = Annotated[ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled, Field(discriminator="type")]


class OutputFormat(RequestModel):
    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestModel):
    format: OutputFormat | None = None
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = None


class PromptFields(SamplingFields):
    """What a prompt is made of: all of a request for counting."""

    model: str | None = None
    messages: Annotated[Many[MessageFields], Field(min_length=1), AfterValidator(blocks_of_roles)]
    system: str | Many[TextBlock] | None = None
    tools: Annotated[Many[Tool] | None, Field(max_length=MAX_TOOLS)] = None
    tool_choice: Annotated[AutoChoice | NoneChoice | NamedChoice, Field(discriminator="type")] | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    chat_template_kwargs: TemplateFlags = None
    cache_control: NoEffect = None
    speed: Annotated[Any, AfterValidator(only("standard"))] = None
    user_profile_id: Refused = None
    workspace_id: Refused = None

    def _job(self, session: str | None, **rest: Any) -> ChatJob:
        messages = [each for message in self.messages for each in message.messages()]
        if self.context_management:
            messages = self.context_management.applied(messages)
        opening = ""
        if messages[-1]["role"] == "assistant" and "tool_calls" not in messages[-1]:
            opening = messages.pop()["content"].rstrip()
        if not messages:
            raise HttpProblem(400, "invalid_value", "messages: there is none of the user", "messages")
        if self.system and (told := system_text(self.system)):
            messages.insert(0, {"role": "system", "content": told})
        wanted = self.output_config.format if self.output_config else None
        sampler = self.sampler(wanted.json_schema if wanted else None)
        choice = self._tool_choice()
        variables = dict(self.chat_template_kwargs or {})
        if isinstance(self.thinking, ThinkingDisabled):
            variables.setdefault(_THINKING, False)
        return ChatJob(
            model=self.model,
            sampler=sampler,
            session=session,
            cache_prompt=self.reads_cache,
            messages=tuple(messages),
            tools=check_tools([tool.tool() for tool in self.tools or []], choice, sampler, "output_config"),
            tool_choice=choice,
            parallel_tool_calls=not getattr(self.tool_choice, "disable_parallel_tool_use", False),
            variables=variables,
            hints=self._hints(),
            opening=opening,
            schema_field="output_config",
            **rest,
        )

    def _hints(self) -> dict[str, Any]:
        hints: dict[str, Any] = {}
        if isinstance(self.thinking, (ThinkingEnabled, ThinkingAdaptive)):
            hints[_THINKING] = True
        if self.output_config and self.output_config.effort:
            hints["reasoning_effort"] = self.output_config.effort
        return hints

    @property
    def shows_thinking(self) -> bool:
        """Whether the answer has the text of what the model thought."""
        return getattr(self.thinking, "display", None) != "omitted"

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
