"""`Beginning`: the session that a request begins in.

Its own where the prompt begins with all that this holds, a clone of what they share where it branches off, a clone of
the longest snapshot where that has more, a new one else, and for who wants nothing cached. Every step is the control
thread's, and none waits: what the engine has to do first posts the next step when it has settled. What is found for a
request that was cancelled meanwhile is closed.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TypeVar

from ggml_engine.control.prefix_match import Lookup
from ggml_engine.control.scheduler import common_prefix
from ggml_engine.control.session import Session
from ggml_engine.serving.names import NamedSession
from ggml_engine.serving.shared import Shared

Found = TypeVar("Found", Lookup, Session)


class Beginning:
    """Finds a session for `tokens`, the prompt of a request, among those of one `scope`.

    `begin` is called with it, which has the place of the `named` one then, and with whether it is new there; or
    `give_up` with why there is none: an error, or None for a request that `is_cancelled`. Where nothing of a cache is
    wanted (`may_reuse`) it is a new one.
    """

    def __init__(
        self,
        shared: Shared,
        scope: str,
        tokens: list[int],
        named: NamedSession | None,
        may_reuse: bool,
        is_cancelled: Callable[[], bool],
        begin: Callable[[Session, bool], object],
        give_up: Callable[[BaseException | None], object],
    ) -> None:
        self._shared = shared
        self._scope = scope
        self._tokens = tokens
        self._named = named
        self._may_reuse = may_reuse
        self._is_cancelled = is_cancelled
        self._begin = begin
        self._give_up = give_up
        self._pending: Future[Session] | Future[Lookup] | None = None
        self._own_tried = False

    def find(self) -> None:
        """Look for it; again where one was lost before anything came of it."""
        if self._is_cancelled():
            self._give_up(None)
            return
        if not self._may_reuse:
            self._open()
            return
        n_shared, cache = self._n_shared(), self._shared.cache
        if n_shared and n_shared >= cache.count_reusable(self._shared.runner, self._tokens, scope=self._scope):
            self._begin_in_own(n_shared)
        else:
            self._look_up()

    def cancel_pending(self) -> bool:
        """Whether something is on its way that can be cancelled; it is, and `give_up` follows."""
        if self._pending is None:
            return False
        self._pending.cancel()
        return True

    @property
    def _own(self) -> Session | None:
        """The session that goes by the request's name."""
        session = None if self._named is None else self._named.session
        return session if session is not None and session.status == "open" else None

    def _n_shared(self) -> int:
        """How many tokens of the prompt the own session holds."""
        own = self._own
        return 0 if own is None else common_prefix(own.tokens, self._tokens)

    def _begin_in_own(self, n_shared: int) -> None:
        self._own_tried = True
        own = self._own
        if own is None:
            self._look_up()
        elif n_shared == own.position < len(self._tokens):
            self._begin(own, False)
        else:
            self._branch(own, min(n_shared, len(self._tokens) - 1))

    def _branch(self, source: Session, n_shared: int) -> None:
        """Go on from a clone of what the session shares with the prompt, in its place; anew where there is no lane."""
        lane = self._shared.lanes.take() if n_shared else None
        if lane is None:
            self._look_up()
            return

        def settle(future: Future[Session | None]) -> None:
            self._shared.post(partial(self._branched, future.result()))
            lane.release()

        source.clone_async(n_shared).add_done_callback(settle)

    def _branched(self, session: Session | None) -> None:
        if session is not None:
            self._take(session)
        elif self._is_cancelled():
            self._give_up(None)
        else:
            self._look_up()

    def _look_up(self) -> None:
        if not self._shared.cache.max_entries:
            self._open()
            return
        future = self._shared.cache.lookup_async(self._shared.runner, self._tokens, scope=self._scope)
        self._await(future, self._looked_up)

    def _looked_up(self, found: Lookup) -> None:
        n_own = 0 if self._own_tried or self._is_cancelled() else self._n_shared()
        if found.session is not None and n_own <= found.n_reused:
            self._take(found.session)
            return
        if found.session is not None:  # the snapshot with more could not be cloned
            found.session.close()
        if self._is_cancelled():
            self._give_up(None)
        elif n_own:
            self._begin_in_own(n_own)
        else:
            self._open()

    def _open(self) -> None:
        self._await(self._shared.runner.open_session_async(), self._take)

    def _await(self, future: Future[Found], then: Callable[[Found], None]) -> None:
        self._pending = future
        future.add_done_callback(lambda done: self._shared.post(partial(self._awaited, done, then)))

    def _awaited(self, future: Future[Found], then: Callable[[Found], None]) -> None:
        self._pending = None
        if future.cancelled():
            self._give_up(None)
        elif (error := future.exception()) is not None:
            self._give_up(error)
        else:
            then(future.result())

    def _take(self, session: Session) -> None:
        """Begin in a session of this request's own, which takes the place of the named one."""
        if self._is_cancelled():
            session.close()
            self._give_up(None)
            return
        if self._named is not None:
            self._named.let_go(session)
        self._begin(session, True)
