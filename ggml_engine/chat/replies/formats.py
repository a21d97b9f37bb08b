"""The formats: for each its marks, its parser and its grammar."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ggml_engine.chat.tools import Grammar, Tool

from . import gemma, gpt_oss, hermes, llama3, mistral
from .format import ReasoningMarks, ToolFormat
from .parser import ReplyParser, random_id


def _names(tools: Sequence[Tool]) -> list[str]:
    return [tool.name for tool in tools]


def _bare_calls(grammar: Grammar, tools: Sequence[Tool]) -> str:
    return grammar.json_calls(
        tools, lambda name: grammar.literal(f'{{"name": "{name}", "parameters": '), grammar.literal("}")
    )


@dataclass(frozen=True, slots=True)
class HermesFormat(ToolFormat):
    """Hermes, Qwen and their like: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""

    name: ClassVar[str] = "hermes"
    marks: ClassVar[tuple[str, ...]] = (hermes.CALL_BEGIN, hermes.CALL_END)

    def _parser(self, tools: Sequence[Tool], reasoning: ReasoningMarks | None, is_open: bool) -> ReplyParser:
        return hermes.HermesParser(_names(tools), reasoning=reasoning, is_open=is_open)

    def _calls(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        call = grammar.json_calls(
            tools,
            lambda name: grammar.literal(f'{hermes.CALL_BEGIN}\n{{"name": "{name}", "arguments": '),
            grammar.literal(f"}}\n{hermes.CALL_END}"),
        )
        return grammar.repeated(call, "\n", parallel)


@dataclass(frozen=True, slots=True)
class Qwen3CoderFormat(HermesFormat):
    """Qwen3-Coder: `<tool_call><function=NAME><parameter=NAME>value</parameter>...</function></tool_call>`."""

    name: ClassVar[str] = "qwen3-coder"

    def _parser(self, tools: Sequence[Tool], reasoning: ReasoningMarks | None, is_open: bool) -> ReplyParser:
        schemas = {tool.name: tool.parameters for tool in tools}
        return hermes.Qwen3CoderParser(schemas, reasoning=reasoning, is_open=is_open)

    def _calls(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        calls = [hermes.coder_rule(grammar, tool, f"tool-{index}") for index, tool in enumerate(tools)]
        return grammar.repeated(grammar.any_of("call", calls), "\n", parallel)


@dataclass(frozen=True, slots=True)
class GenericFormat(HermesFormat):
    """Hermes' markup, asked for in the system message: for templates that have no place for tools."""

    renders_tools: bool = False
    name: ClassVar[str] = "generic"


@dataclass(frozen=True, slots=True)
class Llama3Format(ToolFormat):
    """Llama 3.1 to 3.3: `{"name": ..., "parameters": {...}}` as the whole reply."""

    one_call_a_message: bool = True
    name: ClassVar[str] = "llama3"
    marks: ClassVar[tuple[str, ...]] = (llama3.PYTHON_TAG,)
    end_texts: ClassVar[tuple[str, ...]] = ("<|eom_id|>",)

    def _parser(self, tools: Sequence[Tool], reasoning: ReasoningMarks | None, is_open: bool) -> ReplyParser:
        return llama3.Llama3Parser(_names(tools), reasoning=reasoning, is_open=is_open)

    def _calls(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        return grammar.repeated(_bare_calls(grammar, tools), "; ", parallel)


@dataclass(frozen=True, slots=True)
class MistralFormat(ToolFormat):
    """Mistral: `[TOOL_CALLS][{...}]`; with `has_args` `[TOOL_CALLS]NAME[ARGS]{...}`, with `has_ids` an id between."""

    has_args: bool = False
    has_ids: bool = False
    name: ClassVar[str] = "mistral"
    marks: ClassVar[tuple[str, ...]] = (mistral.TOOL_CALLS, mistral.ARGS, mistral.CALL_ID)
    short_ids: ClassVar[bool] = True

    def _parser(self, tools: Sequence[Tool], reasoning: ReasoningMarks | None, is_open: bool) -> ReplyParser:
        return mistral.MistralParser(
            _names(tools), reasoning=reasoning, is_open=is_open, new_id=lambda: random_id("", 9)
        )

    def _calls(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        literal = grammar.literal
        identity = grammar.add("id", "[a-zA-Z0-9]{9}")
        if self.has_args:
            between = f"{literal(mistral.CALL_ID)} {identity} " if self.has_ids else ""
            call = grammar.json_calls(
                tools, lambda name: f"{literal(mistral.TOOL_CALLS + name)} {between}{literal(mistral.ARGS)}"
            )
            return grammar.repeated(call, "", parallel)
        begin, middle, end = literal(f"{mistral.TOOL_CALLS}["), literal(', "id": "'), literal('"}')
        call = grammar.json_calls(
            tools, lambda name: literal(f'{{"name": "{name}", "arguments": '), f"{middle} {identity} {end}"
        )
        return f"{begin} {grammar.repeated(call, ', ', parallel)} {literal(']')}"


@dataclass(frozen=True, slots=True)
class GemmaFormat(ToolFormat):
    """Gemma 2 and 3, whose templates have no place for tools: JSON, asked for in a fence, in the system message."""

    renders_tools: bool = False
    name: ClassVar[str] = "gemma"

    def _parser(self, tools: Sequence[Tool], reasoning: ReasoningMarks | None, is_open: bool) -> ReplyParser:
        return gemma.Gemma3Parser(_names(tools), reasoning=reasoning, is_open=is_open)

    def _calls(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        call = _bare_calls(grammar, tools)
        begin, end = grammar.literal("```tool_call\n"), grammar.literal("\n```")
        return f"{begin} {grammar.repeated(call, chr(10), parallel)} {end}"


@dataclass(frozen=True, slots=True)
class MarkedGemmaFormat(ToolFormat):
    """Gemma 4, or FunctionGemma: `call:NAME{key:value}` between control tokens.

    Its grammar holds the model to a call of a tool that was given; values are free, since they are no JSON.
    """

    call_marks: gemma.CallMarks = gemma.GEMMA4
    name: ClassVar[str] = "gemma4"
    end_texts: ClassVar[tuple[str, ...]] = ("<|tool_response>", "<start_function_response>")

    @property
    def visible_tokens(self) -> tuple[str, ...]:
        """The marks of calls, and of the channel of thoughts."""
        return (self.call_marks.begin, self.call_marks.end, self.call_marks.quote, "<|channel>", "<channel|>")

    def _parser(self, tools: Sequence[Tool], reasoning: ReasoningMarks | None, is_open: bool) -> ReplyParser:
        return gemma.MarkedGemmaParser(_names(tools), self.call_marks, reasoning=reasoning, is_open=is_open)

    def _calls(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        values = gemma.value_rules(grammar, self.call_marks)
        literal = grammar.literal
        calls = [
            f"{literal(f'{self.call_marks.begin}call:{tool.name}')} {values} {literal(self.call_marks.end)}"
            for tool in tools
        ]
        return grammar.repeated(grammar.any_of("call", calls), "", parallel)


@dataclass(frozen=True, slots=True)
class GptOssFormat(ToolFormat):
    """gpt-oss: messages with channels."""

    reasoning: ReasoningMarks | None = gpt_oss.ANALYSIS
    one_call_a_message: bool = True
    knows_developer: bool = True
    reasoning_key: str = "thinking"
    one_of_content_and_reasoning: bool = True
    name: ClassVar[str] = "gpt-oss"
    marks: ClassVar[tuple[str, ...]] = (
        *(gpt_oss.START, gpt_oss.CHANNEL, gpt_oss.CONSTRAIN, gpt_oss.MESSAGE, gpt_oss.END),
    )
    end_texts: ClassVar[tuple[str, ...]] = (gpt_oss.CALL, gpt_oss.RETURN)

    def _parser(self, tools: Sequence[Tool], reasoning: ReasoningMarks | None, is_open: bool) -> ReplyParser:  # noqa: ARG002
        return gpt_oss.GptOssParser(_names(tools), is_open=is_open)

    def _calls(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:  # noqa: ARG002 - one ends it
        head, tail = f"{gpt_oss.CHANNEL}commentary to={gpt_oss.FUNCTIONS}", f" {gpt_oss.CONSTRAIN}json{gpt_oss.MESSAGE}"
        return grammar.json_calls(tools, lambda name: grammar.literal(head + name + tail))

    def _thoughts(self, grammar: Grammar, marks: ReasoningMarks, is_open: bool) -> str:
        start = grammar.literal(f"{gpt_oss.START}assistant")
        rest = grammar.until("thought", marks[1])
        message = f"{grammar.literal(marks[0])} {rest} {start}"
        return f"{rest} {start} ({message})?" if is_open else f"({message})?"
