"""The formats of calls, some calls, and what tests of their grammars share."""

from __future__ import annotations

from typing import Any

from ggml_engine.chat.replies import detect_format

FORMATS = {
    "hermes": detect_format("<tool_call>"),
    "qwen3-coder": detect_format("<tool_call><function=<parameter="),
    "llama3": detect_format('<|start_header_id|> "parameters"'),
    "mistral": detect_format("[TOOL_CALLS]"),
    "mistral-args": detect_format("[TOOL_CALLS][ARGS]"),
    "mistral-ids": detect_format("[TOOL_CALLS][CALL_ID][ARGS]"),
    "gemma": detect_format("<start_of_turn>"),
    "gemma4": detect_format("<|tool_call><|channel>"),
    "functiongemma": detect_format("<start_of_turn><start_function_call>"),
    "gpt-oss": detect_format("<|channel|><|message|>"),
    "generic": detect_format(""),
}
PARIS = '{"city": "Paris"}'
WEATHER, NOW = ("get_weather", PARIS), ("now", "{}")
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS}}}\n</tool_call>'
CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'

# what ends a text in formats where no quote does
ENDS = {"qwen3-coder": "</parameter>", "gemma4": '<|"|>', "functiongemma": "<escape>"}


def followers(text: str, mark: str) -> set[str]:
    """What goes on with the mark, where the text ends in the middle of it."""
    return {mark[n] for n in range(1, len(mark)) if text.endswith(mark[:n])}


def tool(parameters: Any) -> list[dict[str, Any]]:
    return [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
