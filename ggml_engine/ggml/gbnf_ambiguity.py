"""Finds grammars in which the ways to read one text multiply with its length, by trying texts.

libllama keeps a stack for every way in which a text so far can be read, and walks all ways through the characters of a
token anew for each token: `([a-z]* [a-z]*)*` has a thousand million ways to read thirty letters. It does
not show its stacks, so they are followed here, from every place where something repeats, over texts as long as tokens
are: 16 characters, always the one that leaves most ways, and runs of 64 of one character.

Not found: ways that multiply only along texts that are not those of most ways at every step, or in longer ones, or
slowly; and what lies behind the bound of work in large grammars.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from ggml_engine.errors import InputError
from ggml_engine.ggml.gbnf_rules import Element

MAX_CHARS: Final = 16
MAX_RUN: Final = 64
MAX_WAYS: Final = 8_192  # three repetitions of the same characters in a row have 2,145 of 64 characters
MAX_BOUNDED_WAYS: Final = 512  # of runs: in its stacks libllama counts how often a bounded repetition has come
MAX_GROWTH: Final = 12  # of live stacks, between the second and the last quarter of a text
MAX_WORK: Final = 50_000  # stacks that are followed over one character, in all
MAX_WRITTEN_OUT: Final = 128  # a longer repetition counts as one without an end
LONG_SPAN: Final = 8
MAX_CHOICES: Final = 48  # characters that are tried at one place

Position = tuple[int, int]  # the number of a sequence, and what comes next in it
Stack = tuple[Position, ...]
Rules = Mapping[str, Sequence[Sequence[Element]]]


def refuse_ambiguity(rules: Rules, spans: Mapping[str, int], repeating: set[str], empty: set[str]) -> None:
    """InputError where ways to read a text multiply.

    `repeating` rules reach themselves; of those in `spans` only so often. `empty` rules may be empty.
    """
    walk = _Walk(_written_out(rules, spans), {name for name, span in spans.items() if span >= LONG_SPAN})
    beginning = _beginning_with(rules, repeating | set(spans), empty)
    for number, elements in enumerate(walk.sequences):
        for index, element in enumerate(elements):
            if isinstance(element, str) and element in beginning:
                walk.refuse_from((number, index))
                if walk.work > MAX_WORK:
                    return


def _written_out(rules: Rules, spans: Mapping[str, int]) -> dict[str, Sequence[Sequence[Element]]]:
    """The rules, short bounded repetitions as libllama writes them: a rule for each time that is left."""
    found = dict(rules)
    for name, span in spans.items():
        if span > MAX_WRITTEN_OUT:
            continue
        item = rules[name][0][:-1]
        for left in range(span, 0, -1):
            own = name if left == span else f"{name}#{left}"
            found[own] = [[*item, f"{name}#{left - 1}"] if left > 1 else list(item), []]
    return found


def _beginning_with(rules: Rules, names: set[str], empty: set[str]) -> set[str]:
    """The names, and the rules that may begin with one of them."""
    before: dict[str, set[str]] = {}
    for name, alternatives in rules.items():
        for elements in alternatives:
            for element in elements:
                if not isinstance(element, str):
                    break
                before.setdefault(element, set()).add(name)
                if element not in empty:
                    break
    found, todo = set(names), list(names)
    while todo:
        new = before.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


class _Walk:
    def __init__(self, rules: Rules, bounded: set[str]) -> None:
        self.sequences: list[Sequence[Element]] = []
        self._rules: dict[str, list[int]] = {}
        for name, alternatives in rules.items():
            self._rules[name] = list(range(len(self.sequences), len(self.sequences) + len(alternatives)))
            self.sequences += alternatives
        self._bounded = bounded
        self._advanced: dict[Stack, tuple[Stack, ...]] = {}
        self.work = 0

    def refuse_from(self, start: Position) -> None:
        """Follow from here a text of most ways, and runs of each character that may come first."""
        ways: dict[Stack, int] = dict.fromkeys(self._at_terminals((start,)), 1)
        self._follow(ways, MAX_CHARS, None)
        for code in self._choices(ways):
            self._follow(ways, MAX_RUN, code)

    def _follow(self, ways: dict[Stack, int], n_chars: int, code: int | None) -> None:
        """Refuse a text of so many characters: all of them `code`, or those of most ways."""
        n_live: list[int] = []
        while ways and len(n_live) < n_chars and self.work <= MAX_WORK:
            ways = self._most_ways(ways, self._choices(ways) if code is None else [code])
            n_live.append(len(ways))
            n_ways = sum(ways.values())
            is_counted = code is not None and any(map(self._is_bounded, ways))
            if n_ways > (MAX_BOUNDED_WAYS if is_counted else MAX_WAYS):
                raise InputError(
                    f"the grammar is too ambiguous: {n_ways} ways to read {len(n_live)} characters of one text"
                )
        quarter = MAX_RUN // 4
        if len(n_live) < MAX_RUN or any(map(self._is_bounded, ways)):  # the latter have an end
            return
        if n_live[-1] - max(n_live[quarter : 2 * quarter]) >= MAX_GROWTH:
            raise InputError(f"the grammar is too ambiguous: {n_live[-1]} ways to go on after {MAX_RUN} characters")

    def _choices(self, ways: dict[Stack, int]) -> list[int]:
        """Characters of which one is taken by most: of ranges that meet, the beginning of one is in all of them."""
        return sorted({low for stack in ways if stack for low, _ in self._top(stack).ranges})[:MAX_CHOICES]

    def _most_ways(self, ways: dict[Stack, int], codes: Sequence[int]) -> dict[Stack, int]:
        """After the character that leaves most ways."""
        tops = {stack: self._top(stack) for stack in ways if stack}
        counts = {code: sum(ways[stack] for stack, top in tops.items() if top.takes(code)) for code in codes}
        best: dict[Stack, int] = {}
        # what takes it may end there: look at the next ones, too
        for code in sorted(codes, key=counts.__getitem__, reverse=True)[:4]:
            after: dict[Stack, int] = {}
            for stack, top in tops.items():
                if top.takes(code):
                    self.work += 1
                    for following in self._at_terminals(self._without_top(stack)):
                        after[following] = after.get(following, 0) + ways[stack]
            after.pop((), None)
            if sum(after.values()) > sum(best.values()):
                best = after
        return best

    def _top(self, stack: Stack) -> Any:
        number, index = stack[-1]
        return self.sequences[number][index]

    def _without_top(self, stack: Stack) -> Stack:
        number, index = stack[-1]
        rest = stack[:-1]
        return (*rest, (number, index + 1)) if index + 1 < len(self.sequences[number]) else rest

    def _at_terminals(self, stack: Stack) -> tuple[Stack, ...]:
        """The stacks, as libllama has them, of which each has something on top that takes a character."""
        found = self._advanced.get(stack)
        if found is not None:
            return found
        todo, seen, ends = [stack], {stack}, []
        while todo:
            one = todo.pop()
            element = self._top(one) if one else None
            if not isinstance(element, str):
                ends.append(one)
                continue
            rest = self._without_top(one)
            for number in self._rules[element]:
                following = (*rest, (number, 0)) if self.sequences[number] else rest
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
        self.work += len(seen)
        found = self._advanced[stack] = tuple(ends)
        return found

    def _is_bounded(self, stack: Stack) -> bool:
        elements = (each for number, index in stack for each in self.sequences[number][index:])
        return any(isinstance(each, str) and each.partition("#")[0] in self._bounded for each in elements)
