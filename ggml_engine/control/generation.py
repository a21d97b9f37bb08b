"""`Generation`: the handle of one generate call, and `GenerationState`, what the engine thread knows of it.

The state is written by the engine thread and read by any; a lock guards what readers wait for. A handle only looks at
its state: dropping the handle ends a generation that nobody else listens to.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from ggml_engine.control.config import GenConfig
from ggml_engine.control.logprobs import TokenLogprobs
from ggml_engine.errors import ClosedError, EngineError, WouldBlockError
from ggml_engine.executor.prepared import PreparedInput

_POLL_S = 0.25  # a wait is cut into such pieces, so that Ctrl-C is noticed on every platform


class Reason(str, Enum):
    """Why a generation ended."""

    FINISHED = "finished"  # the model said so
    LENGTH = "length"  # max_tokens, or the context is full
    STOP = "stop"  # a stop string or stop token
    CANCELLED = "cancelled"  # by its handle, or because its session was closed
    FAILED = "failed"  # `error` says why
    SHUTDOWN = "shutdown"  # the runner ended


@dataclass(frozen=True, slots=True)
class Prefill:
    """How far a prompt is read: tokens done of those to be evaluated, and their speed so far."""

    done: int
    total: int
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Update:
    """What is new: tokens and text (a piece of text never holds half a character), or progress of the prefill."""

    tokens: tuple[int, ...] = ()
    text: str = ""
    logprobs: tuple[TokenLogprobs, ...] = ()
    prefill: Prefill | None = None


@dataclass(slots=True)
class GenerationStats:
    """Counts and times of a generation, in seconds.

    `queued_s` is the wait before its prompt was begun; all other times count from there. `stopped_by` is the stop
    string that ended it.
    """

    prompt_tokens: int = 0
    reused_tokens: int = 0
    evaluated_tokens: int = 0
    generated_tokens: int = 0
    queued_s: float = 0.0
    prefill_s: float = 0.0
    first_token_s: float | None = None
    decode_s: float = 0.0
    reason: Reason | None = None
    stopped_by: str | None = None
    token_times_s: list[float] = field(default_factory=list)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Speed of the evaluated prompt tokens; reused ones do not count."""
        return self.evaluated_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Speed after the first token."""
        n = self.generated_tokens - 1
        return n / self.decode_s if n > 0 and self.decode_s > 0 else 0.0


OnUpdate = Callable[[Update], object]
OnBreakpoint = Callable[[int], object]
OnSettled = Callable[["Generation"], object]


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What a generation was asked for. `is_whole` means that `delta` is a whole history, not what follows one."""

    config: GenConfig
    max_tokens: int | None = None
    is_whole: bool = False
    on_update: OnUpdate | None = None
    on_breakpoint: OnBreakpoint | None = None
    on_settled: OnSettled | None = None
    delta: npt.NDArray[np.int32] | PreparedInput = field(default_factory=lambda: np.empty(0, np.int32))

    @property
    def has_listener(self) -> bool:
        """Whether somebody hears of it without a handle."""
        return any(each is not None for each in (self.on_update, self.on_breakpoint, self.on_settled))


