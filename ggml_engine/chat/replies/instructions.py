"""Words for templates that have no place for tools: what tools there are and how to call them, calls and results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from ggml_engine.chat.tools import Tool


def instructions(format_name: str, tools: Sequence[Tool]) -> str:
    """What the model is told of its tools, in the markup that the format's parser reads."""
    functions = "\n".join(json.dumps(tool.as_mapping()["function"], ensure_ascii=False) for tool in tools)
    return (
        "You can call these functions. Each line is one of them, as JSON with the schema of its arguments:\n"
        f"<tools>\n{functions}\n</tools>\n"
        "To call one, write a JSON object with its name and its arguments between tags, and nothing after it:\n"
        f"{call_text(format_name, _EXAMPLE)}\n"
        "You get what it returns as the next message. Call a function only where it helps; otherwise just answer."
    )


_EXAMPLE: Final = {"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}
_HERMES: Final = ("<tool_call>", "</tool_call>", "arguments")
_MARKUP: Final = {"gemma": ("```tool_call", "```", "parameters")}


def call_text(format_name: str, function: Mapping[str, Any]) -> str:
    """A call that was made, as the instructions have it; arguments that are a text are written as they are."""
    begin, end, key = _MARKUP.get(format_name, _HERMES)
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f'{begin}\n{{"name": {json.dumps(function["name"], ensure_ascii=False)}, "{key}": {text}}}\n{end}'


def result_text(name: str, content: Any) -> str:
    """What a call returned."""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    head = f"<tool_response name={json.dumps(name, ensure_ascii=False)}>" if name else "<tool_response>"
    return f"{head}\n{text}\n</tool_response>"
