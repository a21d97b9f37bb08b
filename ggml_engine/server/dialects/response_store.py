"""`ResponseStore`: the conversations behind responses, for `previous_response_id`. In memory, and bounded.

What is kept of one partition is not there for another. Where there is no more room, the partition that takes most of it
loses its oldest response: one that takes no more than its share (the bound, divided by the partitions that have any)
loses none to others. A response that is not there any more is a clear error, never an empty conversation. Kept as
JSON, so that what is counted is what is taken.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Final

from ggml_engine.server.jobs import Message
from ggml_engine.serving.shares import Shares

MAX_RESPONSES: Final = 512
MAX_BYTES: Final = 32 << 20


class ResponseStore:
    """Messages by partition and id. For one thread."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._numbers = Shares(max_responses)
        self._bytes = Shares(max_bytes)
        self._kept: dict[str, OrderedDict[str, bytes]] = {}  # by partition, the oldest first

    def __len__(self) -> int:
        return self._numbers.total

    @property
    def n_bytes(self) -> int:
        """What all of them take, as JSON."""
        return self._bytes.total

    def put(self, partition: str, identifier: str, messages: tuple[Message, ...]) -> None:
        """Keep a conversation, its answer included; one that is larger than all that may be kept is not."""
        data = json.dumps(messages, ensure_ascii=False, separators=(",", ":")).encode()
        if len(data) > self._bytes.most:
            return
        if identifier in self._kept.get(partition, ()):
            self._drop(partition, identifier)
        self._kept.setdefault(partition, OrderedDict())[identifier] = data
        self._numbers.take(partition)
        self._bytes.take(partition, len(data))
        for shares in (self._numbers, self._bytes):
            while shares.total > shares.most:
                largest = shares.largest()
                self._drop(largest, next(iter(self._kept[largest])))

    def _drop(self, partition: str, identifier: str) -> None:
        kept = self._kept[partition]
        data = kept.pop(identifier)
        if not kept:
            del self._kept[partition]
        self._numbers.give_back(partition)
        self._bytes.give_back(partition, len(data))

    def find(self, partition: str, identifier: str) -> tuple[Message, ...] | None:
        """The conversation, if it is still there; it is the newest of its partition then."""
        kept = self._kept.get(partition)
        if kept is None or identifier not in kept:
            return None
        kept.move_to_end(identifier)
        return tuple(json.loads(kept[identifier]))
