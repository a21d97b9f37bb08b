"""Which snapshots a prefix cache keeps: the entries, and the policies that choose among them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ggml_engine.control.machine_memory import MachineMemory, machine_memory
from ggml_engine.control.session import Session
from ggml_engine.errors import OptionError


@dataclass(frozen=True, slots=True, eq=False)
class CacheEntry:
    """A snapshot that a prefix cache keeps, or is asked to keep: `tokens` i32 [snapshot.position].

    `metadata` is the caller's. `fingerprint` is that of the session when it was inserted. Entries of different `scope`
    do not know of each other.
    """

    snapshot: Session
    tokens: npt.NDArray[np.int32]
    metadata: object
    fingerprint: str
    scope: object = None

    def is_like(self, other: CacheEntry) -> bool:
        """Whether the other one's K/V could stand for this one's, as far as their tokens are the same."""
        is_own = self.snapshot.runner is other.snapshot.runner and self.fingerprint == other.fingerprint
        return is_own and self.scope == other.scope

    def extends(self, other: CacheEntry) -> bool:
        """Whether it begins with all the tokens of the other one, or has the same."""
        n = other.tokens.size
        return self.is_like(other) and n <= self.tokens.size and np.array_equal(self.tokens[:n], other.tokens)

    def is_duplicate(self, other: CacheEntry) -> bool:
        """Whether it has the tokens of the other one, and no more."""
        return self.tokens.size == other.tokens.size and self.extends(other)


class RetentionPolicy(Protocol):
    """Chooses what goes. Called with the cache's lock held: it must not wait, nor call the cache."""

    def is_over(self) -> bool:
        """Whether an entry should go though the cache's own bounds are kept. Asked again after each that went."""

    def victim(self, entries: Sequence[CacheEntry], newcomer: CacheEntry | None) -> CacheEntry | None:
        """Which of `entries` goes, the one that was used longest ago being first; None: the newcomer is not kept.

        There is at least one; without a newcomer None ends the search.
        """


class LeastRecentlyUsed:
    """The entry goes that was inserted, or served a look-up, longest ago; whether it is a checkpoint plays no part."""

    def is_over(self) -> bool:
        """Never: the cache's own bounds are all there is."""
        return False

    def victim(self, entries: Sequence[CacheEntry], newcomer: CacheEntry | None) -> CacheEntry | None:  # noqa: ARG002
        """The first."""
        return entries[0]


class Protecting:
    """Entries of the lowest priority go first, by their metadata; the least recently used one of equals.

    `priority(metadata)` is a number; `math.inf` protects: such an entry never goes. A newcomer of a lower priority than
    all that are there is not kept. Entries that are protected still count: when they fill the cache, nothing else fits.
    (Cells are another matter: when an executor runs out of them, it takes those that snapshots alone hold.)
    """

    def __init__(self, priority: Callable[[object], float]) -> None:
        self._priority = priority

    def is_over(self) -> bool:
        """Never."""
        return False

    def victim(self, entries: Sequence[CacheEntry], newcomer: CacheEntry | None) -> CacheEntry | None:
        """The first one of the lowest priority."""
        found = min(entries, key=lambda entry: self._priority(entry.metadata))
        lowest = self._priority(found.metadata)
        if lowest == math.inf or (newcomer is not None and self._priority(newcomer.metadata) < lowest):
            return None
        return found


class UnderPressure:
    """Entries go while more than `most_used` of the machine's memory is taken, the choice being another policy's.

    The memory is measured anew each time (of the container, where that has less), so what others take counts, too.
    Where it cannot be told, nothing is over. Asked at each insert, and by `PrefixCache.trim`. An entry that goes frees
    cells for other sessions of its runner, so that their storage need not grow; storage that there is already stays
    with the executor. A machine that stays over empties the cache. Raises OptionError for a share that is none.
    """

    def __init__(
        self,
        most_used: float = 0.9,
        choice: RetentionPolicy | None = None,
        memory: Callable[[], MachineMemory | None] = machine_memory,
    ) -> None:
        if isinstance(most_used, bool) or not isinstance(most_used, (int, float)) or not 0 < most_used <= 1:
            raise OptionError(f"most_used is a share of the memory between 0 and 1, is {most_used!r}")
        self._most_used = most_used
        self._choice = choice or LeastRecentlyUsed()
        self._memory = memory

    def is_over(self) -> bool:
        """Whether more is taken now than may be, or the other policy says so."""
        now = self._memory()
        return (now is not None and now.used_share > self._most_used) or self._choice.is_over()

    def victim(self, entries: Sequence[CacheEntry], newcomer: CacheEntry | None) -> CacheEntry | None:
        """The other policy's."""
        return self._choice.victim(entries, newcomer)
