"""`LazyGrammar`: a grammar that holds from a trigger on. `Watch` finds the trigger in the bytes of a text.

libllama has lazy grammars, too, and they are not used: the token that completes a trigger is taken without a look at
what stands behind the trigger in it, and where that does not fit, the process ends; its pattern is matched against the
whole text at every token. Here a token that goes on wrongly is refused before it is taken, and work is linear.
Values only; knows nothing of libllama.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

from ggml_engine.errors import OptionError

__all__ = ["LazyGrammar", "Trigger"]

MAX_TRIGGERS: Final = 1_024
MAX_MARK_CHARS: Final = 256
MAX_SPACE: Final = 8  # characters of white space between the words of a trigger

_SPACE: Final = b" \t\r\n"
_BETWEEN: Final = b"[ \\t\\r\\n]{0,%d}" % MAX_SPACE


@dataclass(frozen=True, slots=True)
class Trigger:
    """The words, with white space between them or none; `rule` of the grammar then holds for what follows them.

    With `at_start` they count only where nothing but white space and thoughts stands before them.
    """

    words: tuple[str, ...]
    rule: str
    at_start: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.words, tuple) or not self.words or not all(map(_is_mark, self.words)):
            raise OptionError(f"a trigger has words of 1 to {MAX_MARK_CHARS} characters each, not {self.words!r:.80}")
        if not isinstance(self.rule, str) or re.fullmatch(r"[a-zA-Z0-9-]+", self.rule) is None:
            raise OptionError(f"a trigger's rule must be the name of a rule, not {self.rule!r:.80}")


@dataclass(frozen=True, slots=True)
class LazyGrammar:
    """GBNF `rules` without a root: until one of `triggers` was written, the text is free; from there on a rule holds.

    It holds to the end of the text: where the rule has come to its end, only the end may follow.
    `thoughts` are marks around text in which no trigger counts; it begins at the start of the text, anywhere with
    `thoughts_anywhere`, or, with `is_thinking`, before it. OptionError for values that cannot be.
    """

    rules: str
    triggers: tuple[Trigger, ...]
    thoughts: tuple[str, str] | None = None
    is_thinking: bool = False
    thoughts_anywhere: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.rules, str):
            raise OptionError(f"the rules of a grammar must be a str, not {type(self.rules).__name__}")
        if not isinstance(self.triggers, tuple) or not all(isinstance(one, Trigger) for one in self.triggers):
            raise OptionError("triggers must be a tuple of Trigger")
        if not 0 < len(self.triggers) <= MAX_TRIGGERS:
            raise OptionError(f"a lazy grammar has 1 to {MAX_TRIGGERS} triggers, not {len(self.triggers)}")
        marks = self.thoughts
        if marks is not None and not (isinstance(marks, tuple) and len(marks) == 2 and all(map(_is_mark, marks))):
            raise OptionError(f"thoughts must be two marks or None, not {marks!r:.80}")
        if self.is_thinking and marks is None:
            raise OptionError("is_thinking needs the marks of thoughts")

    def text(self, rule: str, begin: str = "") -> str:
        """The whole grammar for a text that begins with `begin` and goes on by a rule."""
        escaped = "".join(f"\\U{ord(character):08x}" for character in begin)
        return f'root ::= "{escaped}" {rule}\n{self.rules}' if begin else f"root ::= {rule}\n{self.rules}"

    @property
    def all_rules(self) -> str:
        """A grammar in which every trigger's rule is used, to be checked."""
        return f"root ::= {' | '.join(dict.fromkeys(one.rule for one in self.triggers))}\n{self.rules}"


class Found(NamedTuple):
    """A trigger's rule, and how many bytes of the latest piece belong to what came up to the trigger's end."""

    rule: str
    n_before: int


