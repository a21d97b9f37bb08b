"""Gemma's calls.

Gemma 3 has no markup of its own: its makers prompt it for JSON, or for Python in a fence (```` ```tool_code ````).
FunctionGemma and Gemma 4 write `call:NAME{key:value}` between control tokens, with texts between others (`CallMarks`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final

from .literals import PYTHON, Literals
from .llama3 import KEYS
from .parser import ReplyParser
from .reader import MalformedError, Marks, Reading

JSON_FENCE: Final = "```json"
FENCES: Final = ("```tool_code", "```tool_call", JSON_FENCE)
_FENCE_END: Final = "```"
_FENCES: Final = Marks(*FENCES)
_NAME: Final = re.compile(r"[\w.-]+")


class Gemma3Parser(ReplyParser):
    """Reads a call as JSON or as Python in a fence, and JSON or a list of Python's calls as the whole reply."""

    def body(self) -> Reading[None]:
        """Bare calls count at the beginning only."""
        self.content((yield from self.skip_space()))
        if self.tool_names:
            start = yield from self.take("{", "[")
            if start == "{":
                yield from self.attempt(self.read_call(KEYS), start)
            elif start == "[":
                yield from self._read_list(start)
        while (mark := (yield from self.pass_text(_FENCES, self.content))) is not None:
            yield from self._read_fence(mark)

    def _read_list(self, begin: str) -> Reading[None]:
        while (yield from self.attempt(self._read_python(), begin)):
            yield from self.skip_space()
            if (yield from self.take(",", "]")) != ",":
                return
            begin = ","

    def _read_fence(self, begin: str) -> Reading[None]:
        while (yield from self.attempt(self._read_fenced(), begin)):
            yield from self.skip_space()
            if (yield from self.take(_FENCE_END)) is not None or not (yield from self.peek()):
                return
            begin = ""

    def _read_fenced(self) -> Reading[None]:
        yield from self.skip_space()
        if (yield from self.take("{")) is not None:
            yield from self.read_call(KEYS)
        else:
            yield from self._read_python()

    def _read_python(self) -> Reading[None]:
        yield from self.skip_space()
        name = yield from self.take_run(_NAME, 256)
        yield from self.expect("(")
        is_printed = name == "print" and name not in self.tool_names
        if is_printed:
            name = yield from self.take_run(_NAME, 256)
            yield from self.expect("(")
        self.begin_call(name)
        yield from PYTHON.read_keywords(self, self.put_arguments)
        self.end_call()
        if is_printed:
            yield from self.take(")")


@dataclass(frozen=True, slots=True)
class CallMarks:
    """The control tokens around a call and around a text in it."""

    begin: str
    end: str
    quote: str


FUNCTION_GEMMA: Final = CallMarks("<start_function_call>", "<end_function_call>", "<escape>")
GEMMA4: Final = CallMarks("<|tool_call>", "<tool_call|>", '<|"|>')
THOUGHT: Final = ("<|channel>thought", "<channel|>")


class MarkedGemmaParser(ReplyParser):
    """Reads the calls of FunctionGemma and of Gemma 4, whose reasoning may come at any place, and empty."""

    def __init__(self, tool_names: Any, marks: CallMarks, **options: Any) -> None:
        self._marks = marks
        self._literals = Literals(quotes=(marks.quote,), has_escapes=False)
        super().__init__(tool_names, **options)

    def body(self) -> Reading[None]:
        """Content, calls and, where it is split off, reasoning, in any order."""
        thought = self._reasoning
        begins = Marks(self._marks.begin, *(thought or ()))
        while (mark := (yield from self.pass_text(begins, self.content))) is not None:
            if mark == self._marks.begin:
                yield from self.attempt(self._read(), mark)
            elif thought is not None and mark == thought[0]:
                yield from self.pass_text(Marks(thought[1]), self.reason)
                self.end_reasoning()

    def _read(self) -> Reading[None]:
        yield from self.expect("call:")
        name = yield from self.take_run(_NAME, 256)
        yield from self.skip_space()
        self.begin_call(name)
        if (yield from self.peek()) != "{":
            raise MalformedError
        yield from self._literals.read(self, self.put_arguments)
        self.end_call()
        yield from self.skip_space()
        yield from self.take(self._marks.end)
