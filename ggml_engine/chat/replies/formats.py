"""The formats: for each its marks, its parser and its grammar."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from ggml_engine.chat.tools import Grammar, Tool
from ggml_engine.ggml.lazy_grammar import Trigger

from . import gemma, gemma_grammar, gpt_oss, hermes, llama3, mistral
from .format import ReasoningMarks, ToolFormat
from .parser import ReplyParser, random_id


def _names(tools: Sequence[Tool]) -> list[str]:
    return [tool.name for tool in tools]


_COLON: Final = '": '


def _bare_calls(grammar: Grammar, tools: Sequence[Tool]) -> str:
    return grammar.json_calls(
        tools, lambda name: grammar.literal(f'{{"name": "{name}", "parameters": '), grammar.literal("}")
    )


def _named_calls(
    grammar: Grammar, tools: Sequence[Tool], kind: str, rest: str, begin: tuple[str, ...] = ()
) -> Iterator[Trigger]:
    """Bare JSON is a call where it names a tool: that begins it. `_bare_calls` has made the rules of arguments."""
    middle = rf'" "? ", \"" ("parameters" | "arguments") {grammar.literal(_COLON)}'
    for index, tool in enumerate(tools):
        rule = grammar.add(f"{kind}-{index}", f"{middle} tool-{index} {grammar.literal('}')} {rest}")
        name = ('"name"', ":", f'"{tool.name}"')
        for before in (("{",), ("{", '"type"', ":", '"function"', ",")):
            yield Trigger((*begin, *before, *name), rule, at_start=not begin)


@dataclass(frozen=True, slots=True)
class HermesFormat(ToolFormat):
    """Hermes, Qwen and their like: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`."""

    name: ClassVar[str] = "hermes"
    marks: ClassVar[tuple[str, ...]] = (hermes.CALL_BEGIN, hermes.CALL_END)

    def _parser(self, tools: Sequence[Tool], reasoning: ReasoningMarks | None, is_open: bool) -> ReplyParser:
        return hermes.HermesParser(_names(tools), reasoning=reasoning, is_open=is_open)

    def _calls(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        return grammar.repeated(f"{grammar.literal(hermes.CALL_BEGIN)} {self._inside(grammar, tools)}", "\n", parallel)

    def _triggers(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> Sequence[Trigger]:
        rest = grammar.repeated_after(self._inside(grammar, tools), "\n", hermes.CALL_BEGIN, parallel)
        return [Trigger((hermes.CALL_BEGIN,), grammar.add("rest", rest))]

    def _inside(self, grammar: Grammar, tools: Sequence[Tool]) -> str:
        """The rule of what stands behind the opening tag, with the closing one."""
        return grammar.json_calls(
            tools,
            lambda name: r'"\n"? ' + grammar.literal(f'{{"name": "{name}", "arguments": '),
            grammar.literal(f"}}\n{hermes.CALL_END}"),
        )


@dataclass(frozen=True, slots=True)
class Qwen3CoderFormat(HermesFormat):
    """Qwen3-Coder: `<tool_call><function=NAME><parameter=NAME>value</parameter>...</function></tool_call>`."""

    name: ClassVar[str] = "qwen3-coder"

    def _parser(self, tools: Sequence[Tool], reasoning: ReasoningMarks | None, is_open: bool) -> ReplyParser:
        schemas = {tool.name: tool.parameters for tool in tools}
        return hermes.Qwen3CoderParser(schemas, reasoning=reasoning, is_open=is_open)

    def _triggers(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> Sequence[Trigger]:
        found = list(super(Qwen3CoderFormat, self)._triggers(grammar, tools, parallel))
        rest = grammar.repeated_after("function", "\n", f"{hermes.CALL_BEGIN}\n{hermes.FUNCTION}", parallel)
        return [*found, Trigger((hermes.FUNCTION,), grammar.add("rest-of-function", rest))]

    def _inside(self, grammar: Grammar, tools: Sequence[Tool]) -> str:
        calls = [hermes.coder_rule(grammar, tool, f"tool-{index}") for index, tool in enumerate(tools)]
        grammar.any_of("function", calls)
        return grammar.add("call", rf'"\n"? {grammar.literal(hermes.FUNCTION)} function')

    def _arguments_rule(self, grammar: Grammar, tool: Tool) -> object:
        return hermes.coder_rule(grammar, tool, "arguments")

    def _any_parameters(self, tool: Tool) -> Mapping[str, Any]:
        return {"type": "object", "properties": {key: {"type": "string"} for key in hermes.coder_keys(tool)}}


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

    def _triggers(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> Sequence[Trigger]:
        call = _bare_calls(grammar, tools)
        more = f"({grammar.literal('; ')} {call})*" if parallel else ""
        tagged = Trigger((llama3.PYTHON_TAG,), grammar.add("tagged", f"{call} {more}"))
        return [tagged, *_named_calls(grammar, tools, "bare", more)]


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
        return f"{grammar.literal(mistral.TOOL_CALLS)} {self._rest(grammar, tools, parallel)}"

    def _triggers(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> Sequence[Trigger]:
        return [Trigger((mistral.TOOL_CALLS,), grammar.add("rest", f'" "? {self._rest(grammar, tools, parallel)}'))]

    def _rest(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        """The expression of what stands behind the mark."""
        literal = grammar.literal
        identity = grammar.add("id", "[a-zA-Z0-9]{9}")
        if self.has_args:
            between = f"{literal(mistral.CALL_ID)} {identity} " if self.has_ids else ""
            call = grammar.json_calls(tools, lambda name: f"{literal(name)} {between}{literal(mistral.ARGS)}")
            return grammar.repeated_after(call, "", mistral.TOOL_CALLS, parallel)
        middle, end = literal(', "id": "'), literal('"}')
        call = grammar.json_calls(
            tools, lambda name: literal(f'{{"name": "{name}", "arguments": '), f"{middle} {identity} {end}"
        )
        return f"{literal('[')} {grammar.repeated(call, ', ', parallel)} {literal(']')}"


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

    def _triggers(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> Sequence[Trigger]:
        call = _bare_calls(grammar, tools)
        more, end = (rf'("\n" {call})*' if parallel else ""), grammar.literal("\n```")
        fenced = grammar.add("fenced", rf'"\n" {call} {more} {end}')
        grammar.add("fence-end", f"{more} {end}")
        return [
            *(Trigger((fence,), fenced) for fence in gemma.FENCES if fence != gemma.JSON_FENCE),
            *_named_calls(grammar, tools, "named", "fence-end", (gemma.JSON_FENCE,)),
            *_named_calls(grammar, tools, "bare", ""),
        ]


