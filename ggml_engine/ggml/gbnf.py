"""Checks a GBNF grammar (llama.cpp's grammars/README.md) before libllama compiles it.

libllama writes what is wrong to the C stderr, and some grammars never come back from it: `{5,2}` allocates without end,
left recursion hidden behind rules that may be empty loops for ever, nested brackets overflow the stack, hundreds of
optional elements in a row take hours. So a grammar that passes here is well-formed, bounded in size and width, and
free of left recursion; anything else is an InputError.
Not bounded: grammars so ambiguous (`[a-z]* [a-z]* [a-z]*`...) that parse states multiply with every character.
"""

from __future__ import annotations

import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from ggml_engine.errors import InputError
from ggml_engine.ggml.gbnf_ambiguity import Element, Terminal, refuse_ambiguity

MAX_TEXT_CHARS: Final = 262_144
MAX_DEPTH: Final = 128
MAX_RULES: Final = 4_096
MAX_ELEMENTS: Final = 131_072
MAX_WIDTH: Final = 512
MAX_OPTIONAL: Final = 16
MAX_REPETITIONS: Final = 2_000  # libllama's own limit; above it, an upper bound would silently be dropped

_SPACE: Final = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES: Final = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_NAME: Final = re.compile(r"[a-zA-Z0-9-]+")
_CHARACTER: Final = re.compile(
    r"\\(?:x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U(?:0010|000[0-9a-fA-F])[0-9a-fA-F]{4}|[trn\\\"\[\]-])|[^\\]", re.DOTALL
)
_BOUNDS: Final = re.compile(r"([0-9]{1,6})[ \t\r\n]*(?:(,)[ \t\r\n]*([0-9]{1,6})?[ \t\r\n]*)?\}")
_TOKEN: Final = re.compile(r"!?<(?:\[([0-9]{1,9})\]|([^>]*))>")


@dataclass(frozen=True, slots=True)
class Checked:
    """Facts about a checked grammar: the special tokens that it names by id and by text."""

    token_ids: tuple[int, ...]
    token_texts: tuple[str, ...]


@dataclass(slots=True)
class _Rule:
    # alternatives; an element is the name of a rule, or takes a character or a token
    alternatives: list[list[Element]] = field(default_factory=list)
    span: int = 0  # of a repetition with an end, how often at most
    copies: int = 1  # how often its elements may follow each other, where libllama writes that out


def check_grammar(text: str, root: str = "root") -> Checked:
    """What the grammar names; InputError with the place and the fault when libllama should not see it."""
    if not isinstance(text, str):
        raise InputError(f"a grammar must be a str, not {type(text).__name__}")
    if len(text) > MAX_TEXT_CHARS:
        raise InputError(f"the grammar has {len(text)} characters, the limit is {MAX_TEXT_CHARS}")
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise InputError("the grammar holds a NUL or a lone surrogate")
    parser = _Parser(text)
    parser.parse()
    if root not in parser.rules:
        raise InputError(f"the grammar has no rule {root!r}")
    for name in parser.referenced:
        if name not in parser.rules:
            raise InputError(f"the grammar uses the rule {name!r} but does not define it")
    empty = _may_be_empty(parser.rules)
    component = _refuse_left_recursion(parser.rules, empty)
    _refuse_width(parser.rules, empty, component)
    refuse_ambiguity(
        {name: rule.alternatives for name, rule in parser.rules.items()},
        {name: rule.span for name, rule in parser.rules.items() if rule.span > 1},
        _recursive(parser.rules),
        empty,
    )
    return Checked(tuple(parser.token_ids), tuple(parser.token_texts))


class _Parser:
    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0
        self.depth = 0
        self.n_elements = 0
        self.rules: dict[str, _Rule] = {}
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
            self.rules[name] = _Rule()
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
        self.rules[name] = _Rule(alternatives)
        return name


_FIRST_TOKEN: Final = 0x110000
_LAST: Final = _FIRST_TOKEN + 2**32
_ANY: Final = Terminal(((0, _FIRST_TOKEN - 1),))
_DEFINES: Final = re.compile("::=")
_CLOSE: Final = re.compile(r"\)")
_LINE_END: Final = re.compile(r"\r\n|\r|\n")


