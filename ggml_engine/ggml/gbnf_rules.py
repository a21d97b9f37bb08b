"""What a GBNF grammar is made of, and what its rules alone say: which may be empty, and which reach each other.

Groups and repetitions are rules, too, whose names begin with a bracket: no rule of a text has such a name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Terminal:
    """What takes one character: ranges of code points, ends included; tokens are beyond the code points."""

    ranges: tuple[tuple[int, int], ...]

    def takes(self, code: int) -> bool:
        """Whether it takes the character."""
        return any(low <= code <= high for low, high in self.ranges)


Element = str | Terminal


@dataclass(slots=True)
class Rule:
    """Alternatives of elements, each the name of a rule, or what takes a character or a token."""

    alternatives: list[list[Element]] = field(default_factory=list)
    span: int = 0  # of a repetition with an end, how often at most
    copies: int = 1  # how often its elements may follow each other, where libllama writes that out


def shown(*names: str) -> str:
    """The first of them that a text has, for an error."""
    return next((name for name in names if not name.startswith("(")), "a group")


def may_be_empty(rules: dict[str, Rule]) -> set[str]:
    """The rules that may take nothing."""
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


def recursive(rules: dict[str, Rule]) -> set[str]:
    """The rules that reach themselves."""
    edges = {
        name: {each: True for elements in rule.alternatives for each in elements if isinstance(each, str)}
        for name, rule in rules.items()
    }
    component = components(edges)
    sizes = Counter(component.values())
    return {name for name in rules if sizes[component[name]] > 1 or name in edges[name]}


def components(edges: dict[str, dict[str, bool]]) -> dict[str, int]:
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
