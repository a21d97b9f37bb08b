"""Checks a GBNF grammar (llama.cpp's grammars/README.md) before libllama compiles it.

libllama writes what is wrong to the C stderr, and some grammars never come back from it: `{5,2}` allocates without end,
left recursion hidden behind rules that may be empty loops for ever, nested brackets overflow the stack, hundreds of
optional elements in a row take hours. So a grammar that passes here is well-formed, bounded in size and width, free of
left recursion, and as ambiguous as `gbnf_ambiguity` lets pass; anything else is an InputError.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ggml_engine.errors import InputError
from ggml_engine.ggml.gbnf_ambiguity import refuse_ambiguity
from ggml_engine.ggml.gbnf_parser import parse
from ggml_engine.ggml.gbnf_rules import Rule, components, may_be_empty, recursive, shown

MAX_TEXT_CHARS: Final = 262_144
MAX_WIDTH: Final = 512
MAX_OPTIONAL: Final = 16


@dataclass(frozen=True, slots=True)
class Checked:
    """Facts about a checked grammar: the special tokens that it names by id and by text."""

    token_ids: tuple[int, ...]
    token_texts: tuple[str, ...]


def check_grammar(text: str, root: str = "root") -> Checked:
    """What the grammar names; InputError with the place and the fault when libllama should not see it."""
    if not isinstance(text, str):
        raise InputError(f"a grammar must be a str, not {type(text).__name__}")
    if len(text) > MAX_TEXT_CHARS:
        raise InputError(f"the grammar has {len(text)} characters, the limit is {MAX_TEXT_CHARS}")
    if "\0" in text or any("\ud800" <= c <= "\udfff" for c in text):
        raise InputError("the grammar holds a NUL or a lone surrogate")
    parsed = parse(text)
    rules = parsed.rules
    if root not in rules:
        raise InputError(f"the grammar has no rule {root!r}")
    for name in parsed.referenced:
        if name not in rules:
            raise InputError(f"the grammar uses the rule {name!r} but does not define it")
    empty = may_be_empty(rules)
    component = _refuse_left_recursion(rules, empty)
    _refuse_width(rules, empty, component)
    refuse_ambiguity(
        {name: rule.alternatives for name, rule in rules.items()},
        {name: rule.span for name, rule in rules.items() if rule.span > 1},
        recursive(rules),
        empty,
        root,
    )
    return Checked(parsed.token_ids, parsed.token_texts)


def _refuse_left_recursion(rules: dict[str, Rule], empty: set[str]) -> dict[str, int]:
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
    component = components(edges)
    for name, targets in edges.items():
        for target, is_followed in targets.items():
            if component[name] == component[target] and (is_followed or not target.startswith("(")):
                found = shown(name, target)
                raise InputError(f"the grammar is left-recursive: the rule {found!r} can begin with itself")
    return component


def _refuse_width(rules: dict[str, Rule], empty: set[str], component: dict[str, int]) -> None:
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
                raise InputError(f"the grammar has over {MAX_WIDTH} ways to go on at one place (in {shown(name)!r})")
