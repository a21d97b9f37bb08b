"""gpt-oss' messages ("harmony"): `<|start|>assistant<|channel|>CHANNEL<|message|>text<|end|>`, several in a reply.

The prompt ends with `<|start|>assistant`. The channel analysis is reasoning; a header with `to=functions.NAME` makes
the message a call, whose text is JSON; all else is content. (openai/harmony, docs/format.md)
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from ggml_engine.chat.tools import Grammar, Tool

from .parser import ReplyParser
from .reader import MalformedError, Marks, Reading

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
END, CALL, RETURN = "<|end|>", "<|call|>", "<|return|>"
ANALYSIS: Final = ("<|channel|>analysis<|message|>", END)
FUNCTIONS: Final = "functions."
_RECIPIENT: Final = " to="
# what begins a message to a function, and whether only at the start of the reply
HEADERS: Final = (
    ((CHANNEL, "commentary", "to="), False),
    ((CHANNEL, "analysis", "to="), False),
    ((f"{START}assistant", "to="), False),
    (("to=",), True),
)
_BORDERS: Final = Marks(START, CHANNEL, END, CALL, RETURN)
_WORDS: Final = re.compile(r"[^<]+")
_MAX_WORDS, _MAX_MARKS = 256, 8
_CHANNELS: Final = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENTS: Final = re.compile(r"\bto=([^\s<]+)")


class GptOssParser(ReplyParser):
    """Reads messages; reasoning is always split off, since it is a message of its own."""

    _channel = ""

    def _run(self) -> Reading[None]:
        yield
        put = self.reason if self._is_open else self.content
        mark = None if self._is_open else (yield from self.take(START, CHANNEL, _RECIPIENT))
        n_thoughts = 0
        while True:
            if mark in (START, CHANNEL, _RECIPIENT):
                self._channel = ""
                yield from self.attempt(self._read_header(mark or ""), mark or "")
                put = self.reason if self._channel == "analysis" else self.content
            if put == self.reason:
                self._drops_space = not n_thoughts
                self._space = ["\n"] if n_thoughts else []
                n_thoughts += 1
            mark = yield from self.pass_text(_BORDERS, put)
            if put == self.reason:
                self.end_reasoning()
            if mark is None:
                return
            put = self.content

    def _read_header(self, first: str) -> Reading[None]:
        pieces = [first]
        while pieces[-1] != MESSAGE:
            if len(pieces) > 2 * _MAX_MARKS:
                raise MalformedError
            pieces.append((yield from self.take_run(_WORDS, _MAX_WORDS)))
            pieces.append((yield from self.expect(CHANNEL, CONSTRAIN, MESSAGE)))
        header = "".join(pieces)
        recipients = [name for name in _RECIPIENTS.findall(header) if name != "assistant"]
        if recipients:
            self.begin_call(recipients[-1].removeprefix(FUNCTIONS))
            yield from self.skip_space()
            if (yield from self.peek()) != "{":
                raise MalformedError
            yield from self.pass_json(self.put_arguments)
            self.end_call()
        else:
            channels = _CHANNELS.findall(header)
            self._channel = channels[-1] if channels else ""


def header_rule(grammar: Grammar, tools: Sequence[Tool]) -> str:
    """A rule for what follows `to=`: the function, the channel where it comes here, and the arguments."""
    literal = grammar.literal
    channel = f'(" "? {literal(CHANNEL)} ("commentary" | "analysis"))?'
    kind = f'(" "? {literal(CONSTRAIN)}? "json")? {literal(MESSAGE)}'
    grammar.add("header", f"{channel} {kind}")
    return grammar.json_calls(tools, lambda name: f"{literal(FUNCTIONS + name)} header")
