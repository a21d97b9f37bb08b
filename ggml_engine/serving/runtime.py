"""`ServingRuntime`: requests of many callers over one runner.

Submits check and queue, on the caller's thread; the runtime's control thread does the rest, and never waits for the
engine. The lock guards who waits, who runs and who uses which session; nothing is waited for under it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import TracebackType

import numpy as np
import numpy.typing as npt

from ggml_engine.control.generation import Reason
from ggml_engine.control.prefix_cache import PrefixCache
from ggml_engine.control.runner import SHUTDOWN_S, Runner
from ggml_engine.control.saved_names import Directory
from ggml_engine.errors import (
    ClosedError,
    ContextLengthError,
    InputError,
    OptionError,
    PositionError,
    QueueFullError,
    SessionBusyError,
    SessionError,
    UnknownSessionError,
    WouldBlockError,
)
from ggml_engine.serving.control_thread import ControlThread
from ggml_engine.serving.durations import Durations
from ggml_engine.serving.job import Job, Shared
from ggml_engine.serving.lanes import LanePool
from ggml_engine.serving.names import NamedSession, SessionInfo, SessionNames
from ggml_engine.serving.options import ServingOptions
from ggml_engine.serving.reply import Listener, Reply
from ggml_engine.serving.request import ServingRequest, check_name
from ggml_engine.serving.waiting import FairQueue

_ABANDON_S = 5.0  # the control thread waits for nothing, so it comes at once
_ENDS = ("finished", "cancelled", "failed", "shutdown")


class ServingRuntime:
    """Named sessions, requests without a name, the prefix cache that they share, and a bounded queue, over `runner`.

    A request that names a session goes on in it: where its prompt begins with all that the session holds, the rest is
    evaluated; where it branches off, a clone of what they share takes the session's place. A request without a name,
    and a session's first one, begins after the longest snapshot that there is. `options` says which prompts are
    captured. Logits after reused tokens differ from those of a cold run unless the geometry is the same: see
    `PrefixCache`.

    The runner is the caller's, must have room for `options.resident_sessions` sessions, and should be shut down after
    this. Cells of idle named sessions are given to others when they run out, as those of snapshots are: a session that
    was lost begins anew, after what the cache still has. All methods may be called from any thread; those that take a
    timeout wait, and raise WouldBlockError in a callback. `clock` is in seconds. Raises OptionError for options that
    the runner cannot keep.
    """

    def __init__(
        self, runner: Runner, options: ServingOptions | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.options = options or ServingOptions()
        self.options.check_room(runner.options.max_sessions)
        self.runner = runner
        most = self.options.max_session_tokens
        self._limit = min(runner.session_limit, runner.executor.capacity, *([] if most is None else [most]))
        self._clock = clock
        self.cache = PrefixCache(self.options.prefix_cache_entries, replace_extended=runner.executor.clones_anywhere)
        self._lanes = LanePool(self.options.capture_slots)
        self._lock = threading.RLock()
        self._names = SessionNames(self.options.max_sessions)
        self._waiting: FairQueue[Job] = FairQueue(self.options.max_queue)
        self._jobs: set[Job] = set()  # those that wait, too
        self._n_running = 0
        self._durations = Durations()
        self._begun_at: dict[Job, float] = {}
        self._is_closing = False
        self._counts = dict.fromkeys(
            (
                *("submitted", *_ENDS, "refused", "expired"),
                *("prompt_tokens", "cached_tokens", "evaluated_tokens", "generated_tokens"),
            ),
            0,
        )
        self._control = ControlThread(self._tick, self._is_over)
        self._shared = Shared(runner, self.options, self.cache, self._lanes, self._control.post)
        self._control.start()

    @property
    def session_limit(self) -> int:
        """The most tokens that a session may come to, prompt and reply together."""
        return self._limit

    # ---- requests

    def submit(self, request: ServingRequest, listener: Listener | None = None) -> Reply:
        """Queue a request; its reply comes through the handle, and `listener` is told of it. Waits for nothing.

        Raises InputError for what are no tokens of the model, ContextLengthError for more of them than a session can
        ever hold, OptionError for more choices than compute at once, SessionBusyError where its session is in use,
        SessionLimitError where all that may be kept are, ClosedError, and QueueFullError where `max_queue` requests
        wait and the request's partition has its share of them.
        """
        tokens = self._checked(request)
        most = self._limit - len(tokens) + 1  # the last token that is sampled takes no cell
        with self._lock:
            if self._is_closing:
                raise ClosedError("the serving runtime was shut down")
            must_wait = bool(self._waiting) or not self._fits(request.n)
            if must_wait and not self._waiting.has_room(request.partition):
                self._counts["refused"] += 1
                n = len(self._waiting)
                raise QueueFullError(n, self._durations.retry_after_s(n, self.options.max_requests))
            now = self._clock()
            named = None
            if request.session is not None:
                named = self._names.claim((request.partition, request.session), now)
            reply = Reply(request.n, len(tokens), self._may_wait, now)
            job = Job(self._shared, request, tokens, most, reply, listener, named, self._finish)
            self._jobs.add(job)
            self._counts["submitted"] += 1
            self._waiting.put(request.partition, job)
            self._begin_what_fits()
        return reply

    def _checked(self, request: ServingRequest) -> list[int]:
        given: object = request.tokens
        if given is None or isinstance(given, (str, bytes)) or not len(request.tokens):
            raise InputError("there is nothing to generate from: no tokens were given")
        tokens: list[int] = self.runner.text.check_tokens(request.tokens).tolist()
        if len(tokens) > self._limit:
            raise ContextLengthError(len(tokens), self._limit)
        if request.n > self.options.max_requests:
            raise OptionError(f"n is {request.n}, at most {self.options.max_requests} compute at once (max_requests)")
        return tokens

    def _may_wait(self) -> bool:
        return not self._control.is_current and not self.runner.is_in_callback

    def _fits(self, n: int) -> bool:
        return self._n_running + n <= self.options.max_requests

    def _begin_what_fits(self) -> None:
        """With the lock held."""
        while (job := self._waiting.first()) is not None and self._fits(job.request.n):
            self._waiting.take()
            self._n_running += job.request.n
            self._begun_at[job] = now = self._clock()
            self._control.post(partial(job.begin, now))

    def _finish(self, job: Job) -> None:
        """On the control thread: it holds nothing any more."""
        stats, now = job.reply.stats, self._clock()
        with self._lock:
            if job not in self._jobs:
                return
            self._jobs.discard(job)
            begun_at = self._begun_at.pop(job, None)
            if begun_at is None:
                self._waiting.remove(job.request.partition, job)
            else:
                self._n_running -= job.request.n
                self._durations.note(now - begun_at)
            if job.named is not None:
                self._names.release(job.named, now)
            self._counts[_end_of(job.reply)] += 1
            for name in ("prompt_tokens", "cached_tokens", "evaluated_tokens", "generated_tokens"):
                self._counts[name] += getattr(stats, name)
            self._begin_what_fits()

    # ---- named sessions

    def sessions(self, partition: str = "") -> list[SessionInfo]:
        """The named sessions of a partition, in the order of their names."""
        with self._lock:
            found = self._names.of(partition)
            infos = [
                SessionInfo(
                    named.key[1],
                    0 if (session := named.session) is None else session.position,
                    named.is_busy,
                    named.last_used,
                )
                for named in found
            ]
        return sorted(infos, key=lambda info: info.name)

    def retained_tokens(self, partition: str, name: str) -> Iterator[Sequence[int] | npt.NDArray[np.int32]]:
        """Rows of tokens that a request of a named session may begin with, since their K/V is there.

        The session's own first, with the token that was sampled last, then the partition's snapshots, the one that was
        used last first. Changes nothing, and waits for nothing; any of them may be gone when it is asked for.
        """
        with self._lock:
            try:
                session = self._names.find((partition, name)).session
            except UnknownSessionError:
                session = None
        if session is not None and session.status == "open":
            pending = session.pending
            yield session.tokens if pending is None else [*session.tokens, pending]
        for entry in reversed(self.cache.entries):
            if entry.scope == partition:
                yield entry.tokens

    def fork(
        self, partition: str, source: str, name: str, at: int | None = None, timeout: float | None = None
    ) -> SessionInfo:
        """A new named session that shares the first `at` tokens (None: all) of another one, which may be in use.

        Raises UnknownSessionError, PositionError, SessionBusyError where there is a session of the new name,
        SessionError where no clone can be had, and TimeoutError.
        """
        self._refuse_in_callback()
        with self._claimed(partition, name, must_be_new=True) as named:
            with self._lock:
                session = self._names.find((partition, source)).session
            if session is None:
                raise SessionError(f"the session {source!r} has not begun")
            position = session.position
            at = position if at is None else at
            if isinstance(at, bool) or not isinstance(at, int) or not 0 < at <= position:
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

    def rewind(self, partition: str, name: str, to: int, timeout: float | None = None) -> SessionInfo:
        """Drop what a named session holds from position `to` on.

        Raises UnknownSessionError, SessionBusyError, PositionError, RewindError and TimeoutError.
        """
        self._refuse_in_callback()
        with self._claimed(partition, name, must_be_new=False) as named:
            session = named.session
            assert session is not None
            if isinstance(to, bool) or not isinstance(to, int) or not 0 < to <= session.position:
                raise PositionError(f"cannot rewind to {to}: the session {name!r} is at position {session.position}")
            session.rewind_async(to).result(timeout)
        return self._info(named)

    def close_session(self, partition: str, name: str) -> None:
        """Forget a named session; its request is cancelled, and no snapshot on its way is kept. Waits for nothing.

        Raises UnknownSessionError.
        """
        with self._lock:
            named = self._names.find((partition, name))
            self._names.remove(named)
            jobs = [job for job in self._jobs if job.named is named]
        for job in jobs:
            job.discard_checkpoints()
            job.cancel()

    def save(self, partition: str, name: str, directory: Directory, file: str, timeout: float | None = None) -> None:
        """Save a named session as `file` in `directory`, as `Session.save` does; it may be in use.

        Raises UnknownSessionError, SavedStateError, SessionError, PoisonedError and TimeoutError.
        """
        with self._lock:
            session = self._names.find((partition, name)).session
        if session is None:
            raise SessionError(f"the session {name!r} has not begun")
        session.save(directory, file, timeout)

    def load(
        self, partition: str, name: str, directory: Directory, file: str, timeout: float | None = None
    ) -> SessionInfo:
        """Make what was saved as `file` a named session, in the place of an idle one of that name.

        Raises SavedStateError, SessionBusyError, and what `Runner.load_session` raises; then nothing has changed.
        """
        self._refuse_in_callback()
        with self._claimed(partition, name) as named:
            loaded = self.runner.load_session(directory, file, timeout)
            named.let_go()
            named.session = loaded
        return self._info(named)

    @contextmanager
    def _claimed(self, partition: str, name: str, *, must_be_new: bool | None = None) -> Iterator[NamedSession]:
        """Use a name for something else than a request. `must_be_new` None is either."""
        check_name(name)
        key = (partition, name)
        with self._lock:
            if self._is_closing:
                raise ClosedError("the serving runtime was shut down")
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
            session = named.session
            return SessionInfo(named.key[1], 0 if session is None else session.position, False, named.last_used)

    def expire(self) -> int:
        """Close the named sessions that were idle too long, as the runtime does by itself; how many. Waits not."""
        idle_s = self.options.session_idle_s
        if idle_s is None:
            return 0
        with self._lock:
            now = self._clock()
            old = [each for each in self._names if not each.is_busy and now - each.last_used >= idle_s]
            for named in old:
                self._names.remove(named)
            self._counts["expired"] += len(old)
        return len(old)

    def _tick(self) -> float | None:
        """On the control thread: see what is too old; in how many seconds the next one will be."""
        self.expire()
        idle_s = self.options.session_idle_s
        with self._lock:
            used = [each.last_used for each in self._names if not each.is_busy]
            return None if idle_s is None or not used else min(used) + idle_s - self._clock()

    def _refuse_in_callback(self) -> None:
        if not self._may_wait():
            raise WouldBlockError("this waits for the engine, which the callback holds up: do it on another thread")

    # ---- what there is

    def stats(self) -> dict[str, int]:
        """Counts since the start: requests by how they ended, tokens; what waits, runs and is kept now."""
        with self._lock:
            now = {
                "waiting": len(self._waiting),
                "running": self._n_running,
                "sessions": len(self._names),
                "lanes": self._lanes.size,
                "lanes_in_use": self._lanes.in_use,
            }
            counts = {**self._counts, **now}
        return {**counts, **{f"cache_{name}": n for name, n in self.cache.stats().items()}}

    # ---- the end

    def shutdown(self, timeout: float = SHUTDOWN_S) -> bool:
        """End every request, and let go of named sessions and snapshots; whether that was done in `timeout` seconds.

        Where it was not, the engine does not come back: the replies have ended nevertheless, and the rest is done when
        it does. The runner stays open. Idempotent.
        """
        with self._lock:
            self._is_closing = True
            jobs = list(self._jobs)
            for named in self._names:
                self._names.remove(named)
        for job in jobs:
            job.is_shut = True
            job.cancel()
        self._control.post(lambda: None)
        if self._control.is_current or self.runner.is_in_callback:
            return False
        is_over = self._control.join(timeout)
        if not is_over:
            for job in jobs:
                self._control.post(job.abandon)
            for job in jobs:
                job.reply.wait(_ABANDON_S)
        self.cache.clear()
        return is_over

    def _is_over(self) -> bool:
        with self._lock:
            return self._is_closing and not self._jobs and not self._lanes.in_use

    def __enter__(self) -> ServingRuntime:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()


def _end_of(reply: Reply) -> str:
    """How a request counts: by the worst end of its choices."""
    reasons = {choice.reason for choice in reply.choices}
    ends = {Reason.FAILED: "failed", Reason.SHUTDOWN: "shutdown", Reason.CANCELLED: "cancelled"}
    for reason, name in ends.items():
        if reason in reasons:
            return name
    return "finished"