class GenerationState:
    """What is known of a generation. All but the reading and `request_cancel` is the engine thread's."""

    def __init__(
        self,
        request: Request,
        asked_at: float,
        is_engine_thread: Callable[[], bool],
        on_cancel: Callable[[GenerationState], None],
    ) -> None:
        self.request = request
        self.asked_at = asked_at
        self.stats = GenerationStats()
        self.updates: list[Update] = []
        self.tokens: list[int] = []
        self.text = ""
        self.prompt_logprobs: list[TokenLogprobs | None] = []
        self.error: BaseException | None = None
        self.cancel_requested = False
        self._is_started = False
        self._is_settled = False
        self.is_engine_thread = is_engine_thread
        self._on_cancel = on_cancel
        # who waits for the end is not woken by every token: that costs the engine's thread a switch
        self._lock = threading.RLock()
        self._changed, self._ended = threading.Condition(self._lock), threading.Condition(self._lock)
        self._n_reading = 0  # threads that wait for the next update
        self._listeners: dict[int, Callable[[], None]] = {}
        self._listener_ids = itertools.count()

    @property
    def reason(self) -> Reason | None:
        """Why it ended; None while it runs."""
        return self.stats.reason

    # ---- the engine thread's side

    def publish(self, update: Update) -> None:
        """Add what is new; nothing after the end."""
        with self._lock:
            if self.stats.reason is not None:
                return
            self.updates.append(update)
            self.tokens.extend(update.tokens)
            self.text += update.text
            if self._n_reading:
                self._changed.notify_all()
            listeners = list(self._listeners.values())
        for listener in listeners:
            listener()

    def mark_started(self) -> bool:
        """Note that it was counted; whether this call did."""
        with self._changed:
            was_started, self._is_started = self._is_started, True
            return not was_started

    def mark_settled(self) -> bool:
        """Note that its end was counted and told; whether this call did."""
        with self._changed:
            was_settled, self._is_settled = self._is_settled, True
            return not was_settled

    def end(self, reason: Reason, error: BaseException | None = None) -> bool:
        """End it, once; whether this call did."""
        with self._changed:
            if self.stats.reason is not None:
                return False
            self.error = None if error is None else without_frames(error)
            self.stats.reason = reason
            self._on_cancel = _ignore  # a result that is kept does not keep the scheduler
            self._changed.notify_all()
            self._ended.notify_all()
            listeners = list(self._listeners.values())
        for listener in listeners:
            listener()
        return True

    # ---- anybody's

    def request_cancel(self) -> None:
        """Ask for the end, before the next step or inside a long one."""
        if self.stats.reason is None:
            self.cancel_requested = True
            self._on_cancel(self)

    def wait(self, n_seen: int, timeout: float | None) -> bool:
        """Until there are more than `n_seen` updates, or the end; False at the timeout."""

        def is_there() -> bool:
            return self.stats.reason is not None or len(self.updates) > n_seen

        if is_there():
            return True
        with self._lock:
            self._n_reading += 1
        try:
            return self._wait_for(self._changed, is_there, timeout)
        finally:
            with self._lock:
                self._n_reading -= 1

    def wait_end(self, timeout: float | None) -> bool:
        """Until it has ended; False at the timeout."""
        return self._wait_for(self._ended, lambda: self.stats.reason is not None, timeout)

    def _wait_for(self, condition: threading.Condition, is_there: Callable[[], bool], timeout: float | None) -> bool:
        if is_there():
            return True
        if self.is_engine_thread():
            raise WouldBlockError("a callback cannot wait for a generation: its own thread has to compute it")
        with condition:
            deadline = None if timeout is None else time.monotonic() + timeout
            while not is_there():
                left = _POLL_S if deadline is None else deadline - time.monotonic()
                if left <= 0:
                    return False
                condition.wait(min(left, _POLL_S))
        return True

    @contextlib.contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """Call `listener` (on the engine thread) whenever something is new."""
        number = next(self._listener_ids)
        with self._changed:
            self._listeners[number] = listener
        try:
            yield
        finally:
            with self._changed:
                del self._listeners[number]


