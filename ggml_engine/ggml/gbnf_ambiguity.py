"""Finds grammars in which the ways to read one text multiply with its length, by trying texts.

libllama keeps a stack for every way in which a text so far can be read, and walks all ways through the characters of a
token anew for each token: `([a-z]* [a-z]*)*` has a thousand million ways to read thirty letters. It does
not show its stacks, so they are followed here, from every place where something repeats, over texts as long as tokens
are: 16 characters, always the one that leaves most ways, and runs of 64 of one character. Each place has its own
bound of work, and all of them together have one; a grammar that needs more is refused.

Not found: ways that multiply only along texts that are not those of most ways at every step, or in longer ones, or
slowly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from ggml_engine.errors import InputError
from ggml_engine.ggml.gbnf_forms import forms
from ggml_engine.ggml.gbnf_rules import Element, Terminal

MAX_CHARS: Final = 16
MAX_RUN: Final = 64
MAX_WAYS: Final = 8_192  # three repetitions of the same characters in a row have 2,145 of 64 characters
MAX_BOUNDED_WAYS: Final = 512  # of runs: in its stacks libllama counts how often a bounded repetition has come
MAX_GROWTH: Final = 12  # of live stacks, between the second and the last quarter of a text
MAX_WORK: Final = 20_000  # stacks that are followed over one character, from one place
MAX_WORK_IN_ALL: Final = 60_000
MAX_ALIKE: Final = 8  # characters of a run, in a row, that change no number: ways that come later begin elsewhere
MAX_WRITTEN_OUT: Final = 128  # a longer repetition counts as one without an end
LONG_SPAN: Final = 8
MAX_CHOICES: Final = 48  # characters of which runs are tried at one place

Stack = int  # the number of one that is known: 0 has nothing on it
Rules = Mapping[str, Sequence[Sequence[Element]]]


def refuse_ambiguity(
    rules: Rules, spans: Mapping[str, int], repeating: set[str], empty: set[str], root: str = "root"
) -> None:
    """InputError where ways to read a text multiply, or where finding that out takes too much.

    `repeating` rules reach themselves; of those in `spans` only so often. `empty` rules may be empty. Rules that `root`
    does not reach count for nothing.
    """
    reached = _reached(_written_out(rules, spans), root)
    walk = _Walk(reached, {name for name, span in spans.items() if span >= LONG_SPAN})
    beginning = _beginning_with(reached, (repeating | set(spans)) & reached.keys(), empty)
    form = forms(_reached(rules, root), spans)
    rests: dict[object, int] = {}  # places with the same behind them are tried once
    tried: set[int] = set()
    for number, elements in enumerate(walk.sequences):
        rest = -1
        for index in range(len(elements) - 1, -1, -1):
            element = elements[index]
            name, _, left = element.partition("#") if isinstance(element, str) else ("", "", "")
            rest = rests.setdefault((form[name], left, rest) if name else (element, rest), len(rests))
            if isinstance(element, str) and element in beginning and rest not in tried:
                tried.add(rest)
                walk.refuse_from(number, index)


def _reached(rules: Rules, root: str) -> dict[str, Sequence[Sequence[Element]]]:
    """The rules that a text of `root` may come to."""
    found, todo = {root: rules[root]}, [root]
    while todo:
        for elements in rules[todo.pop()]:
            for element in elements:
                if isinstance(element, str) and element not in found:
                    found[element] = rules[element]
                    todo.append(element)
    return found


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
        self._counted_until = [_end_of_bounded(elements, bounded) for elements in self.sequences]
        # each stack: what lies below its top, and the top, which is a sequence and what comes next in it
        self._stacks: list[tuple[Stack, int, int]] = [(0, 0, 0)]
        self._known: dict[tuple[Stack, int, int], Stack] = {}
        self._tops: list[Element | None] = [None]
        self._is_bounded = [False]
        self._advanced: dict[Stack, tuple[Stack, ...]] = {}
        self._work = self._work_in_all = 0

    def refuse_from(self, number: int, index: int) -> None:
        """Follow from here a text of most ways, and runs of each character that may come first."""
        self._work = 0
        ways: dict[Stack, int] = dict.fromkeys(self._at_terminals(self._stack(0, number, index)), 1)
        self._follow(ways, MAX_CHARS, None)
        for code in self._most_taken(ways)[:MAX_CHOICES]:
            self._follow(ways, MAX_RUN, code)

    def _follow(self, ways: dict[Stack, int], n_chars: int, code: int | None) -> None:
        """Refuse a text of so many characters: all of them `code`, or those of most ways."""
        n_live: list[int] = []
        n_alike = 0
        while ways and len(n_live) < n_chars:
            # of the characters that most take, what takes it may end there: look at the next ones, too
            codes = self._most_taken(ways)[:4] if code is None else [code]
            before = ways
            ways = max((self._after(ways, each) for each in codes), key=lambda after: sum(after.values()), default={})
            n_live.append(len(ways))
            n_ways = sum(ways.values())
            n_alike = n_alike + 1 if (len(ways), n_ways) == (len(before), sum(before.values())) else 0
            if ways == before or (n_alike == MAX_ALIKE and code is not None):  # so it goes on
                n_live += n_live[-1:] * (n_chars - len(n_live))
                break
            is_counted = code is not None and any(map(self._is_bounded.__getitem__, ways))
            if n_ways > (MAX_BOUNDED_WAYS if is_counted else MAX_WAYS):
                raise InputError(
                    f"the grammar is too ambiguous: {n_ways} ways to read {len(n_live)} characters of one text"
                )
        quarter = MAX_RUN // 4
        if len(n_live) < MAX_RUN or any(map(self._is_bounded.__getitem__, ways)):  # the latter have an end
            return
        if n_live[-1] - max(n_live[quarter : 2 * quarter]) >= MAX_GROWTH:
            raise InputError(f"the grammar is too ambiguous: {n_live[-1]} ways to go on after {MAX_RUN} characters")

    def _most_taken(self, ways: dict[Stack, int]) -> list[int]:
        """Characters, those first that most ways take: of ranges that meet, the beginning of one is in all of them."""
        changes: dict[int, int] = {}
        lows = set()
        for stack, n_ways in ways.items():
            top = self._tops[stack]
            for low, high in top.ranges if isinstance(top, Terminal) else ():
                lows.add(low)
                changes[low] = changes.get(low, 0) + n_ways
                changes[high + 1] = changes.get(high + 1, 0) - n_ways
        taken: dict[int, int] = {}
        n_taken = 0
        for code in sorted(changes):
            n_taken += changes[code]
            if code in lows:
                taken[code] = n_taken
        return sorted(taken, key=taken.__getitem__, reverse=True)

    def _after(self, ways: dict[Stack, int], code: int) -> dict[Stack, int]:
        """The ways behind the character, without those that end there."""
        after: dict[Stack, int] = {}
        self._count(len(ways) // 16)
        for stack, n_ways in ways.items():
            top = self._tops[stack]
            if isinstance(top, Terminal) and top.takes(code):
                self._count(1)
                for following in self._at_terminals(self._without_top(stack)):
                    after[following] = after.get(following, 0) + n_ways
        after.pop(0, None)
        return after

    def _count(self, work: int) -> None:
        self._work += work
        self._work_in_all += work
        if self._work > MAX_WORK or self._work_in_all > MAX_WORK_IN_ALL:
            raise InputError(
                "the grammar is too ambiguous, or too large: its ways to read a text are too many to follow"
            )

    def _stack(self, below: Stack, number: int, index: int) -> Stack:
        """The stack with the rest of the sequence on another one: that alone where there is no rest."""
        if index >= len(self.sequences[number]):
            return below
        found = self._known.setdefault((below, number, index), len(self._stacks))
        if found == len(self._stacks):
            self._stacks.append((below, number, index))
            self._tops.append(self.sequences[number][index])
            self._is_bounded.append(self._is_bounded[below] or index < self._counted_until[number])
        return found

    def _without_top(self, stack: Stack) -> Stack:
        below, number, index = self._stacks[stack]
        return self._stack(below, number, index + 1)

    def _at_terminals(self, stack: Stack) -> tuple[Stack, ...]:
        """The stacks, as libllama has them, of which each has something on top that takes a character."""
        found = self._advanced.get(stack)
        if found is not None:
            return found
        todo, seen, ends = [stack], {stack}, []
        while todo:
            one = todo.pop()
            element = self._tops[one]
            if not isinstance(element, str):
                ends.append(one)
                continue
            below = self._without_top(one)
            for number in self._rules[element]:
                following = self._stack(below, number, 0)
                if following not in seen:
                    seen.add(following)
                    todo.append(following)
                    self._count(1)
        found = self._advanced[stack] = tuple(ends)
        return found


def _end_of_bounded(elements: Sequence[Element], bounded: set[str]) -> int:
    """Behind the last repetition with an end."""
    is_bounded = [isinstance(each, str) and each.partition("#")[0] in bounded for each in elements]
    return max((index + 1 for index, each in enumerate(is_bounded) if each), default=0)