class Watch(NamedTuple):
    """What of a text may still become a mark. A value: `after` gives the next one, and this one stays."""

    marks: _Marks
    tail: bytes = b""
    is_thinking: bool = False
    is_start: bool = True
    may_think: bool = False

    @classmethod
    def of(cls, grammar: LazyGrammar) -> Watch:
        """At the beginning of a text."""
        marks = _marks_of(grammar)
        return cls(marks, is_thinking=grammar.is_thinking, may_think=grammar.thoughts is not None)

    def concerns(self, text: str) -> bool:
        """Whether a control token of this text may be part of a mark."""
        return text in self.marks.text

    def after(self, piece: bytes) -> Watch | Found:
        """The watch after a piece of the text, or the trigger that it completes."""
        data = self.tail + piece
        watch = self
        while True:
            step = watch._step(data)
            if not isinstance(step, _Jump):
                break
            data = data[step.end :]
            watch = step.watch
        if isinstance(step, Watch):
            return step
        rule, end = step
        return Found(rule, len(piece) - (len(data) - end))

    def _step(self, data: bytes) -> Watch | _Jump | tuple[str, int]:
        if self.is_thinking:
            return self._in_thoughts(data)
        found = self._at_start(data) if self.is_start else None
        return found or self._anywhere(data)

    def _in_thoughts(self, data: bytes) -> Watch | _Jump:
        closing = self.marks.thoughts[1]
        end = data.find(closing)
        if end < 0:
            return self._replace(tail=_last(data, len(closing) - 1))
        watch = self._replace(tail=b"", is_thinking=False, may_think=False)
        return _Jump(end + len(closing), watch)

    def _at_start(self, data: bytes) -> _Jump | tuple[str, int] | None:
        text = data.lstrip(_SPACE)
        n_space = len(data) - len(text)
        opening = self.marks.thoughts[0]
        if self.may_think and text.startswith(opening):
            return _Jump(n_space + len(opening), self._replace(tail=b"", is_thinking=True))
        found = self.marks.at_start.match(text) if self.marks.at_start is not None else None
        return (self.marks.rules[found.lastgroup or ""], n_space + found.end()) if found is not None else None

    def _anywhere(self, data: bytes) -> Watch | _Jump | tuple[str, int]:
        marks = self.marks
        found = marks.anywhere.search(data) if marks.anywhere is not None else None
        if found is not None and found.lastgroup in marks.rules:
            return marks.rules[found.lastgroup], found.end()
        if found is not None:
            return _Jump(found.end(), self._replace(tail=b"", is_thinking=True, is_start=False))
        if self.is_start and len(text := data.lstrip(_SPACE)) < marks.longest_at_start:
            return self._replace(tail=text)
        return self._replace(tail=_last(data, marks.longest - 1), is_start=False)


class _Jump(NamedTuple):
    """A mark ends at `end`; `watch` is what goes on there."""

    end: int
    watch: Watch


class _Marks(NamedTuple):
    """The marks of a grammar, made ready to be looked for. Bytes; `longest` is the length of the longest match."""

    rules: dict[str, str]  # by the name of the pattern's group
    at_start: re.Pattern[bytes] | None
    anywhere: re.Pattern[bytes] | None
    thoughts: tuple[bytes, bytes]
    longest: int
    longest_at_start: int
    text: str


@lru_cache(maxsize=64)
def _marks_of(grammar: LazyGrammar) -> _Marks:
    rules: dict[str, str] = {}
    patterns: dict[bool, list[bytes]] = {True: [], False: []}
    longest = {True: 0, False: 0}
    for index, trigger in enumerate(grammar.triggers):
        rules[f"t{index}"] = trigger.rule
        words = [re.escape(word.encode()) for word in trigger.words]
        patterns[trigger.at_start].append(b"(?P<t%d>%s)" % (index, _BETWEEN.join(words)))
        length = len("".join(trigger.words).encode()) + MAX_SPACE * (len(words) - 1)
        longest[trigger.at_start] = max(longest[trigger.at_start], length)
    thoughts = tuple(mark.encode() for mark in grammar.thoughts or ("", ""))
    if grammar.thoughts is not None:
        if grammar.thoughts_anywhere:
            patterns[False].append(b"(?P<thought>%s)" % re.escape(thoughts[0]))
            longest[False] = max(longest[False], len(thoughts[0]))
        longest[True] = max(longest[True], len(thoughts[0]))
    texts = ["".join(trigger.words) for trigger in grammar.triggers] + list(grammar.thoughts or ())
    return _Marks(
        rules,
        re.compile(b"|".join(patterns[True])) if patterns[True] else None,
        re.compile(b"|".join(patterns[False])) if patterns[False] else None,
        (thoughts[0], thoughts[1]),
        longest[False],
        longest[True],
        "\0".join(texts),
    )


def _is_mark(text: Any) -> bool:
    return isinstance(text, str) and 0 < len(text) <= MAX_MARK_CHARS and "\0" not in text and text.isprintable()


def _last(data: bytes, n: int) -> bytes:
    return data[-n:] if n > 0 else b""
