"""`LlamaMemory`: what libllama's memory holds for our sequences.

Owns which of libllama's sequence ids ("slots") stands for which sequence: a sequence has one from its first token to
its end, since there are few. Does not know tokens or logits, and counts no cells.

libllama gives cells that are out of their sequence's window to others, in a full-size memory too, but only where one
slot alone holds them. So in models with windows one slot, the keeper, holds every cell besides: no history is lost.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from ggml_engine.ggml.llama_context import LlamaContext


class LlamaMemory:
    """`n_sequences` slots, and one more. `keeps_positions` is `LlamaModel`'s: without it a slot can be shared as a
    whole, and emptied, and nothing else.
    """

    def __init__(self, context: LlamaContext, n_sequences: int, *, keeps_positions: bool, has_windows: bool) -> None:
        self._context = context
        self._keeps_positions = keeps_positions
        self._keeper = n_sequences if has_windows and keeps_positions else None
        self._slots: dict[int, int] = {}
        self._free = list(range(n_sequences - 1, -1, -1))

    @property
    def n_free(self) -> int:
        """How many more sequences can have tokens."""
        return len(self._free)

    def count_missing(self, sequences: Iterable[int]) -> int:
        """How many of these distinct sequences have no slot."""
        return sum(sequence not in self._slots for sequence in sequences)

    def slots(self, sequences: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
        """The slot of each of these, i32 [n]; those that have none get one, and there must be enough."""
        distinct, places = np.unique(sequences, return_inverse=True)
        for sequence in distinct.tolist():
            if sequence not in self._slots:
                self._slots[sequence] = self._free.pop()
        slots: npt.NDArray[np.int32] = np.array([self._slots[each] for each in distinct.tolist()], np.int32)[places]
        return slots

    def keep(self, begins: Iterable[tuple[int, int]]) -> None:
        """These sequences have been given positions from `begin` on."""
        if self._keeper is not None:
            for sequence, begin in begins:
                self._context.share(self._slots[sequence], self._keeper, begin, -1)

    def cut(self, sequence: int, to: int) -> bool:
        """Drop what is held from position `to` on; False, with nothing changed, where the memory cannot."""
        slot = self._slots.get(sequence)
        if slot is None:
            return True
        if not self._context.remove(slot, to):
            return False
        if self._keeper is not None:
            self._context.remove(self._keeper, to)
            for other in self._slots.values():
                if other != slot:
                    self._context.share(other, self._keeper, to, -1)
        if not to:
            self._free.append(self._slots.pop(sequence))
        return True

    def share(self, source: int, sequence: int, upto: int) -> bool:
        """Let a new sequence hold the first `upto` positions of `source`; False where that cannot be had."""
        if upto:
            if not self._free or not (self._keeps_positions or self._context.length(self._slots[source]) == upto):
                return False
            slot = self._slots[sequence] = self._free.pop()
            self._context.share(self._slots[source], slot, 0, upto if self._keeps_positions else -1)
        return True
