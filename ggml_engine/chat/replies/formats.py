"""The formats: for each its marks, its parser and its grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ggml_engine.chat.tools import Tool

from .format import ToolFormat
from .hermes import CALL_BEGIN, CALL_END, HermesParser, Qwen3CoderParser
from .parser import ReplyParser


@dataclass(frozen=True, slots=True)
class HermesFormat(ToolFormat):
    """Hermes, Qwen and their like: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""

    name: ClassVar[str] = "hermes"
    marks: ClassVar[tuple[str, ...]] = (CALL_BEGIN, CALL_END)

    def _parser(self, tools: Sequence[Tool], reasoning: tuple[str, str] | None, is_open: bool) -> ReplyParser:
        return HermesParser([tool.name for tool in tools], reasoning=reasoning, is_open=is_open)


@dataclass(frozen=True, slots=True)
class Qwen3CoderFormat(HermesFormat):
    """Qwen3-Coder: `<tool_call><function=NAME><parameter=NAME>value</parameter>...</function></tool_call>`."""

    name: ClassVar[str] = "qwen3-coder"

    def _parser(self, tools: Sequence[Tool], reasoning: tuple[str, str] | None, is_open: bool) -> ReplyParser:
        schemas = {tool.name: tool.parameters for tool in tools}
        return Qwen3CoderParser(schemas, reasoning=reasoning, is_open=is_open)


@dataclass(frozen=True, slots=True)
class GenericFormat(HermesFormat):
    """Hermes' markup, asked for in the system message: for templates that have no place for tools."""

    renders_tools: bool = False
    name: ClassVar[str] = "generic"
