"""What the engine knows of a session. Written by the engine thread, but for what a request claims for itself."""

from __future__ import annotations

import threading
from enum import Enum

from ggml_engine.control.generation import GenerationState
from ggml_engine.models.adapter_set import NO_ADAPTERS, AdapterSet


class SessionStatus(str, Enum):
    """Whether a session can be used."""

    OPEN = "open"
    POISONED = "poisoned"  # an executor failed under it
    EVICTED = "evicted"  # its cells were given to others
    CLOSED = "closed"


class SessionState:
    """One session: a sequence of the executor, and the tokens committed in it.

    `position` is len(tokens). `pending` is the last sampled token: not committed, and the first thing that the next
    generation commits. `active` is the generation that was asked for last and has not ended. `adapters` are those that
    its K/V are computed with.
    """

    def __init__(
        self,
        number: int,
        sequence: int,
        tokens: list[int],
        *,
        is_snapshot: bool = False,
        adapters: AdapterSet = NO_ADAPTERS,
    ) -> None:
        self.number = number
        self.sequence = sequence
        self.tokens = tokens
        self.pending: int | None = None
        self.status = SessionStatus.OPEN
        self.trouble = ""  # why it is poisoned or evicted
        self.is_snapshot = is_snapshot
        self.adapters = adapters
        self.last_use = 0
        self.close_requested = False
        self.is_single_use = False  # to be closed when its generation has ended
        self._lock = threading.RLock()  # a finalizer may come while its own thread holds it
        self._active: GenerationState | None = None

    @property
    def position(self) -> int:
        """Committed positions."""
        return len(self.tokens)

    @property
    def active(self) -> GenerationState | None:
        """The generation that has been asked for and has not ended."""
        with self._lock:
            if self._active is not None and self._active.reason is not None:
                self._active = None
            return self._active

    def claim(self, generation: GenerationState) -> bool:
        """Make `generation` the active one; False when there is one."""
        with self._lock:
            if self._active is not None and self._active.reason is None:
                return False
            self._active = generation
            return True

    def release(self, generation: GenerationState) -> None:
        """Forget a generation that has ended: its callbacks may hold the handle of this session."""
        with self._lock:
            if self._active is generation:
                self._active = None

    def refusal(self) -> str:
        """Why nothing can be computed in it; empty when it can."""
        if self.status is SessionStatus.OPEN:
            return ""
        if self.status is SessionStatus.POISONED:
            return f"the session cannot continue after an executor failure ({self.trouble}): only closing it is left"
        if self.status is SessionStatus.EVICTED:
            return f"the session's cells were given up ({self.trouble})"
        return "the session was closed"
