"""`ResponseStore`: the conversations behind responses, for `previous_response_id`. In memory, and bounded.

What is kept of one partition is not there for another. Where there is no more room, the partition that takes most of it
loses its oldest response: one that takes no more than its share (the bound, divided by the partitions that have any)
loses none to others. A response that is not there any more is a clear error, never an empty conversation. Kept as
JSON, so that what is counted is what is taken.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from ggml_engine.server.jobs import Message

MAX_RESPONSES: Final = 512
MAX_BYTES: Final = 32 << 20


class _Shelf:
    """The responses of one partition, the oldest first."""

    def __init__(self) -> None:
        self.kept: OrderedDict[str, bytes] = OrderedDict()
        self.n_bytes = 0

    def put(self, identifier: str, data: bytes) -> None:
        self.drop(identifier)
        self.kept[identifier] = data
        self.n_bytes += len(data)

    def drop(self, identifier: str) -> None:
        self.n_bytes -= len(self.kept.pop(identifier, b""))


class ResponseStore:
    """Messages by partition and id. For one thread."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._shelves: dict[str, _Shelf] = {}

    def __len__(self) -> int:
        return sum(len(shelf.kept) for shelf in self._shelves.values())

    @property
    def n_bytes(self) -> int:
        """What all of them take, as JSON."""
        return sum(shelf.n_bytes for shelf in self._shelves.values())

    def put(self, partition: str, identifier: str, messages: tuple[Message, ...]) -> None:
        """Keep a conversation, its answer included; one that is larger than all that may be kept is not."""
        data = json.dumps(messages, ensure_ascii=False, separators=(",", ":")).encode()
        if len(data) > self._max_bytes:
            return
        self._shelves.setdefault(partition, _Shelf()).put(identifier, data)
        while len(self) > self._max_responses:
            self._drop_oldest(lambda shelf: len(shelf.kept))
        while self.n_bytes > self._max_bytes:
            self._drop_oldest(lambda shelf: shelf.n_bytes)

    def _drop_oldest(self, size: Callable[[_Shelf], int]) -> None:
        partition, largest = max(self._shelves.items(), key=lambda item: size(item[1]))
        largest.drop(next(iter(largest.kept)))
        if not largest.kept:
            del self._shelves[partition]

    def find(self, partition: str, identifier: str) -> tuple[Message, ...] | None:
        """The conversation, if it is still there; it is the newest of its partition then."""
        shelf = self._shelves.get(partition)
        if shelf is None or identifier not in shelf.kept:
            return None
        shelf.kept.move_to_end(identifier)
        return tuple(json.loads(shelf.kept[identifier]))
