"""`ToolChoice`: whether the model may, must or must not call a tool, and which."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ggml_engine.errors import InputError

from .tool import Tool

MODES = ("auto", "none", "required")


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """`auto`: the model decides; `none`: it is not told of tools; `required`: it calls one, or `name` if given."""

    mode: Literal["auto", "none", "required"] = "auto"
    name: str | None = None

    @property
    def is_forced(self) -> bool:
        """Whether a grammar has to hold the model to a call."""
        return self.mode == "required"

    def allowed(self, tools: Sequence[Tool]) -> tuple[Tool, ...]:
        """The tools that may be called."""
        if self.mode == "none":
            return ()
        return tuple(tool for tool in tools if self.name in (None, tool.name))


def read_tool_choice(choice: ToolChoice | str | Mapping[str, Any] | None, tools: Sequence[Tool]) -> ToolChoice:
    """The choice as OpenAI's API spells it: a mode, or `{"type": "function", "function": {"name": NAME}}`.

    The name of a tool alone is one, too; None is `auto`. Raises InputError for a tool that is not among the tools, and
    for a call that is required where there are none.
    """
    if choice is None:
        return ToolChoice()
    if isinstance(choice, ToolChoice):
        read = choice
    elif isinstance(choice, str):
        read = ToolChoice(choice) if choice in MODES else ToolChoice("required", choice)  # type: ignore[arg-type]
    else:
        function = choice.get("function") if isinstance(choice, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str):
            raise InputError(f"tool_choice must be {', '.join(MODES)} or a function, not {choice!r:.80}")
        read = ToolChoice("required", name)
    if read.is_forced and not read.allowed(tools):
        known = ", ".join(tool.name for tool in tools) or "none"
        raise InputError(f"tool_choice asks for {read.name or 'a call'!r}, the tools are: {known}"[:400])
    return read
