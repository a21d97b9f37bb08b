"""`Reader`: a text that comes in pieces, read by straight-line code.

What reads is a generator that yields where it needs more text (`Reading`), so that a format is written as the story of
its markup. Invariants: what is decided depends on the text alone, never on where it was cut; between two pieces only
what may still become a mark waits, so that work is linear in the text. Knows no format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import TypeVar

from .json_scan import JsonScanner

T = TypeVar("T")
Reading = Generator[None, None, T]

_SPACE = re.compile(r"\s+")


class MalformedError(Exception):
    """The text is not what was to be read here. Never leaves a parser."""


class Marks:
    """Texts to look for, all at once."""

    def __init__(self, *texts: str) -> None:
        self.texts = tuple(sorted(texts, key=len, reverse=True))
        self.longest = max(map(len, texts), default=0)
        self._pattern = re.compile("|".join(map(re.escape, self.texts))) if texts else None

    def find(self, text: str, at: int) -> re.Match[str] | None:
        """The first of them from `at` on, of several at one place the longest."""
        return self._pattern.search(text, at) if self._pattern is not None else None

    def n_possible(self, text: str, at: int) -> int:
        """How many characters at the end of the text may be the beginning of one."""
        for n in range(min(len(text) - at, self.longest - 1), 0, -1):
            if any(mark.startswith(text[-n:]) for mark in self.texts):
                return n
        return 0


class Reader:
    """The text, and what can be read from it."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._has_ended = False
        self._raw: list[str] | None = None

    @property
    def n_waiting(self) -> int:
        """Characters that came and are not decided about."""
        return len(self._text) - self._at

    def _add(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def _consume(self, end: int) -> str:
        consumed = self._text[self._at : end]
        self._at = end
        if self._raw is not None and consumed:
            self._raw.append(consumed)
        return consumed

    def more(self) -> Reading[bool]:
        """Waits for more text; False when there is none."""
        if not self._has_ended:
            yield
        return not self._has_ended

    def peek(self) -> Reading[str]:
        """The next character, which is not consumed; empty at the end."""
        while not self.n_waiting:
            if not (yield from self.more()):
                return ""
        return self._text[self._at]

    def take(self, *literals: str) -> Reading[str | None]:
        """The literal that comes next, of several the longest; None, with nothing consumed, when none of them does."""
        ordered = sorted(literals, key=len, reverse=True)
        while True:
            rest = self._text[self._at : self._at + len(ordered[0])]
            for literal in ordered:
                if rest.startswith(literal):
                    return self._consume(self._at + len(literal))
                if literal.startswith(rest) and not self._has_ended:
                    break
            else:
                return None
            yield from self.more()

    def expect(self, *literals: str) -> Reading[str]:
        """The literal that comes next; MalformedError when none does."""
        taken = yield from self.take(*literals)
        if taken is None:
            raise MalformedError
        return taken

    def take_run(self, pattern: re.Pattern[str], limit: int | None = None) -> Reading[str]:
        """The characters that match; the pattern is one class of characters, repeated.

        MalformedError when they are more than `limit`.
        """
        pieces: list[str] = []
        n_left = None if limit is None else limit + 1
        while True:
            end = len(self._text) if n_left is None else min(len(self._text), self._at + n_left)
            run = pattern.match(self._text, self._at, end)
            if run is not None:
                pieces.append(self._consume(run.end()))
                if n_left is not None:
                    n_left -= len(run[0])
                    if not n_left:
                        raise MalformedError
            if self.n_waiting or not (yield from self.more()):
                return "".join(pieces)

    def skip_space(self) -> Reading[str]:
        """The white space that comes next."""
        return (yield from self.take_run(_SPACE))

    def pass_text(self, marks: Marks, put: Callable[[str], None]) -> Reading[str | None]:
        """Hands on all text before the first of the marks, and returns that mark; None at the end of the text."""
        while True:
            found = marks.find(self._text, self._at)
            if found is not None and self._is_longest(marks, found):
                put(self._consume(found.start()))
                return self._consume(found.end())
            if self._has_ended:
                put(self._consume(len(self._text)))
                return None
            end = found.start() if found is not None else len(self._text) - marks.n_possible(self._text, self._at)
            put(self._consume(end))
            yield from self.more()

    def _is_longest(self, marks: Marks, found: re.Match[str]) -> bool:
        rest = self._text[found.start() : found.start() + marks.longest]
        return self._has_ended or not any(len(mark) > len(rest) and mark.startswith(rest) for mark in marks.texts)

    def pass_json(self, put: Callable[[str], None]) -> Reading[None]:
        """Hands on one JSON value as it comes; MalformedError when it is none, or not complete at the end."""
        scanner = JsonScanner()
        while True:
            out, end = scanner.feed(self._text, self._at)
            self._consume(end)
            if self._has_ended and not self.n_waiting:
                out += scanner.finish()
            if out:
                put(out)
            if scanner.is_done:
                return
            if scanner.is_broken or self._has_ended:
                raise MalformedError
            yield from self.more()

    def json_text(self) -> Reading[str]:
        """A JSON string, read."""
        if (yield from self.peek()) != '"':
            raise MalformedError
        pieces: list[str] = []
        yield from self.pass_json(pieces.append)
        return str(json.loads("".join(pieces)))
