"""Which rules of a grammar are alike but for their names: a schema's parts, and tools, bring the same ones again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ggml_engine.ggml.gbnf_rules import Element, components

MAX_RULES: Final = 64  # that are compared as one: a larger whole is like no other


def forms(rules: Mapping[str, Sequence[Sequence[Element]]], spans: Mapping[str, int]) -> dict[str, int]:
    """A number for each rule, the same for those that can be read in the same ways; `spans` are part of a rule.

    Whether two names stand for one rule makes a difference where both stand at an end, with the same behind them: so
    `(x | x)` is one way, and `(x | y)` two, be x and y as alike as they may.
    """
    component = components(
        {
            name: {each: True for elements in alternatives for each in elements if isinstance(each, str)}
            for name, alternatives in rules.items()
        }
    )
    numbers: dict[object, int] = {}
    parts = {name: [_parts(elements, numbers) for elements in alternatives] for name, alternatives in rules.items()}
    found: dict[str, int] = {}

    def form(rule: str) -> object:
        places = {rule: 0}
        key: list[object] = []
        todo = [rule]
        for name in todo:  # which grows
            key.append(("rule", spans.get(name)))
            for terminals, names in parts[name]:
                key.append(terminals)
                for each, is_last in names:
                    if not is_last and component[each] != component[rule]:
                        key.append(("form", found[each]))
                        continue
                    if each not in places:
                        if len(places) == MAX_RULES:
                            return rule
                        places[each] = len(places)
                        todo.append(each)
                    key.append(places[each])
        return tuple(key)

    for name in sorted(rules, key=component.__getitem__):  # what rules are made of comes before them
        found[name] = numbers.setdefault(form(name), len(numbers))
    return found


def _parts(elements: Sequence[Element], numbers: dict[object, int]) -> tuple[int, list[tuple[str, bool]]]:
    """What a sequence is but for names, as a number; and the names, with whether they are its end."""
    terminals = tuple(None if isinstance(element, str) else element for element in elements)
    last = len(elements) - 1
    names = [(element, index == last) for index, element in enumerate(elements) if isinstance(element, str)]
    return numbers.setdefault(terminals, len(numbers)), names
