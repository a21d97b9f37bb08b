"""`ResponseStore`: the conversations behind responses, for `previous_response_id`. In memory, and bounded.

What is kept of one partition is not there for another. The oldest goes first, by number and by size; a response that
is not there any more is a clear error, never an empty conversation.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from typing import Final

from ggml_engine.server.jobs import Message

MAX_RESPONSES: Final = 512
MAX_CHARS: Final = 32 << 20


class ResponseStore:
    """Messages by partition and id. For one thread."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_chars: int = MAX_CHARS) -> None:
        self._max_responses = max_responses
        self._max_chars = max_chars
        self._kept: OrderedDict[tuple[str, str], tuple[tuple[Message, ...], int]] = OrderedDict()
        self._n_chars = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, partition: str, identifier: str, messages: tuple[Message, ...]) -> None:
        """Keep a conversation, its answer included; one that is larger than all that may be kept is not."""
        n_chars = len(json.dumps(messages, ensure_ascii=False))
        if n_chars > self._max_chars:
            return
        self._kept[partition, identifier] = messages, n_chars
        self._n_chars += n_chars
        while len(self._kept) > self._max_responses or self._n_chars > self._max_chars:
            _, (_, n_dropped) = self._kept.popitem(last=False)
            self._n_chars -= n_dropped

    def find(self, partition: str, identifier: str) -> tuple[Message, ...] | None:
        """The conversation, if it is still there; it is the newest then."""
        found = self._kept.get((partition, identifier))
        if found is None:
            return None
        self._kept.move_to_end((partition, identifier))
        return found[0]
