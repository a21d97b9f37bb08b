"""The text of a GBNF grammar as rules: read as libllama reads it, and strictly where that would guess.

Bounded in what is made of it: rules, elements with repetitions written out, brackets in each other.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Final

from ggml_engine.errors import InputError
from ggml_engine.ggml.gbnf_rules import Element, Rule, Terminal

MAX_DEPTH: Final = 128
MAX_RULES: Final = 4_096
MAX_ELEMENTS: Final = 131_072
MAX_REPETITIONS: Final = 2_000  # libllama's own limit; above it, an upper bound would silently be dropped

_SPACE: Final = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES: Final = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME: Final = re.compile(r"[a-zA-Z0-9-]+")
_CHARACTER: Final = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U(?:0010|000[0-9a-fA-F])[0-9a-fA-F]{4}|[trn\\\"\[\]-])|[^\\]", re.DOTALL
)
_BOUNDS: Final = re.compile(r"([0-9]{1,6})[ \t\r\n]*(?:(,)[ \t\r\n]*([0-9]{1,6})?[ \t\r\n]*)?\}")
_TOKEN: Final = re.compile(r"!?<(?:\[([0-9]{1,9})\]|([^>]*))>")
_FIRST_TOKEN: Final = 0x110000
_LAST: Final = _FIRST_TOKEN + 2**32
_ANY: Final = Terminal(((0, _FIRST_TOKEN - 1),))
_DEFINES: Final = re.compile("::=")
_CLOSE: Final = re.compile(r"\)")
_LINE_END: Final = re.compile(r"\r\n|\r|\n")


@dataclass(frozen=True, slots=True)
class Parsed:
    """The rules of a grammar, groups and repetitions included, the names that it uses, and the tokens that it names."""

    rules: dict[str, Rule]
    referenced: Set[str]
    token_ids: tuple[int, ...]
    token_texts: tuple[str, ...]


def parse(text: str) -> Parsed:
    """Raises InputError with the place and the fault."""
    parser = _Parser(text)
    parser.parse()
    return Parsed(parser.rules, parser.referenced, tuple(parser.token_ids), tuple(parser.token_texts))


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0
        self.n_elements = 0
        self.rules: dict[str, Rule] = {}
        self.referenced: set[str] = set()
        self.token_ids: list[int] = []
        self.token_texts: list[str] = []

    def error(self, reason: str) -> InputError:
        line = self.text.count("\n", 0, self.position) + 1
        column = self.position - self.text.rfind("\n", 0, self.position)
        return InputError(f"grammar, line {line}, column {column}: {reason}")

    def skip(self, lines: bool) -> None:
        match = (_SPACE_AND_LINES if lines else _SPACE).match(self.text, self.position)
        self.position = match.end() if match else self.position

    def take(self, pattern: re.Pattern[str], expected: str) -> re.Match[str]:
        match = pattern.match(self.text, self.position)
        if match is None:
            found = self.text[self.position : self.position + 10]
            raise self.error(
                f"expected {expected}, found {found!r}" if found else f"expected {expected}, found the end"
            )
        self.position = match.end()
        return match

    def peek(self) -> str:
        return self.text[self.position : self.position + 1]

    def count(self, n: int) -> None:
        self.n_elements += n
        if self.n_elements > MAX_ELEMENTS:
            raise self.error(f"the grammar has over {MAX_ELEMENTS} elements when its repetitions are written out")

    def parse(self) -> None:
        self.skip(lines=True)
        while self.position < len(self.text):
            name = self.take(_NAME, "the name of a rule")[0]
            if name in self.rules:
                raise self.error(f"the rule {name!r} is defined twice")
            self.skip(lines=False)
            self.take(_DEFINES, "'::='")
            self.skip(lines=True)
            self.rules[name] = Rule()
            self.rules[name].alternatives = self.alternatives(is_nested=False)
            if self.position < len(self.text):
                self.take(_LINE_END, "the end of the line")
            self.skip(lines=True)

    def alternatives(self, *, is_nested: bool) -> list[list[Element]]:
        found = [self.sequence(is_nested=is_nested)]
        while self.peek() == "|":
            self.position += 1
            self.skip(lines=True)
            found.append(self.sequence(is_nested=is_nested))
        return found

    def sequence(self, *, is_nested: bool) -> list[Element]:
        elements: list[Element] = []
        item: list[Element] = []
        while True:
            c = self.peek()
            if c and c in "*+?{":
                if not item:
                    raise self.error(f"nothing stands before {c!r}")
                item = self.repeat(item)
            else:
                elements += item
                found = self.item(c)
                if found is None:
                    return elements
                item = found
            self.skip(lines=is_nested)

    def item(self, c: str) -> list[Element] | None:
        """One item of a sequence: an element for each character of a literal; None at the end of the sequence."""
        self.count(1)
        found: list[Element] | None = None
        if c == '"':
            self.position += 1
            found = [Terminal(((code, code),)) for code in self.characters('"')]
        elif c == "[":
            found = [self.character_class()]
        elif c == ".":
            self.position += 1
            found = [_ANY]
        elif c in ("<", "!"):
            found = [self.token()]
        elif c == "(":
            found = [self.group()]
        elif c and _NAME.match(c):
            reference = self.take(_NAME, "a name")[0]
            self.referenced.add(reference)
            found = [reference]
        return found

    def character_class(self) -> Terminal:
        self.position += 1
        is_negated = self.peek() == "^"
        self.position += is_negated
        begin = self.position
        codes = self.characters("]")
        if not codes:
            raise self.error("a character class is empty")
        ranges = _ranges(codes, self.text[begin : self.position - 1])
        return Terminal(_others(ranges) if is_negated else ranges)

    def token(self) -> Terminal:
        token = self.take(_TOKEN, "a <token>")
        if token[1] is not None:
            self.token_ids.append(int(token[1]))
        else:
            self.token_texts.append(token[0].removeprefix("!"))
        code = _FIRST_TOKEN + zlib.crc32(token[0].removeprefix("!").encode())
        return Terminal(_others([(code, code)]) if token[0].startswith("!") else ((code, code),))

    def characters(self, end: str) -> list[int]:
        """The code points up to the end."""
        codes = []
        while self.peek() != end:
            if not self.peek():
                raise self.error(f"expected {end!r}, found the end")
            found = self.take(
                _CHARACTER, 'a character or one of the escapes \\x \\u \\U \\t \\r \\n \\\\ \\" \\[ \\] \\-'
            )
            self.count(1)
            codes.append(_code(found[0]))
        self.position += 1
        return codes

    def group(self) -> str:
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise self.error(f"brackets are nested over {MAX_DEPTH} deep")
        self.position += 1
        self.skip(lines=True)
        made = self.new_rule(self.alternatives(is_nested=True))
        self.take(_CLOSE, "')'")
        self.depth -= 1
        return made

    def repeat(self, item: list[Element]) -> list[Element]:
        c = self.peek()
        self.position += 1
        least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(c, (0, 0))
        if c == "{":
            self.skip(lines=True)
            bounds = self.take(_BOUNDS, "bounds such as {2}, {2,} or {2,5}")
            least = int(bounds[1])
            most = least if bounds[2] is None else int(bounds[3]) if bounds[3] else None
            largest = least if most is None else max(least, most)
            if largest > MAX_REPETITIONS or (most is not None and most < least):
                raise self.error(f"repetitions {bounds[0][:-1]!r} are not in order, or over {MAX_REPETITIONS}")
        self.count(len(item) * max(least, most or 0))
        result = item * min(least, 1)
        if least > 1 and isinstance(item[0], str):
            made = self.new_rule([item])
            self.rules[made].copies = least
            result = [made]
        if most is None or most > least:
            made = self.new_rule([])
            # as libllama writes S*: S' ::= S S' or nothing; that a bounded one ends changes nothing here
            is_once = most is not None and most - least == 1
            self.rules[made].alternatives = [list(item) if is_once else [*item, made], []]
            self.rules[made].copies = most - least if most is not None and isinstance(item[0], str) else 1
            self.rules[made].span = most - least if most is not None else 0
            result = [*result, made]
        return result

    def new_rule(self, alternatives: list[list[Element]]) -> str:
        if len(self.rules) >= MAX_RULES:
            raise self.error(f"the grammar has over {MAX_RULES} rules, groups and repetitions")
        name = f"({len(self.rules)})"
        self.rules[name] = Rule(alternatives)
        return name


def _ranges(codes: list[int], text: str) -> tuple[tuple[int, int], ...]:
    """The ranges of a class; a `-` between two characters stands for those between them, an escaped one for itself."""
    dashes = [match[0] == "-" for match in _CHARACTER.finditer(text)]
    found = []
    at = 0
    while at < len(codes):
        if at + 2 < len(codes) and dashes[at + 1]:
            found.append((codes[at], codes[at + 2]))
            at += 3
        else:
            found.append((codes[at], codes[at]))
            at += 1
    return tuple(found)


def _others(ranges: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """All code points that are in none of the ranges."""
    found, at = [], 0
    for low, high in sorted(ranges):
        if at < low:
            found.append((at, low - 1))
        at = max(at, high + 1)
    return (*found, (at, _LAST)) if at <= _LAST else tuple(found)


def _code(character: str) -> int:
    if character[0] != "\\" or len(character) == 1:
        return ord(character)
    if character[1] in "xuU":
        return int(character[2:], 16)
    return ord({"t": "\t", "r": "\r", "n": "\n"}.get(character[1], character[1]))
