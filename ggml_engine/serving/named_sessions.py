"""`NamedSessions`: what is done with named sessions by hand, beside the requests that go on in them.

A name is claimed while something is made of its session, so that no request begins in it then, and released however
that ends: what fails leaves no new name behind. The lock is the runtime's; the engine is waited for without it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from ggml_engine.control.prefix_cache import PrefixCache
from ggml_engine.control.runner import Runner
from ggml_engine.control.saved_names import Directory
from ggml_engine.control.session import Session
from ggml_engine.errors import PositionError, SessionBusyError, SessionError, UnknownSessionError
from ggml_engine.serving.names import NamedSession, SessionInfo, SessionNames
from ggml_engine.serving.request import check_name


class NamedSessions:
    """The methods of `ServingRuntime` of the same names, which says what they do and raise.

    `check_open` raises once nothing new may begin. Any thread; those with a timeout wait for the engine.
    """

    def __init__(
        self,
        runner: Runner,
        cache: PrefixCache,
        names: SessionNames,
        lock: threading.RLock,
        clock: Callable[[], float],
        check_open: Callable[[], None],
    ) -> None:
        self._runner = runner
        self._cache = cache
        self._names = names
        self._lock = lock
        self._clock = clock
        self._check_open = check_open

    def infos(self, partition: str) -> list[SessionInfo]:
        """Those of a partition, in the order of their names."""
        with self._lock:
            infos = [named.info() for named in self._names.of(partition)]
        return sorted(infos, key=lambda info: info.name)

    def retained_tokens(self, partition: str, name: str) -> Iterator[Sequence[int] | npt.NDArray[np.int32]]:
        """The session's own row, then those of the partition's snapshots, the one that was used last first."""
        with self._lock:
            try:
                session = self._names.find((partition, name)).session
            except UnknownSessionError:
                session = None
        if session is not None and session.status == "open":
            pending = session.pending
            yield session.tokens if pending is None else [*session.tokens, pending]
        for entry in reversed(self._cache.entries):
            if entry.scope == partition:
                yield entry.tokens

    def fork(self, partition: str, source: str, name: str, at: int | None, timeout: float | None) -> SessionInfo:
        """A new name, and a clone of the first `at` tokens."""
        with self._claimed(partition, name, must_be_new=True) as named:
            session = self._begun(partition, source)
            position = session.position
            at = position if at is None else at
            if not _is_position(at, position):
                raise PositionError(f"cannot fork at {at}: the session {source!r} is at position {position}")
            future = session.clone_async(at)
            try:
                named.session = future.result(timeout)
            except TimeoutError:
                future.cancel()
                raise
            if named.session is None:
                raise SessionError(f"no clone of the session {source!r} at {at} can be had")
        return self._info(named)

    def rewind(self, partition: str, name: str, to: int, timeout: float | None) -> SessionInfo:
        """Drop what lies behind."""
        with self._claimed(partition, name, must_be_new=False) as named:
            session = named.session
            assert session is not None
            if not _is_position(to, session.position):
                raise PositionError(f"cannot rewind to {to}: the session {name!r} is at position {session.position}")
            session.rewind_async(to).result(timeout)
        return self._info(named)

    def save(self, partition: str, name: str, directory: Directory, file: str, timeout: float | None) -> None:
        """Write its file; claims nothing, since a session may be saved while it is in use."""
        self._begun(partition, name).save(directory, file, timeout)

    def load(self, partition: str, name: str, directory: Directory, file: str, timeout: float | None) -> SessionInfo:
        """A session of what was saved; the one that had the name is closed only when that is there."""
        with self._claimed(partition, name) as named:
            loaded = self._runner.load_session(directory, file, timeout)
            named.let_go(loaded)
        return self._info(named)

    def _begun(self, partition: str, name: str) -> Session:
        """The session of a name. Raises UnknownSessionError, and SessionError for one that has not begun."""
        with self._lock:
            session = self._names.find((partition, name)).session
        if session is None:
            raise SessionError(f"the session {name!r} has not begun")
        return session

    @contextmanager
    def _claimed(self, partition: str, name: str, *, must_be_new: bool | None = None) -> Iterator[NamedSession]:
        """Use a name for something else than a request. `must_be_new` None is either."""
        check_name(name)
        key = (partition, name)
        with self._lock:
            self._check_open()
            try:
                self._names.find(key)
            except UnknownSessionError:
                if must_be_new is False:
                    raise
            else:
                if must_be_new:
                    raise SessionBusyError(f"there is a session {name!r} already")
            named = self._names.claim(key, self._clock())
        try:
            yield named
        finally:
            with self._lock:
                self._names.release(named, self._clock())

    def _info(self, named: NamedSession) -> SessionInfo:
        with self._lock:
            return named.info()


def _is_position(given: object, most: int) -> bool:
    return isinstance(given, int) and not isinstance(given, bool) and 0 < given <= most
