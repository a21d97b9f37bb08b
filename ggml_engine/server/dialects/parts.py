"""Parts of requests that dialects share: functions, formats of answers, effort, flags of templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from ggml_engine.chat.tools import ToolChoice
from ggml_engine.ggml.sampler_config import SamplerConfig
from ggml_engine.server.errors import HttpProblem
from ggml_engine.server.validation import NoEffect, RequestModel, invalid, unsupported

MAX_TOOLS: Final = 128
ANY_OBJECT: Final[dict[str, Any]] = {"type": "object"}
FunctionName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
CallId = Annotated[str, Field(min_length=1, max_length=256)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MAX_VARIABLES: Final = 16
MAX_VARIABLE_CHARS: Final = 1024
MAX_VARIABLE: Final = 2**53


class MediaPart(RequestModel):
    """A picture, a sound or a file: refused, whatever it holds, and never fetched."""

    model_config = ConfigDict(extra="allow")

    type: Literal["image_url", "input_image", "image", "input_audio", "video_url", "file", "input_file", "document"]

    @model_validator(mode="after")
    def _refuse(self) -> MediaPart:
        raise unsupported(f"of type {self.type!r} is not supported by this server, which takes text alone")

    @property
    def said(self) -> str:
        """No text."""
        return ""


class RefusalPart(RequestModel):
    """What an assistant refused with: it is text as any."""

    type: Literal["refusal"]
    refusal: str

    @property
    def said(self) -> str:
        """The text."""
        return self.refusal


class TextFields(RequestModel):
    """A part of text; which types say that it is one, a dialect's own class has."""

    text: str
    prompt_cache_breakpoint: NoEffect = None

    @property
    def said(self) -> str:
        """The text."""
        return self.text


def text_of(content: str | Sequence[TextFields | RefusalPart | MediaPart] | None) -> str:
    """The text of a message; parts are lines of it."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.said for part in content)


class FunctionFields(RequestModel):
    """A function that the model may call. `strict` is obeyed wherever the call is forced (docs/server-api.md)."""

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    def tool(self) -> dict[str, Any]:
        """The function as chat templates know one."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        function["parameters"] = self.parameters or {"type": "object", "properties": {}}
        return {"type": "function", "function": function}


class JsonSchemaFields(RequestModel):
    """A schema for the whole answer; it is always obeyed strictly."""

    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None

    def wanted(self) -> dict[str, Any]:
        """The schema, or that of any object."""
        return ANY_OBJECT if self.json_schema is None else self.json_schema


def _flags(value: dict[str, Any] | None) -> dict[str, Any]:
    """Variables for the model's own template: plain values. Which names it reads is checked where it is at hand."""
    flags = {name: flag for name, flag in (value or {}).items() if flag is not None}
    if len(flags) > MAX_VARIABLES:
        raise invalid(f"at most {MAX_VARIABLES} variables are possible, {len(flags)} were given")
    for name, flag in flags.items():
        if name == "enable_thinking" and not isinstance(flag, bool):
            raise invalid("enable_thinking must be true or false")
        if isinstance(flag, str):
            if len(flag) > MAX_VARIABLE_CHARS:
                raise invalid(f"a text has at most {MAX_VARIABLE_CHARS} characters, that of {name!r:.60} {len(flag)}")
        elif not isinstance(flag, (bool, int, float)):
            raise unsupported(f"has {name!r:.60}, which is no text, number or truth value: no other is supported")
        elif not -MAX_VARIABLE <= flag <= MAX_VARIABLE:  # nan, too
            raise invalid(f"the number of {name!r:.60} must be within 2^53 of 0")
    return flags


_KINDS: Final = {list: "list", dict: "mapping"}
TemplateFlags = Annotated[dict[str, Any] | None, AfterValidator(_flags)]


def check_tools(
    tools: list[dict[str, Any]], choice: ToolChoice, sampler: SamplerConfig, format_field: str
) -> tuple[dict[str, Any], ...]:
    """The tools, where they, the choice among them and the sampler's grammar go together. Raises HttpProblem (400)."""
    names = [tool["function"]["name"] for tool in tools]
    if len(set(names)) != len(names):
        raise HttpProblem(400, "invalid_value", "tools: two have the same name", "tools")
    if choice.mode == "required" and not tools:
        raise HttpProblem(400, "invalid_value", "tool_choice asks for a call, and there are no tools", "tool_choice")
    if choice.name is not None and choice.name not in names:
        raise HttpProblem(
            400, "invalid_value", f"tool_choice names {choice.name!r:.80}, which is none of the tools", "tool_choice"
        )
    if tools and choice.mode != "none":
        for field, value in (("grammar", sampler.grammar), (format_field, sampler.json_schema)):
            if value is not None:
                raise HttpProblem(
                    400,
                    "unsupported_parameter",
                    f"{field} beside tools is not supported by this server: a grammar holds for the whole answer",
                    field,
                )
    return tuple(tools)


def thinking_of(effort: str | None, flags: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Variables and hints for a chat template, of an effort and of flags; "none" turns thinking off."""
    if effort is None:
        return dict(flags), {}
    if effort == "none":
        return {**flags, "enable_thinking": False}, {}
    return dict(flags), {"reasoning_effort": effort, "enable_thinking": True}
