"""`PromptCapture`: takes snapshots for a prefix cache while a session generates."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ggml_engine.control.future import EngineFuture
from ggml_engine.control.generation import Generation, OnSettled, OnUpdate, Reason, Update
from ggml_engine.control.session import Session, SessionLink
from ggml_engine.errors import WouldBlockError

if TYPE_CHECKING:
    from ggml_engine.control.prefix_cache import PrefixCache
    from ggml_engine.control.retention import CacheEntry

log = logging.getLogger("ggml_engine.control")

_ALL = -1  # stands for the position where a generation ends, which is not known before


class PromptCapture:
    """The snapshots of one generation, made by `PrefixCache.capture_prompt`.

    Give its callbacks to the generation, as many of them as wanted: `on_update=capture.wrap(...)` takes a snapshot at
    the end of the prompt, `on_breakpoint=capture.observer` at each prefill breakpoint, and
    `on_settled=capture.at_end(...)` at the end of the generation. They wait for nothing, and what they fail with is
    logged and ends nothing. Then `collect` puts what was taken into the cache. A capture is bound to the session and
    not to its handle, keeps neither it nor the cache, and drops what was not collected when it goes.
    """

    def __init__(
        self,
        cache: PrefixCache | None,
        session: Session,
        tokens: npt.NDArray[np.int32],
        saved: CacheEntry | None = None,
    ) -> None:
        self._cache = None if cache is None else weakref.ref(cache)
        self._link = SessionLink(session)
        self._tokens = tokens
        self._saved = saved  # the entry of the whole prompt, where there was one
        self._lock = threading.RLock()  # a finalizer may come while its own thread holds it
        self._seen: set[int] = set() if saved is None else {int(tokens.size)}
        self._asked: dict[int, EngineFuture[Session | None]] = {}
        self._captures_end = False  # and the end has not come

    # ---- callbacks of a generation: on the engine's thread

    def wrap(self, on_update: OnUpdate | None = None) -> OnUpdate:
        """An `on_update` that asks for the snapshot of the prompt before the first update with tokens is passed on.

        What `on_update` raises is raised. As with any `on_update`, dropping the handle does not cancel the generation.
        """

        def wrapped(update: Update) -> None:
            if update.tokens:
                self._ask(int(self._tokens.size))
            if on_update is not None:
                on_update(update)

        return wrapped

    def observer(self, position: int) -> None:
        """An `on_breakpoint` that asks for the snapshot of the prompt up to there."""
        if position <= self._tokens.size:
            self._ask(position)

    def at_end(self, on_settled: OnSettled | None = None) -> OnSettled:
        """An `on_settled` that asks for the snapshot of all that the session has committed: prompt and reply.

        The last token that was sampled is not part of it. Generations that failed or were shut down are not captured.
        """
        self._captures_end = True

        def wrapped(generation: Generation) -> None:
            if generation.reason not in {Reason.FAILED, Reason.SHUTDOWN}:
                self._ask(_ALL)
            self._captures_end = False
            if on_settled is not None:
                on_settled(generation)

        return wrapped

    def _ask(self, position: int) -> None:
        try:
            with self._lock:
                cache = None if self._cache is None else self._cache()
                if cache is None or position in self._seen:
                    return
                self._seen.add(position)
                cache._fault("capture")
                future = self._link.snapshot_async(None if position == _ALL else position)
                if future is not None:
                    self._asked[position] = future
        except Exception:
            log.exception("a snapshot could not be asked for")

    # ---- the caller's

    def collect(self, metadata: object = None, timeout: float | None = None) -> bool:
        """Wait for what was asked for, and put it into the cache; whether any of it is there then.

        All of it gets `metadata`. Without anything new to collect it does nothing, and gives False. Raises
        WouldBlockError in a callback, and TimeoutError, after which it can be called again.
        """
        if self._link.is_in_callback():
            raise WouldBlockError("collect waits for the thread that this callback runs on: do it after the generation")
        # whoever waited for the generation may be here before its on_settled was called
        if self._captures_end and (barrier := self._link.barrier_async()) is not None:
            barrier.result(timeout)
        with self._lock:
            asked, self._asked = self._asked, {}
            saved, self._saved = self._saved, None
        if concurrent.futures.wait(asked.values(), timeout).not_done:
            with self._lock:
                self._asked = {**asked, **self._asked}
                self._saved = saved
            raise TimeoutError(f"the snapshots were not taken in {timeout} s")
        order = sorted(asked, key=lambda position: (position == _ALL, position))  # the longest is used last
        taken = [(position, _taken(asked.pop(position))) for position in order]
        cache = None if self._cache is None else self._cache()
        is_there = saved is not None and cache is not None and cache.refresh(saved)
        try:
            while taken:
                position, snapshot = taken[0]
                if snapshot is not None and cache is not None:
                    cache._fault("collect")
                    key = snapshot.tokens if position == _ALL else self._tokens[:position]
                    is_there = cache.insert(snapshot, key, metadata, timeout) or is_there
                    del taken[0]
                else:
                    _drop(taken.pop(0)[1])
        except MemoryError:
            log.exception("snapshots were not kept: there is no memory")
        finally:
            for _, snapshot in taken:
                _drop(snapshot)
        return is_there

    def discard(self) -> None:
        """Drop what was asked for, and ask for nothing more. Waits for nothing."""
        with self._lock:
            asked, self._asked = self._asked, {}
            self._saved = self._cache = None
        for future in asked.values():
            if not future.cancel() and future.done():
                _drop(_taken(future))


def _taken(future: EngineFuture[Session | None]) -> Session | None:
    with suppress(Exception):
        return future.result(0)
    return None


def _drop(snapshot: Session | None) -> None:
    if snapshot is not None:
        snapshot.close()
