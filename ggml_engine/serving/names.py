"""`SessionNames`: named sessions by partition and name, who uses each, and which of them goes.

A partition that holds less than its share finds room while others hold more than theirs. Not locked: the runtime's lock
is held around it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ggml_engine.control.session import Session
from ggml_engine.errors import SessionBusyError, SessionLimitError, UnknownSessionError

Key = tuple[str, str]  # partition, name


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """A named session: `position` is how many tokens are committed in it, `last_used_s` by the runtime's clock."""

    name: str
    position: int
    is_busy: bool
    last_used_s: float


@dataclass(slots=True, eq=False)
class NamedSession:
    """A name, and the session that goes by it; None before its first one was opened, and where that was lost."""

    key: Key
    last_used: float
    session: Session | None = None
    is_busy: bool = True
    is_gone: bool = False  # closed under whoever uses it, who then lets go of the session

    def info(self) -> SessionInfo:
        """What callers are told of it."""
        session = self.session  # who uses it may take another in its place meanwhile
        position = 0 if session is None else session.position
        return SessionInfo(self.key[1], position, self.is_busy, self.last_used)

    def let_go(self, then: Session | None = None) -> None:
        """Close its session, and go on in another, where there is one."""
        session, self.session = self.session, then
        if session is not None:
            session.close()


class SessionNames:
    """Up to `most` named sessions."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._by_key: dict[Key, NamedSession] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[NamedSession]:
        return iter(list(self._by_key.values()))

    def find(self, key: Key) -> NamedSession:
        """The one of that name. Raises UnknownSessionError."""
        found = self._by_key.get(key)
        if found is None or (not found.is_busy and not _is_open(found)):
            raise UnknownSessionError(f"there is no session {key[1]!r}")
        return found

    def claim(self, key: Key, now: float) -> NamedSession:
        """The one of that name, made where there is none, for one user until `release`.

        Where there are too many, the idle one that was used longest ago is closed for a new one, of the partition that
        has most. Raises SessionBusyError, and SessionLimitError where none is idle, or only those of partitions that
        have fewer.
        """
        found = self._by_key.get(key)
        if found is None:
            self._make_room(key[0])
            found = self._by_key[key] = NamedSession(key, now)
        elif found.is_busy:
            raise SessionBusyError(f"the session {key[1]!r} is in use: its request has not ended")
        found.is_busy = True
        return found

    def _make_room(self, partition: str) -> None:
        """Close the idle one that was used longest ago, of the partition that has most where others have more."""
        if len(self._by_key) < self._most:
            return
        held = Counter(holder for holder, _ in self._by_key)
        # none of a partition that has fewer than the asker's
        idle = [each for each in self if not each.is_busy and held[each.key[0]] >= held[partition]]
        if not idle:
            raise SessionLimitError(f"all of the {self._most} sessions that may be kept (max_sessions) are in use")
        most = max(held[each.key[0]] for each in idle)
        self.remove(min((each for each in idle if held[each.key[0]] == most), key=lambda each: each.last_used))

    def release(self, named: NamedSession, now: float) -> None:
        """Its user has done: it is idle, or gone where it has no session that could go on."""
        named.is_busy, named.last_used = False, now
        if named.is_gone:
            named.let_go()
        elif named.session is not None and named.session.status == "open" and named.session.position:
            named.session.yield_when_idle()
        else:
            self.remove(named)

    def remove(self, named: NamedSession) -> None:
        """Forget the name; its session is closed, by its user where there is one."""
        if self._by_key.get(named.key) is named:
            del self._by_key[named.key]
        named.is_gone = True
        if not named.is_busy:
            named.let_go()

    def remove_idle(self, now: float, idle_s: float) -> int:
        """Forget those that nobody used for `idle_s` seconds; how many."""
        old = [each for each in self if not each.is_busy and now - each.last_used >= idle_s]
        for named in old:
            self.remove(named)
        return len(old)

    def last_use_of_idle(self) -> float | None:
        """When the one that is idle longest was used last; None where none is idle."""
        return min((each.last_used for each in self if not each.is_busy), default=None)

    def of(self, partition: str) -> list[NamedSession]:
        """Those of a partition that have a session or are in use."""
        return [each for each in self if each.key[0] == partition and (each.is_busy or _is_open(each))]


def _is_open(named: NamedSession) -> bool:
    session = named.session
    return session is not None and session.status == "open"