def _refuse_left_recursion(rules: dict[str, _Rule], empty: set[str]) -> dict[str, int]:
    """A rule must not reach itself before taking a character, when more is left to do after it.

    (A rule whose last element is itself, after elements that may be empty, ends: libllama drops equal states.)
    """
    edges: dict[str, dict[str, bool]] = {name: {} for name in rules}  # from, to, whether anything follows
    for name, rule in rules.items():
        for elements in rule.alternatives:
            for i, element in enumerate(elements):
                if not isinstance(element, str):
                    break
                edges[name][element] = edges[name].get(element, False) or i + 1 < len(elements)
                if element not in empty:
                    break
    component = _components(edges)
    for name, targets in edges.items():
        for target, is_followed in targets.items():
            if component[name] == component[target] and (is_followed or not target.startswith("(")):
                shown = next((n for n in (name, target) if not n.startswith("(")), "a group")
                raise InputError(f"the grammar is left-recursive: the rule {shown!r} can begin with itself")
    return component


def _refuse_width(rules: dict[str, _Rule], empty: set[str], component: dict[str, int]) -> None:
    """libllama walks all ways to go on at one place, and for optional elements in a row all choices of them."""
    first: dict[str, int] = {}
    in_a_row: dict[str, int] = {}  # elements that may be empty, on the way through one that is
    for name in sorted(rules, key=component.__getitem__):  # rules that others begin with come first
        first[name], in_a_row[name] = 0, 1
        copies = rules[name].copies if empty.issuperset(rules[name].alternatives[0]) else 1
        for elements in rules[name].alternatives:
            width = n_optional = 0
            for element in reversed(elements):
                own = first.get(element, 0) if isinstance(element, str) else 1
                width = own + (width if element in empty else 0)
                n_optional = (
                    n_optional + in_a_row.get(element, 0) if isinstance(element, str) and element in empty else 0
                )
                if n_optional * copies > MAX_OPTIONAL:
                    raise InputError(f"the grammar has over {MAX_OPTIONAL} optional elements in a row")
                if width > MAX_WIDTH:
                    break
            in_a_row[name] = max(in_a_row[name], n_optional * copies if empty.issuperset(elements) else 0)
            first[name] += width * copies
            if first[name] > MAX_WIDTH:
                shown = name if not name.startswith("(") else "a group"
                raise InputError(f"the grammar has over {MAX_WIDTH} ways to go on at one place (in {shown!r})")


def _may_be_empty(rules: dict[str, _Rule]) -> set[str]:
    waiting: dict[str, list[tuple[str, list[str]]]] = {}
    empty: set[str] = set()
    todo = []
    for name, rule in rules.items():
        for elements in rule.alternatives:
            if not elements:
                todo.append(name)
            elif all(isinstance(element, str) for element in elements):
                left = [element for element in elements if isinstance(element, str)]
                for element in set(left):
                    waiting.setdefault(element, []).append((name, left))
    while todo:
        name = todo.pop()
        if name in empty:
            continue
        empty.add(name)
        todo += [other for other, left in waiting.get(name, ()) if all(element in empty for element in left)]
    return empty


def _recursive(rules: dict[str, _Rule]) -> set[str]:
    """The rules that reach themselves."""
    edges = {
        name: {each: True for elements in rule.alternatives for each in elements if isinstance(each, str)}
        for name, rule in rules.items()
    }
    component = _components(edges)
    sizes = Counter(component.values())
    return {name for name in rules if sizes[component[name]] > 1 or name in edges[name]}


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


def _components(edges: dict[str, dict[str, bool]]) -> dict[str, int]:
    """Which rules reach each other (Tarjan's algorithm, without recursion)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    component: dict[str, int] = {}
    stack: list[str] = []
    for root, reached in edges.items():
        if root in index:
            continue
        work: list[tuple[str, Iterator[str]]] = [(root, iter(reached))]
        index[root] = low[root] = len(index)
        stack.append(root)
        while work:
            name, targets = work[-1]
            target = next(targets, None)
            if target is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[name])
                if low[name] == index[name]:
                    number = len(component)
                    while name not in component:
                        component[stack.pop()] = number
            elif target not in index:
                index[target] = low[target] = len(index)
                stack.append(target)
                work.append((target, iter(edges[target])))
            elif target not in component:
                low[name] = min(low[name], index[target])
    return component
