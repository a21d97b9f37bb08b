"""What a chat template may cost, and the meter that counts it while one renders.

A template comes with a model file, that is from a stranger, and a thread cannot be interrupted. So every operation
whose cost depends on a value's size asks the meter *before* it runs, and every loop turn and macro call pays for the
size of its body. Invariants: between two questions to the meter only a bounded amount of work is done; the bytes that
a rendering allocates, freed or not, stay below `Limits.n_bytes`. Knows nothing of Jinja.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any

from ggml_engine.errors import ChatTemplateError

# A container nested deeper than this is refused: printing, comparing and hashing it recurse natively.
MAX_DEPTH = 96
# Work is about 64 characters of a string operation, one value of a container, or one node of the template.
CHARS_PER_WORK = 64
# Work between two looks at the clock: a few milliseconds.
WORK_PER_CLOCK = 10_000
# An integer wider than this has no use in a prompt; wider ones make arithmetic and printing slow.
MAX_INT_BITS = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds of one chat template. The defaults are far above what the known templates need.

    `source_bytes`, `n_tokens` and `n_nodes` bound the source (UTF-8 bytes, lexer tokens, syntax nodes), `work` and
    `seconds` the time of one rendering, `n_chars` each string and the output, `n_bytes` all that one rendering
    allocates.
    """

    source_bytes: int = 256 * 1024
    n_tokens: int = 40_000
    n_nodes: int = 20_000
    work: int = 4_000_000
    seconds: float = 2.0
    n_chars: int = 8 * 1024 * 1024
    n_bytes: int = 128 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Size:
    """Extent of a value: how many values it is made of (as a tree), their characters, and how deep it nests."""

    n_values: int
    n_chars: int
    depth: int


class Stream:
    """What `map`, `select` and their like give: iterated once, as the generators of plain Jinja are.

    Already computed, so that its size is known; true even when empty, as a generator is.
    """

    __slots__ = ("_iterator", "items")

    def __init__(self, items: list[Any]) -> None:
        self.items = items
        self._iterator = iter(items)

    def __iter__(self) -> Iterator[Any]:
        return self._iterator

    def __len__(self) -> int:
        return len(self.items)

    def __bool__(self) -> bool:
        return True


_CONTAINERS: tuple[type, ...] = (list, tuple, type({}.keys()), type({}.values()), type({}.items()))


def children(value: Any) -> Collection[Any] | None:
    """The values directly inside a container; None for anything that is not one."""
    if isinstance(value, _CONTAINERS):
        return value  # type: ignore[return-value, no-any-return, unused-ignore]
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, Stream):
        return value.items
    return None


class Meter:
    """Counts the cost of one rendering and raises `ChatTemplateError` when a limit is reached."""

    __slots__ = ("_bytes", "_clock_at", "_deadline", "_work", "limits", "macro_depth")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.macro_depth = 0
        self._work = limits.work
        self._bytes = limits.n_bytes
        self._clock_at = limits.work
        self._deadline = time.monotonic() + limits.seconds

    def spend(self, work: int) -> None:
        """Pays for `work` units, before they are done."""
        self._work -= work
        if self._work < self._clock_at:
            self._check()

    def _check(self) -> None:
        self._clock_at = self._work - WORK_PER_CLOCK
        if self._work < 0:
            raise ChatTemplateError(f"the chat template does more than {self.limits.work} steps of work")
        if time.monotonic() > self._deadline:
            raise ChatTemplateError(f"the chat template takes longer than {self.limits.seconds:g} s")

    def allot(self, n_bytes: int) -> None:
        """Pays for memory, before it is allocated."""
        self._bytes -= n_bytes
        if self._bytes < 0:
            raise ChatTemplateError(f"the chat template needs more than {self.limits.n_bytes >> 20} MiB of memory")

    def new_text(self, n_chars: int, *sources: str) -> None:
        """Pays for a string of `n_chars` characters that is made of the characters of `sources`."""
        if n_chars > self.limits.n_chars:
            raise ChatTemplateError(
                f"the chat template builds a text of {n_chars} characters, the limit is {self.limits.n_chars}"
            )
        width = 1 if all(source.isascii() for source in sources) else 4
        self.spend(1 + n_chars // CHARS_PER_WORK)
        self.allot(n_chars * width)

    def new_list(self, n_items: int, n_bytes_each: int = 8) -> None:
        """Pays for a list of `n_items`, each of which takes `n_bytes_each` (8: only the reference)."""
        self.allot(n_items * n_bytes_each)
        self.spend(1 + n_items)

    def weigh(self, *values: Any) -> Size:
        """Pays for a walk over `values` as trees (a value met twice counts twice) and returns their extent."""
        n_values = n_chars = deepest = 0
        level: list[Any] = list(values)
        while level:
            deepest += 1
            if deepest > MAX_DEPTH:
                raise ChatTemplateError(f"the chat template nests values deeper than {MAX_DEPTH}")
            below: list[Any] = []
            for value in level:
                n_values += 1
                if isinstance(value, str):
                    n_chars += len(value)
                    self.spend(1 + len(value) // CHARS_PER_WORK)
                elif isinstance(value, range):
                    n_values += len(value)
                    self.spend(1 + len(value))
                elif (inside := children(value)) is not None:
                    self.new_list(len(inside))
                    below.extend(inside)
            level = below
        return Size(n_values, n_chars, deepest)


class Metered:
    """A loop's iterable, of which every turn pays for the loop's body."""

    __slots__ = ("_iterable", "_meter", "_work")

    def __init__(self, meter: Meter, iterable: Any, work: int) -> None:
        self._meter = meter
        self._iterable = iterable
        self._work = work

    def __iter__(self) -> Iterator[Any]:
        spend, work = self._meter.spend, self._work
        for item in self._iterable:
            spend(work)
            yield item

    def __len__(self) -> int:
        return len(self._iterable)
