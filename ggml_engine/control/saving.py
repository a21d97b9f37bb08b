"""Sessions to a file and back: on the caller's thread, with short calls of the engine thread between forwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np

from ggml_engine.control.core import Core
from ggml_engine.control.deadline import Deadline
from ggml_engine.control.image_commands import Held, Incoming, ask
from ggml_engine.control.image_table import HeldImage, Source
from ggml_engine.control.saved_file import SavedFile, write_state
from ggml_engine.control.saved_format import SavedSequence, SavedState, differences
from ggml_engine.control.session_state import SessionState, SessionStatus
from ggml_engine.errors import ContextLengthError, InputError, PoisonedError, SavedStateError, SessionError
from ggml_engine.executor.image import KvImage, Rows
from ggml_engine.executor.prepared import OPAQUE

SESSION = "session"
PREFIX_CACHE = "prefix-cache"

Handle = TypeVar("Handle")


# ---- saving


def save_session(core: Core, state: SessionState, path: Path, deadline: Deadline) -> None:
    """Write what a session has committed, and its pending token. Raises SessionError and SavedStateError."""
    if state.adapters.scaled:
        raise SavedStateError("unsavable", path, "a session with adapters cannot be saved: a file does not name them")
    held = ask(core, lambda core: Held(core, core.scheduler.hold([Source(state)])), deadline, state)
    try:
        if not held.image.taken:
            kind = PoisonedError if state.status is SessionStatus.POISONED else SessionError
            raise kind(state.refusal() or "the session was closed")
        if OPAQUE in held.image.tokens[0]:
            reason = "a session with a prepared input cannot be saved: its positions are no tokens to find it by"
            raise SavedStateError("unsavable", path, reason)
        write_held(core, held.image, SESSION, path, [None], deadline)
    finally:
        held.close()


def write_held(
    core: Core, held: HeldImage, kind: str, path: Path, metadata: Sequence[object], deadline: Deadline
) -> None:
    """Write sequences that are held, each with metadata of the caller's."""
    reader, executor = held.reader, core.scheduler.executor
    if reader is None:
        raise SavedStateError("unsavable", path, "this executor, or its kind of cache, cannot give its K/V out")
    sequences = tuple(
        SavedSequence(np.asarray(tokens, np.int32), pending, each)
        for tokens, pending, each in zip(held.tokens, held.pending, metadata, strict=True)
    )

    def read(start: int, n: int) -> Rows:
        return ask(core, lambda core: core.scheduler.read(held, start, n), deadline)

    state = SavedState(kind, executor.fingerprint, executor.description, reader.image, sequences)
    write_state(path, state, read, deadline)


# ---- loading


def check_made_for(core: Core, saved: SavedFile, kind: str) -> None:
    """Raise SavedStateError unless a file is of this kind, was made for this executor, and has tokens of its model."""
    state, executor = saved.state, core.scheduler.executor
    if state.kind != kind:
        raise SavedStateError("other-kind", saved.path, f"it is a saved {state.kind!r:.40}, a {kind} is asked for")
    if state.fingerprint != executor.fingerprint:
        known = differences(state.made_for, executor.description)
        where = f": it has {known}" if known else ", by names that are alike"
        raise SavedStateError("other-model", saved.path, f"it was made for another model or execution{where}")
    for each in state.sequences:
        ids = [0 if each.pending is None else each.pending]
        if each.tokens.size:
            ids += [int(each.tokens.min()), int(each.tokens.max())]
        if not 0 <= min(ids) <= max(ids) < executor.n_vocab:
            raise SavedStateError("damaged", saved.path, f"it has tokens that are not 0 to {executor.n_vocab - 1}")


def load_sessions(
    core: Core,
    saved: SavedFile,
    chosen: Sequence[int],
    make: Callable[[SessionState], Handle],
    deadline: Deadline,
    *,
    is_snapshot: bool = False,
) -> list[Handle]:
    """Handles of sessions made of the chosen sequences of a file that was checked.

    Snapshots that are loaded take no cells from those that are there. Raises SavedStateError, and what
    `ImageTable.begin_image` does; then nothing of them is left.
    """
    image, rows = saved.state.image.choose(chosen)
    pending = [None if is_snapshot else saved.state.sequences[i].pending for i in chosen]
    try:
        incoming = ask(core, partial(_begin, image=image, is_snapshot=is_snapshot), deadline)
        if incoming is None:
            raise SavedStateError("unsavable", saved.path, "this executor, or its kind of cache, cannot take K/V in")
        try:
            for start, part in saved.parts(deadline):
                first, last = np.searchsorted(rows, (start, start + len(part)))
                if last > first:
                    wanted = part if last - first == len(part) else part[rows[first:last] - start]
                    ask(core, partial(_write, incoming=incoming, rows=wanted), deadline)
            # not before their number was checked: a list takes several times as much
            tokens = [saved.state.sequences[i].tokens.tolist() for i in chosen]
            return ask(core, partial(_commit, incoming=incoming, tokens=tokens, pending=pending, make=make), deadline)
        finally:
            incoming.close()
    except ContextLengthError:  # an InputError too
        raise
    except InputError as error:
        raise SavedStateError("damaged", saved.path, str(error)) from None


def _begin(core: Core, image: KvImage, *, is_snapshot: bool) -> Incoming | None:
    core.make_room_for_a_session(None)
    begun = core.scheduler.begin_image(image, is_snapshot=is_snapshot, may_evict=not is_snapshot)
    return None if begun is None else Incoming(core, begun)


def _write(core: Core, incoming: Incoming, rows: Rows) -> None:
    core.scheduler.write(incoming.image, rows)


def _commit(
    core: Core,
    incoming: Incoming,
    tokens: Sequence[list[int]],
    pending: Sequence[int | None],
    make: Callable[[SessionState], Handle],
) -> list[Handle]:
    states = core.scheduler.commit_image(incoming.image, tokens, pending)
    try:
        return [make(state) for state in states]
    except BaseException:
        for state in states:
            core.scheduler.close(state)
        raise
