"""`SequenceCache`: one contiguous sequence over one pool; position p is cell p.

The second layout of a cache, behind the same faces as the cell cache and by the same bookkeeping: a cell cache in which
at most one sequence is open, which therefore always lies in order. Nothing can be cloned.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggml_engine.errors import CacheError
from ggml_engine.pool.cells import CellCache
from ggml_engine.pool.window import Window


class SequenceCache(CellCache):
    """One sequence at a time. `capacity` is in cells and windows as in `CellCache`."""

    clones_anywhere = False

    def __init__(self, capacity: int, windows: Sequence[int | Window] = (0,), *, read_block: int = 256) -> None:
        super().__init__(capacity, windows, run=1, read_block=read_block)

    def open(self) -> int:
        """Opens the sequence. Raises CacheError when it is open already."""
        if self.open_sequences:
            raise CacheError(
                f"a cache of kind 'sequence' holds one sequence, {self.open_sequences[0]} is open: close it first, or "
                f"use kind 'batched_cell'"
            )
        return super().open()

    def clone(self, source: int, upto: int) -> int:
        """Raises CacheError: a second sequence would need cells of its own; UnknownSequenceError for no such source."""
        self.length(source)
        raise CacheError(f"a cache of kind 'sequence' cannot clone (asked for {upto} of sequence {source})")
