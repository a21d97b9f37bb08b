"""`SessionTable`: the resident sessions of one executor, and what they share of it."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod

from ggml_engine.control.options import RunnerOptions
from ggml_engine.control.session_state import SessionState, SessionStatus
from ggml_engine.errors import PoisonedError, PositionError, SessionBusyError, SessionError, SessionLimitError
from ggml_engine.executor.protocol import Executor
from ggml_engine.models.adapter_set import NO_ADAPTERS, AdapterSet

log = logging.getLogger("ggml_engine.control")


class SessionTable(ABC):
    """Sessions by number: opened, cloned and rewound. Who generates in them is the scheduler's to know.

    Raises OptionError for options that the executor cannot keep.
    """

    def __init__(self, executor: Executor, options: RunnerOptions) -> None:
        options.check(executor.capacity)
        self.executor = executor
        self.options = options
        self._sessions: dict[int, SessionState] = {}
        self._next_number = 0
        self._n_uses = 0

    @abstractmethod
    def is_generating(self, state: SessionState) -> bool:
        """Whether a generation of this session has not ended."""

    @property
    def sessions(self) -> tuple[SessionState, ...]:
        """All that are resident."""
        return tuple(self._sessions.values())

    def open(self, adapters: AdapterSet | None = None) -> SessionState:
        """A new, empty session, with these adapters or the executor's own.

        Raises SessionLimitError, and OptionError for adapters that the executor does not take.
        """
        self._admit_session()
        wanted = self.executor.adapters if adapters is None else adapters
        return self._register(self.executor.open(wanted), [], adapters=wanted)

    def _admit_session(self) -> None:
        if reason := self._refusal():
            raise SessionLimitError(reason)

    def _refusal(self) -> str:
        return self.options.refusal(len(self._sessions) + 1, self.executor.capacity, self.executor.run)

    @property
    def has_room(self) -> bool:
        """Whether one more session can be resident."""
        return not self._refusal()

    def _register(
        self, sequence: int, tokens: list[int], *, is_snapshot: bool = False, adapters: AdapterSet = NO_ADAPTERS
    ) -> SessionState:
        state = SessionState(self._next_number, sequence, tokens, is_snapshot=is_snapshot, adapters=adapters)
        self._next_number += 1
        self._sessions[state.number] = state
        self._touch(state)
        return state

    def _touch(self, state: SessionState) -> None:
        self._n_uses += 1
        state.last_use = self._n_uses

    def clone(self, source: SessionState, upto: int, *, is_snapshot: bool = False) -> SessionState | None:
        """A session of the first `upto` committed positions of `source`, or None where that cannot be had."""
        if source.number not in self._sessions or source.status is not SessionStatus.OPEN:
            return None
        if not 0 <= upto <= source.position or not self.has_room:
            return None
        sequence = self.executor.clone(source.sequence, upto)
        if sequence is None:
            return None
        try:
            is_exact = self.executor.length(sequence) == upto
        except BaseException:
            self.executor.close(sequence)
            raise
        if not is_exact:
            self.executor.close(sequence)
            return None
        self._touch(source)
        return self._register(sequence, source.tokens[:upto], is_snapshot=is_snapshot, adapters=source.adapters)

    def rewind(self, state: SessionState, to: int) -> int:
        """Drop what a session holds from position `to` on, its pending token too; the new position.

        Raises SessionError (poisoned, busy, closed) and PositionError, with nothing changed.
        """
        if state.status is SessionStatus.POISONED:
            raise PoisonedError(state.refusal())
        if state.number not in self._sessions or state.status is not SessionStatus.OPEN:
            raise SessionError(state.refusal() or "the session was closed")
        if self.is_generating(state):
            raise SessionBusyError("a session cannot be rewound while it generates: cancel the generation first")
        if not 0 <= to <= state.position:
            raise PositionError(f"cannot rewind to {to}: the session is at position {state.position}")
        self.executor.rewind(state.sequence, to)
        del state.tokens[to:]
        state.pending = None
        return to

    def _evict_snapshot(self) -> bool:
        """Give up the cells of the snapshot that was used longest ago; whether there was one."""
        snapshots = [state for state in self._sessions.values() if state.is_snapshot and state.active is None]
        if not snapshots:
            return False
        oldest = min(snapshots, key=lambda state: state.last_use)
        self._sessions.pop(oldest.number)
        oldest.status = SessionStatus.EVICTED
        oldest.trouble = "others needed its cells"
        try:
            self.executor.close(oldest.sequence)
        except Exception:  # those who need its cells are not to blame
            log.exception("a snapshot could not be closed")
        return True
