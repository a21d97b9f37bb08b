"""`ServingRuntime`: requests of many callers over one runner.

Submits check and queue, on the caller's thread; the runtime's control thread does the rest, and never waits for the
engine. The lock guards who waits, who runs and who uses which session; nothing is waited for under it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import TracebackType

import numpy as np
import numpy.typing as npt

from ggml_engine.control.generation import Reason
from ggml_engine.control.prefix_cache import PrefixCache
from ggml_engine.control.runner import SHUTDOWN_S, Runner
from ggml_engine.control.saved_names import Directory
from ggml_engine.errors import ClosedError, ContextLengthError, InputError, OptionError, WouldBlockError
from ggml_engine.serving.admission import Admission
from ggml_engine.serving.choice_lengths import most_tokens
from ggml_engine.serving.control_thread import ControlThread
from ggml_engine.serving.job import Job
from ggml_engine.serving.lanes import LanePool
from ggml_engine.serving.named_sessions import NamedSessions
from ggml_engine.serving.names import SessionInfo, SessionNames
from ggml_engine.serving.options import ServingOptions
from ggml_engine.serving.reply import Listener, Reply
from ggml_engine.serving.request import ServingRequest
from ggml_engine.serving.retention import LargestPartition
from ggml_engine.serving.shared import Shared

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
        self.cache = PrefixCache(
            self.options.prefix_cache_entries,
            policy=LargestPartition(),
            replace_extended=runner.executor.clones_anywhere,
        )
        self._lanes = LanePool(self.options.capture_slots)
        self._lock = threading.RLock()
        self._names = SessionNames(self.options.max_sessions)
        self._named = NamedSessions(runner, self.cache, self._names, self._lock, clock, self._check_open)
        self._admission = Admission(self.options)
        self._jobs: set[Job] = set()  # those that wait, too
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
        ever hold, OptionError for more choices than compute at once, or than have room, SessionBusyError where its
        session is in use, SessionLimitError where all that may be kept are, ClosedError, and QueueFullError where
        `max_queue` requests wait and the request's partition has its share of them.
        """
        tokens = self._checked(request)
        most = most_tokens(self.runner.executor, len(tokens), request.n, self._limit)
        with self._lock:
            self._check_open()
            if (refusal := self._admission.refusal(request)) is not None:
                self._counts["refused"] += 1
                raise refusal
            now = self._clock()
            named = None
            if request.session is not None:
                named = self._names.claim((request.partition, request.session), now)
            reply = Reply(request.n, len(tokens), self._may_wait, now)
            job = Job(self._shared, request, tokens, most, reply, listener, named, self._finish)
            self._jobs.add(job)
            self._counts["submitted"] += 1
            self._admission.put(job)
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

    def _check_open(self) -> None:
        if self._is_closing:
            raise ClosedError("the serving runtime was shut down")

    def _begin_what_fits(self) -> None:
        """With the lock held."""
        now = self._clock()
        while (job := self._admission.take(now)) is not None:
            self._control.post(partial(job.begin, now))

    def _finish(self, job: Job) -> None:
        """On the control thread: it holds nothing any more."""
        stats, now = job.reply.stats, self._clock()
        with self._lock:
            if job not in self._jobs:
                return
            self._jobs.discard(job)
            self._admission.end(job, now)
            if job.named is not None:
                self._names.release(job.named, now)
            self._counts[_end_of(job.reply)] += 1
            for name in ("prompt_tokens", "cached_tokens", "evaluated_tokens", "generated_tokens"):
                self._counts[name] += getattr(stats, name)
            self._begin_what_fits()

    # ---- named sessions

    def sessions(self, partition: str = "") -> list[SessionInfo]:
        """The named sessions of a partition, in the order of their names."""
        return self._named.infos(partition)

    def retained_tokens(self, partition: str, name: str) -> Iterator[Sequence[int] | npt.NDArray[np.int32]]:
        """Rows of tokens that a request of a named session may begin with, since their K/V is there.

        The session's own first, with the token that was sampled last, then the partition's snapshots, the one that was
        used last first. Changes nothing, and waits for nothing; any of them may be gone when it is asked for.
        """
        return self._named.retained_tokens(partition, name)

    def fork(
        self, partition: str, source: str, name: str, at: int | None = None, timeout: float | None = None
    ) -> SessionInfo:
        """A new named session that shares the first `at` tokens (None: all) of another one, which may be in use.

        Raises UnknownSessionError, PositionError, SessionBusyError where there is a session of the new name,
        SessionError where no clone can be had, and TimeoutError.
        """
        self._refuse_in_callback()
        return self._named.fork(partition, source, name, at, timeout)

    def rewind(self, partition: str, name: str, to: int, timeout: float | None = None) -> SessionInfo:
        """Drop what a named session holds from position `to` on.

        Raises UnknownSessionError, SessionBusyError, PositionError, RewindError and TimeoutError.
        """
        self._refuse_in_callback()
        return self._named.rewind(partition, name, to, timeout)

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
        self._named.save(partition, name, directory, file, timeout)

    def load(
        self, partition: str, name: str, directory: Directory, file: str, timeout: float | None = None
    ) -> SessionInfo:
        """Make what was saved as `file` a named session, in the place of an idle one of that name.

        Raises SavedStateError, SessionBusyError, and what `Runner.load_session` raises; then nothing has changed.
        """
        self._refuse_in_callback()
        return self._named.load(partition, name, directory, file, timeout)

    def expire(self) -> int:
        """Close the named sessions that were idle too long, as the runtime does by itself; how many. Waits not."""
        idle_s = self.options.session_idle_s
        if idle_s is None:
            return 0
        with self._lock:
            n_expired = self._names.remove_idle(self._clock(), idle_s)
            self._counts["expired"] += n_expired
        return n_expired

    def _tick(self) -> float | None:
        """On the control thread: see what is too old; in how many seconds the next one will be."""
        self.expire()
        idle_s = self.options.session_idle_s
        with self._lock:
            last_use = self._names.last_use_of_idle()
            return None if idle_s is None or last_use is None else last_use + idle_s - self._clock()

    def _refuse_in_callback(self) -> None:
        if not self._may_wait():
            raise WouldBlockError("this waits for the engine, which the callback holds up: do it on another thread")

    # ---- what there is

    def stats(self) -> dict[str, int]:
        """Counts since the start: requests by how they ended, tokens; what waits, runs and is kept now."""
        with self._lock:
            now = {
                "waiting": self._admission.n_waiting,
                "running": self._admission.n_running,
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
