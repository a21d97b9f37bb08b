"""`ImageTable`: sessions that leave an executor as K/V images, and that come back.

What is being saved is held by clones that are no sessions, so that its sessions may go on; where an executor cannot
clone, the sessions themselves are read, and have to stay as they are up to there. When cells run out, what is held
goes too: a save that fails costs less than a generation.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ggml_engine.control.options import RunnerOptions
from ggml_engine.control.session_state import SessionState, SessionStatus
from ggml_engine.control.session_table import SessionTable
from ggml_engine.errors import (
    ContextLengthError,
    ExecutorError,
    PoolFullError,
    SessionError,
    SessionLimitError,
)
from ggml_engine.executor.image import ImageReader, ImageWriter, KvImage, Rows
from ggml_engine.executor.protocol import Executor

log = logging.getLogger("ggml_engine.control")

_LOST = "what was being saved has changed, or its cells were given to others: save it again"


@dataclass(frozen=True, slots=True)
class Source:
    """What is to be saved: a session, up to the end of `tokens` where these are given, else all that is committed."""

    state: SessionState
    tokens: npt.NDArray[np.int32] | None = None


@dataclass(slots=True, eq=False)
class HeldImage:
    """Sequences that are being saved. `taken` are the indices of the sources that they are of."""

    taken: list[int] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    pending: list[int | None] = field(default_factory=list)
    clones: list[int] = field(default_factory=list)
    borrowed: list[tuple[SessionState, list[int]]] = field(default_factory=list)
    reader: ImageReader | None = None  # None too where the executor has no images


@dataclass(slots=True, eq=False)
class IncomingImage:
    """Sequences that are being loaded: `n_sessions` places are kept for them."""

    writer: ImageWriter
    n_sessions: int
    is_snapshot: bool


class ImageTable(SessionTable):
    """A table of sessions that can be saved and loaded."""

    def __init__(self, executor: Executor, options: RunnerOptions) -> None:
        super().__init__(executor, options)
        self._held: list[HeldImage] = []
        self._incoming: list[IncomingImage] = []

    @property
    @abstractmethod
    def session_limit(self) -> int:
        """The most positions that a session can hold."""

    @abstractmethod
    def _room_beside_prefills(self) -> int:
        """Free cells that no admitted prefill will take."""

    # ---- saving

    def hold(self, sources: Sequence[Source]) -> HeldImage:
        """Keep the K/V of those sources that are open, and are what they are said to be, until `release`."""
        held = HeldImage()
        self._held.append(held)
        try:
            parts = [part for i, source in enumerate(sources) if (part := self._hold_one(held, i, source)) is not None]
            held.reader = self.executor.read_image(parts)
        except BaseException:
            self.release(held)
            raise
        return held

    def _hold_one(self, held: HeldImage, index: int, source: Source) -> tuple[int, int] | None:
        state = source.state
        if state.number not in self._sessions or state.status is not SessionStatus.OPEN:
            return None
        upto = state.position if source.tokens is None else int(source.tokens.size)
        tokens = state.tokens[:upto]
        if source.tokens is not None and tokens != source.tokens.tolist():
            return None
        held.taken.append(index)
        held.tokens.append(tokens)
        held.pending.append(state.pending)
        clone = self.executor.clone(state.sequence, upto)
        if clone is None:
            held.borrowed.append((state, tokens))
            return state.sequence, upto
        held.clones.append(clone)
        return clone, upto

    def read(self, held: HeldImage, start: int, n: int) -> Rows:
        """Rows of what is held. Raises SessionError when it is not there any more."""
        is_as_it_was = all(
            state.status is SessionStatus.OPEN and state.tokens[: len(tokens)] == tokens
            for state, tokens in held.borrowed
        )
        if held not in self._held or held.reader is None or not is_as_it_was:
            raise SessionError(_LOST)
        return held.reader.read(start, n)

    def release(self, held: HeldImage) -> None:
        """Give up what is held; idempotent."""
        if held in self._held:
            self._held.remove(held)
            for sequence in held.clones:
                try:
                    self.executor.close(sequence)
                except Exception:  # whoever needs the cells is not to blame
                    log.exception("what was held for a save could not be closed")

    def _evict_snapshot(self) -> bool:
        """As in SessionTable; what is held goes, too, where that frees cells and the end of a snapshot did not."""
        n_free = self.executor.free_cells
        has_gone = super()._evict_snapshot()
        if has_gone and self.executor.free_cells > n_free:
            return True
        return self._release_for_cells() or has_gone

    def _release_for_cells(self) -> bool:
        """Release what is held of cells that no session has; whether there was such."""
        count = self.executor.count_cells
        owners = {state.sequence for state in self._sessions.values()}
        holding = [each for each in self._held if each.clones and count(owners | set(each.clones)) > count(owners)]
        for held in holding:  # all of them: they may share these cells
            self.release(held)
        return bool(holding)

    # ---- loading

    def count_room(self, n_wanted: int) -> tuple[int, int]:
        """How many of `n_wanted` sessions could be resident besides, and how many cells they could have."""
        n_resident = len(self._sessions) + self._n_incoming
        capacity, run = self.executor.capacity, self.executor.run
        n = next((n for n in range(n_wanted, 0, -1) if not self.options.refusal(n_resident + n, capacity, run)), 0)
        return n, max(0, self._room_beside_prefills())

    def begin_image(self, image: KvImage, *, is_snapshot: bool, may_evict: bool) -> IncomingImage | None:
        """Take cells for an image; `may_evict` gives up snapshots for them, as prompts do.

        None where the executor takes no images. Raises SessionLimitError, ContextLengthError, PoolFullError and what
        the executor does, with nothing changed but that snapshots may be gone.
        """
        n_sessions = len(image.tables)
        n_resident = len(self._sessions) + self._n_incoming + n_sessions
        if reason := self.options.refusal(n_resident, self.executor.capacity, self.executor.run):
            raise SessionLimitError(reason)
        if image.lengths and max(image.lengths) > self.session_limit:
            raise ContextLengthError(max(image.lengths), self.session_limit, "the saved session")
        writer = self._writer_of(image, may_evict=may_evict)
        if writer is None:
            return None
        incoming = IncomingImage(writer, n_sessions, is_snapshot)
        self._incoming.append(incoming)
        self._n_incoming += n_sessions
        return incoming

    def _writer_of(self, image: KvImage, *, may_evict: bool) -> ImageWriter | None:
        needed = image.n_cells
        while needed > (room := self._room_beside_prefills()):
            if not may_evict or not self._evict_snapshot():
                raise PoolFullError(needed, max(0, room), self.executor.capacity, "what is loaded")
        while True:
            try:
                return self.executor.write_image(image)
            except PoolFullError:  # free cells may be at other offsets of their runs
                if not may_evict or not self._evict_snapshot():
                    raise

    def write(self, incoming: IncomingImage, rows: Rows) -> None:
        """The next rows of an image. Raises InputError for rows that cannot be, and SessionError when it was ended."""
        self._check_incoming(incoming)
        incoming.writer.write(rows)

    def commit_image(
        self, incoming: IncomingImage, tokens: Sequence[list[int]], pending: Sequence[int | None]
    ) -> list[SessionState]:
        """The sessions of an image that is all there; snapshots count as used longer ago than all other sessions."""
        self._check_incoming(incoming)
        sequences = incoming.writer.commit()
        self._end_incoming(incoming)
        try:
            if [self.executor.length(each) for each in sequences] != list(map(len, tokens)):
                raise ExecutorError("an executor opened sequences of other lengths than those of the saved ones")
        except BaseException:
            for sequence in sequences:
                self.executor.close(sequence)
            raise
        first_use = min((state.last_use for state in self.sessions), default=0)
        states = [
            self._register(sequence, list(each), is_snapshot=incoming.is_snapshot)
            for sequence, each in zip(sequences, tokens, strict=True)
        ]
        for state, token in zip(states, pending, strict=True):
            state.pending = token
        if incoming.is_snapshot:
            for last_use, state in enumerate(states, first_use - len(states)):
                state.last_use = last_use
        return states

    def _check_incoming(self, incoming: IncomingImage) -> None:
        if incoming not in self._incoming:
            raise SessionError("the loading was ended before")

    def abandon(self, incoming: IncomingImage) -> None:
        """Give up what was begun and not committed; idempotent."""
        if incoming in self._incoming:
            self._end_incoming(incoming)
            incoming.writer.close()

    def _end_incoming(self, incoming: IncomingImage) -> None:
        self._incoming.remove(incoming)
        self._n_incoming -= incoming.n_sessions

    def _end_images(self) -> None:
        """Give up everything that is being saved or loaded."""
        for held in list(self._held):
            self.release(held)
        for incoming in list(self._incoming):
            with suppress(Exception):
                self.abandon(incoming)
