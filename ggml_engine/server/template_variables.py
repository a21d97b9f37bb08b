"""What a chat template is told beside messages and tools: variables that it has to read, and hints that it may.

A request brings plain values alone, and names of its own: what the server itself gives a template cannot be replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from ggml_engine.chat.replies import ToolFormat
from ggml_engine.chat.template import ChatTemplate
from ggml_engine.server.errors import HttpProblem

OWN: Final = frozenset(
    {
        *("messages", "tools", "tool_choice", "documents", "response_format", "bos_token", "eos_token"),
        *("add_generation_prompt", "continue_final_message"),
    }
)
_THINKING: Final = "enable_thinking"
_EFFORT: Final = "reasoning_effort"
_NEAREST: Final = {"minimal": "low", "xhigh": "high", "max": "high"}
_MAX_NAMED: Final = 12


def told_variables(
    template: ChatTemplate, reply_format: ToolFormat, variables: Mapping[str, Any], hints: Mapping[str, Any]
) -> dict[str, Any]:
    """The variables to render with: all of `variables`, and those of `hints` that the template reads.

    Raises HttpProblem (400) for a variable that it does not read, unless that asks for what is done anyway, and
    ChatTemplateError.
    """
    if not variables and not hints:
        return {}
    readable = template.variables - OWN
    for name, value in variables.items():
        if name not in readable and not (name == _THINKING and value == _thinks_anyway(template.source, reply_format)):
            raise HttpProblem(
                400,
                "unsupported_parameter",
                f"{name} of {value!r:.60} is not supported by this model: its chat template reads {_listed(readable)}",
                name,
            )
    told = dict(variables)
    for name, value in hints.items():
        if name in readable:
            told.setdefault(name, _known(template.source, value) if name == _EFFORT else value)
    return told


def _thinks_anyway(source: str, reply_format: ToolFormat) -> bool:
    return reply_format.reasoning is not None and reply_format.reasoning[0] in source


def _known(source: str, effort: str) -> str:
    """The effort, or the nearest of low, medium and high where the template does not name it."""
    is_named = any(f"{quote}{effort}{quote}" in source for quote in "'\"")
    return effort if is_named else _NEAREST.get(effort, effort)


def _listed(names: frozenset[str]) -> str:
    if not names:
        return "no variables"
    listed = sorted(names)
    return ", ".join(listed[:_MAX_NAMED]) + (" and others" if len(listed) > _MAX_NAMED else "")
