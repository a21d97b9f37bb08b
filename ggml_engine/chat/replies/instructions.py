"""Words for templates that have no place for tools: what tools there are and how to call them, calls and results."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from ggml_engine.chat.tools import Tool


def instructions(format_name: str, tools: Sequence[Tool]) -> str:
    """What the model is told of its tools, in the markup that the format's parser reads."""
    functions = "\n".join(json.dumps(tool.as_mapping()["function"], ensure_ascii=False) for tool in tools)
    return (
        "You can call these functions. Each line is one of them, as JSON with the schema of its arguments:\n"
        f"<tools>\n{functions}\n</tools>\n"
        "To call one, write a JSON object with its name and its arguments between tags, and nothing after it:\n"
        f"{_EXAMPLES.get(format_name, _HERMES)}\n"
        "You get what it returns as the next message. Call a function only where it helps; otherwise just answer."
    )


_HERMES = '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>'
_EXAMPLES = {"gemma": '```tool_call\n{"name": "NAME", "parameters": {"ARGUMENT": "VALUE"}}\n```'}


def call_text(function: Mapping[str, Any]) -> str:
    """A call that was made, as the instructions have it."""
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def result_text(name: str, content: Any) -> str:
    """What a call returned."""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    head = f"<tool_response name={json.dumps(name, ensure_ascii=False)}>" if name else "<tool_response>"
    return f"{head}\n{text}\n</tool_response>"
