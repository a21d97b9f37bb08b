"""`ToolFormat`: what one family of models writes around calls and reasoning, and how its template takes them.

Values only; the parsers and grammars are in the files of the formats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ggml_engine.chat.tools import Grammar, Tool, ToolChoice, read_tool_choice, read_tools
from ggml_engine.errors import InputError
from ggml_engine.ggml.lazy_grammar import LazyGrammar, Trigger

from .parser import ReplyParser

ReasoningMarks = tuple[str, str]
Tools = Sequence[Tool | Mapping[str, Any]] | None


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One format, as `detect_format` finds it for a template.

    `reasoning` are the marks around the model's thoughts. `visible_tokens` are texts of control tokens that the parser
    has to see in the reply (`shown_tokens` has their ids), `end_texts` those that end a call, and with it the reply.

    How the template takes a conversation: `renders_tools`, it has a place for tools and calls, else they are written
    into messages (`prepare_messages`); `one_call_a_message`; `short_ids`, an id of a call has nine letters and digits;
    `knows_developer`, the role; `knows_system`, likewise; `reasoning_key` names a message's reasoning; with
    `one_of_content_and_reasoning` a message with calls has either of these.
    """

    reasoning: ReasoningMarks | None = ("<think>", "</think>")
    renders_tools: bool = True
    one_call_a_message: bool = False
    knows_developer: bool = False
    knows_system: bool = True
    reasoning_key: str = "reasoning_content"
    one_of_content_and_reasoning: bool = False

    name: ClassVar[str] = ""
    marks: ClassVar[tuple[str, ...]] = ()
    end_texts: ClassVar[tuple[str, ...]] = ()
    short_ids: ClassVar[bool] = False
    _hides_calls: ClassVar[bool] = True  # marks of calls are text among the thoughts
    _thinks_anywhere: ClassVar[bool] = False

    @property
    def visible_tokens(self) -> tuple[str, ...]:
        """Texts of control tokens that the parser has to see."""
        return self.marks + (self.reasoning or ())

    def shown_tokens(self, special_tokens: Mapping[str, int]) -> frozenset[int]:
        """The ids of `visible_tokens` in a vocabulary (`Vocabulary.special_tokens`), for `GenConfig.shown_tokens`."""
        return frozenset(special_tokens[text] for text in self.visible_tokens if text in special_tokens)

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether the prompt (its end is enough) has the opening mark already, so that the reply begins inside."""
        return self.reasoning is not None and prompt.rstrip().endswith(self.reasoning[0])

    def parser(self, tools: Tools = None, *, reasoning: bool = True, prompt_end: str = "") -> ReplyParser:
        """A parser for one reply.

        `tools` are those that may be called. Without `reasoning` the marks of reasoning stay in the content.
        `prompt_end` is the end of the prompt's text, or all of it. Raises InputError for tools that are none.
        """
        return self._parser(read_tools(tools), self.reasoning if reasoning else None, self.opens_reasoning(prompt_end))

    def grammar(
        self,
        tools: Tools,
        choice: ToolChoice | Mapping[str, Any] | str = "required",
        *,
        parallel: bool = False,
        reasoning: bool = True,
        prompt_end: str = "",
    ) -> str:
        """GBNF that leaves the model nothing but to call: the markup, and JSON by the schema of the tool.

        `parallel` allows several calls; `reasoning` lets the model think before, which it must where the prompt has
        opened its thoughts. Raises InputError for a choice that
        the tools do not allow, and for a schema that cannot be obeyed.
        """
        given = read_tools(tools)
        allowed = read_tool_choice(choice, given).allowed(given)
        if not allowed:
            raise InputError("a grammar holds a model to a call, and no tool may be called")
        grammar = Grammar()
        calls = self._calls(grammar, allowed, parallel)
        is_open = self.opens_reasoning(prompt_end)
        if self.reasoning is not None and (reasoning or is_open):
            return grammar.text(f"{self._thoughts(grammar, self.reasoning, is_open)} {calls}")
        return grammar.text(calls)

    def lazy_grammar(
        self, tools: Tools, *, parallel: bool = False, reasoning: bool = True, prompt_end: str = ""
    ) -> LazyGrammar:
        """What holds a model that may call to a call, once it has begun one: the choice `auto`.

        The text is free up to the mark of a call; then come a call of a tool, with arguments by its schema, more
        calls with `parallel`, and the end. `reasoning` as for `parser`. Arguments by a schema that cannot be obeyed
        are free: a JSON object, or what the format has instead. Raises InputError where there are no tools.
        """
        given = read_tools(tools)
        if not given:
            raise InputError("a grammar holds a model to a call, and no tool may be called")
        grammar = Grammar()
        triggers = self._triggers(grammar, [self._obeyable(tool) for tool in given], parallel)
        is_open = self.opens_reasoning(prompt_end)
        thoughts = self.reasoning if self._hides_calls and (reasoning or is_open) else None
        return LazyGrammar(
            grammar.rules,
            tuple(triggers),
            thoughts=thoughts,
            is_thinking=is_open and thoughts is not None,
            thoughts_anywhere=self._thinks_anywhere,
        )

    def _obeyable(self, tool: Tool) -> Tool:
        """The tool, or one of its name that takes anything where its schema cannot be obeyed."""
        try:
            self._arguments_rule(Grammar(), tool)
        except InputError:
            return Tool(tool.name, tool.description, self._any_parameters(tool))
        return tool

    def _arguments_rule(self, grammar: Grammar, tool: Tool) -> object:
        """Adds what the tool's arguments need to the grammar; InputError for a schema that cannot be obeyed."""
        return grammar.arguments(tool, "arguments")

    def _any_parameters(self, tool: Tool) -> Mapping[str, Any]:  # noqa: ARG002 - for formats that name parameters
        return {"type": "object"}

    def _triggers(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> Sequence[Trigger]:
        """What begins a call, and for each the rule of what follows it."""
        raise NotImplementedError

    def _parser(self, tools: Sequence[Tool], reasoning: ReasoningMarks | None, is_open: bool) -> ReplyParser:
        raise NotImplementedError

    def _calls(self, grammar: Grammar, tools: Sequence[Tool], parallel: bool) -> str:
        """The expression of a call of one of the tools, or of several."""
        raise NotImplementedError

    def _thoughts(self, grammar: Grammar, marks: ReasoningMarks, is_open: bool) -> str:
        """The expression of what may, or where it has begun must, come before a call."""
        rest = f"{grammar.until('thought', marks[1])} [ \\t\\n]{{0,8}}"
        return rest if is_open else f"({grammar.literal(marks[0])} {rest})?"
