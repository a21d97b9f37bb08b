"""`FairQueue`: what waits, first come first served within a partition, and partition by partition in turns.

Not locked: who has it uses it under a lock, or on one thread.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Generic, TypeVar

from ggml_engine.serving.shares import Shares

Item = TypeVar("Item")


class FairQueue(Generic[Item]):
    """Up to `most` items, and beyond that as many of each partition as are its share (see `Shares`)."""

    def __init__(self, most: int) -> None:
        self._shares = Shares(most)
        self._lines: OrderedDict[str, deque[Item]] = OrderedDict()  # none is empty; the first one's turn it is

    def __len__(self) -> int:
        return self._shares.total

    def has_room(self, partition: str) -> bool:
        """Whether one more of a partition may wait."""
        return self._shares.has_room(partition)

    def put(self, partition: str, item: Item) -> None:
        """Add one behind those of its partition; a partition that comes anew has its turn after all others."""
        self._lines.setdefault(partition, deque()).append(item)
        self._shares.take(partition)

    def first(self) -> Item | None:
        """The one whose turn it is, None where nothing waits. Until it is taken or removed, no other one's is."""
        return next(iter(self._lines.values()))[0] if self._lines else None

    def take(self) -> Item:
        """Take out the one whose turn it is; its partition is the last one then. Raises StopIteration for none."""
        partition, line = next(iter(self._lines.items()))
        item = line[0]
        self.remove(partition, item)
        if line:
            self._lines.move_to_end(partition)
        return item

    def remove(self, partition: str, item: Item) -> None:
        """Take out any one. Raises KeyError and ValueError where it is not there."""
        line = self._lines[partition]
        line.remove(item)
        self._shares.give_back(partition)
        if not line:
            del self._lines[partition]