@dataclass(frozen=True, slots=True)
class MarkedGemmaFormat(ToolFormat):
    """Gemma 4, or FunctionGemma: `call:NAME{key:value}` between control tokens."""

    call_marks: gemma.CallMarks = gemma.GEMMA4
    _thinks_anywhere: ClassVar[bool] = True
    name: ClassVar[str] = "gemma4"
    end_texts: ClassVar[tuple[str, ...]] = ("<|tool_response>", "<start_function_response>")

    @property
    def visible_tokens(self) -> tuple[str, ...]:
        """The marks of calls, and of the channel of thoughts."""
        return (self.call_marks.begin, self.call_marks.end, self.call_marks.quote, "<|channel>", "<channel|>")

    def _parser(self, tools: Sequence[Tool], reasoning: ReasoningMarks | None, is_open: bool) -> ReplyParser:
        return gemma.MarkedGemmaParser(_names(tools), self.call_marks, reasoning=reasoning, is_open=is_open)

    def _calls(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        return f"{grammar.literal(self.call_marks.begin)} {self._rest(grammar, tools, parallel)}"

    def _triggers(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> Sequence[Trigger]:
        return [Trigger((self.call_marks.begin,), grammar.add("rest", self._rest(grammar, tools, parallel)))]

    def _rest(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        """The expression of what stands behind the mark of a call."""
        end = grammar.literal(self.call_marks.end)
        calls = []
        for index, tool in enumerate(tools):
            arguments = gemma_grammar.arguments_rule(grammar, tool, f"tool-{index}", self.call_marks)
            calls.append(f"{grammar.literal('call:' + tool.name)} {arguments} {end}")
        return grammar.repeated_after(grammar.any_of("call", calls), "", self.call_marks.begin, parallel)

    def _arguments_rule(self, grammar: Grammar, tool: Tool) -> object:
        return gemma_grammar.arguments_rule(grammar, tool, "arguments", self.call_marks)


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
    _hides_calls: ClassVar[bool] = False

    def _parser(self, tools: Sequence[Tool], reasoning: ReasoningMarks | None, is_open: bool) -> ReplyParser:  # noqa: ARG002
        return gpt_oss.GptOssParser(_names(tools), is_open=is_open)

    def _calls(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:  # noqa: ARG002 - one ends it
        head, tail = f"{gpt_oss.CHANNEL}commentary to={gpt_oss.FUNCTIONS}", f" {gpt_oss.CONSTRAIN}json{gpt_oss.MESSAGE}"
        return grammar.json_calls(tools, lambda name: grammar.literal(head + name + tail))

    def _triggers(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> Sequence[Trigger]:  # noqa: ARG002
        rule = gpt_oss.header_rule(grammar, tools)
        return [Trigger(words, rule, at_start) for words, at_start in gpt_oss.HEADERS]

    def _thoughts(self, grammar: Grammar, marks: ReasoningMarks, is_open: bool) -> str:
        start = grammar.literal(f"{gpt_oss.START}assistant")
        rest = grammar.until("thought", marks[1])
        message = f"{grammar.literal(marks[0])} {rest} {start}"
        return f"{rest} {start} ({message})?" if is_open else f"({message})?"