class Generation(Iterator[str]):
    """Iterate (`for` or `async for`) for pieces of text; a piece never holds half a character.

    `tokens` are those sampled so far, the end token included; `text` is what was shown. Dropping the handle cancels,
    unless a callback listens. Usable from any thread; what waits refuses to in a callback (WouldBlockError).
    """

    def __init__(self, state: GenerationState, keep: object = None, *, cancels_when_dropped: bool = True) -> None:
        self._state = state
        self._keep = keep
        self._n_seen = 0
        if cancels_when_dropped:
            weakref.finalize(self, GenerationState.request_cancel, state).atexit = False

    # ---- text as it comes

    def __next__(self) -> str:
        state = self._state
        while True:
            state.wait(self._n_seen, None)
            if self._n_seen < len(state.updates):
                update = state.updates[self._n_seen]
                self._n_seen += 1
                if update.text:
                    return update.text
            elif state.reason is not None:
                self._raise()
                raise StopIteration

    def __aiter__(self) -> AsyncIterator[str]:
        return self._async_pieces()

    async def _async_pieces(self) -> AsyncIterator[str]:
        import asyncio  # noqa: PLC0415  # some 20 ms that few programs need

        state, loop, changed = self._state, asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(changed.set)

        with state.listening(wake):
            while True:
                changed.clear()
                while self._n_seen < len(state.updates):
                    update = state.updates[self._n_seen]
                    self._n_seen += 1
                    if update.text:
                        yield update.text
                if state.reason is not None and self._n_seen == len(state.updates):
                    self._raise()
                    return
                await changed.wait()

    def updates(self) -> Iterator[Update]:
        """All updates from the first one, progress of the prefill included, as they come."""
        for index in itertools.count():
            self._state.wait(index, None)
            if index == len(self._state.updates):
                self._raise()
                return
            yield self._state.updates[index]

    # ---- the end

    def cancel(self) -> None:
        """End before the next step, a long prefill also inside it. Idempotent."""
        self._state.request_cancel()

    def wait(self, timeout: float | None = None) -> bool:
        """Until it has ended, however it did; False when `timeout` seconds passed before."""
        return self._state.wait_end(timeout)

    def result(self, timeout: float | None = None) -> str:
        """The whole text, when it has ended. Raises what it failed with, and TimeoutError."""
        if not self.wait(timeout):
            raise TimeoutError(f"the generation did not end in {timeout} s")
        self._raise()
        return self.text

    def _raise(self) -> None:
        if self._state.error is not None:
            raise _fresh(self._state.error)
        if self.reason is Reason.SHUTDOWN:
            raise ClosedError("the engine was closed")

    # ---- what there is so far

    @property
    def reason(self) -> Reason | None:
        """Why it ended; None while it runs."""
        return self._state.reason

    @property
    def error(self) -> BaseException | None:
        """What it failed with."""
        return self._state.error

    @property
    def tokens(self) -> list[int]:
        """Tokens sampled so far, the end token included."""
        return list(self._state.tokens)

    @property
    def text(self) -> str:
        """Text shown so far."""
        return self._state.text

    @property
    def stats(self) -> GenerationStats:
        """Counts and times so far."""
        return self._state.stats

    @property
    def logprobs(self) -> list[TokenLogprobs]:
        """Of the tokens so far, where `GenConfig.logprobs` asked for them."""
        return [each for update in self._state.updates for each in update.logprobs]

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs | None]:
        """Of the evaluated prompt tokens so far, where asked for; None where nothing came before the token."""
        return list(self._state.prompt_logprobs)

    def __repr__(self) -> str:
        state = "running" if self.reason is None else self.reason.value
        return f"<Generation {state}, {len(self._state.tokens)} tokens>"


def failure(error: BaseException) -> EngineError:
    """An error of the engine's tree for anything that was raised."""
    if isinstance(error, EngineError):
        return error
    made = EngineError(f"{type(error).__name__}: {error}")
    made.__cause__ = error
    return made


def without_frames(error: BaseException) -> BaseException:
    """The same error, and those behind it, without tracebacks: their frames would keep the engine alive with it."""
    seen: set[int] = set()
    behind: list[BaseException | None] = [error]
    while behind:
        each = behind.pop()
        if each is not None and id(each) not in seen:
            seen.add(id(each))
            each.__traceback__ = None
            behind += [each.__cause__, each.__context__]
    return error


def _fresh(error: BaseException) -> BaseException:
    """A copy to raise: raising the kept one would tie the result, and its session, to the frames it passes through."""
    try:
        made = copy.copy(error)
    except Exception:  # a class of errors that cannot be copied
        return error
    made.__cause__ = error.__cause__
    made.__suppress_context__ = error.__suppress_context__
    return made


def _ignore(generation: GenerationState) -> None:
    """Nobody to tell."""
