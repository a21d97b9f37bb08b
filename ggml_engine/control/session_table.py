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
        self._n_incoming = 0  # sessions whose K/V is on its way in
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
        n_resident = len(self._sessions) + self._n_incoming
        return self.options.refusal(n_resident + 1, self.executor.capacity, self.executor.run)

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

        Raises SessionError (poisoned, busy, closed), PositionError, and RewindError where the executor's memory cannot,
        with nothing changed.
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
        """Give up a snapshot for the sake of its cells; whether there was one that has any to give."""
        chosen = self._snapshot_to_evict()
        if chosen is None:
            return False
        self._evict(chosen)
        return True

    def _evict_snapshot_with_tokens(self) -> bool:
        """Give up a snapshot for the sake of its sequence, whoever shares its cells; whether there was one."""
        chosen = next((state for state in self._idle_snapshots() if state.position), None)
        if chosen is None:
            return False
        self._evict(chosen)
        return True

    def _idle_snapshots(self) -> list[SessionState]:
        """Snapshots that do not generate; first the one that was used longest ago."""
        idle = [state for state in self._sessions.values() if state.is_snapshot and state.active is None]
        return sorted(idle, key=lambda state: state.last_use)

    def _snapshot_to_evict(self) -> SessionState | None:
        """The snapshot that was used longest ago, of those whose end frees cells.

        Where cells are shared among snapshots, so that the end of one alone frees none, it is the one that was used
        longest ago of those with a part in such cells. None where others than idle snapshots hold every cell.
        """
        idle = self._idle_snapshots()
        if not idle:
            return None
        owners = {state.sequence for state in self._sessions.values()}
        kept = owners - {state.sequence for state in idle}
        count = self.executor.count_cells
        n_owned, n_kept = count(owners), count(kept)
        if n_owned == n_kept:
            return None
        for state in idle:
            if count(owners - {state.sequence}) < n_owned:
                return state
        return next((state for state in idle if count(kept | {state.sequence}) > n_kept), None)

    def _evict(self, state: SessionState) -> None:
        """Give up a session for its cells, which others need."""
        self._sessions.pop(state.number)
        state.status = SessionStatus.EVICTED
        state.trouble = "others needed its cells"
        try:
            self.executor.close(state.sequence)
        except Exception:  # those who need its cells are not to blame
            log.exception("a session could not be closed")
