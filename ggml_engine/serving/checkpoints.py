"""Snapshots of one request's prompt for the shared cache: at which positions, and each through a lane of its own.

A lane is taken when a clone is asked for, never for a prompt that is there already, and given back when the clone has
settled, whatever becomes of it. What was taken is put into the cache by the control thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from ggml_engine.control.generation import Update
from ggml_engine.control.prefix_cache import PrefixCache
from ggml_engine.control.session import Session
from ggml_engine.serving.lanes import Lane, LanePool
from ggml_engine.serving.options import ServingOptions

log = logging.getLogger("ggml_engine.serving")

Post = Callable[[Callable[[], object]], None]


def checkpoint_positions(
    options: ServingOptions, start: int, opening: int, prompt: Sequence[int], *, begins: bool
) -> frozenset[int]:
    """Where a prompt is captured that is evaluated from `start` on; `begins` is whether it begins a session.

    None outside of it. What a policy raises is logged, and nothing is captured then.
    """
    if not options.prefix_cache_entries:
        return frozenset()
    wanted: set[int] = set()
    if (policy := options.prefix_checkpoint_policy) is not None:
        try:
            wanted = {int(position) for position in policy(start, opening, prompt)}
        except Exception:
            log.exception("a policy of checkpoints failed: nothing is captured")
    else:
        if begins or options.prefix_checkpoint_prompt_end == "every":
            wanted.add(len(prompt))
        if (interval := options.prefix_checkpoint_interval) is not None:
            wanted.update(range(interval, len(prompt), interval))
    return frozenset(position for position in wanted if start < position <= len(prompt))


class PromptCheckpoints:
    """What a generation's callbacks capture of `tokens`, the prompt of `session`, at `positions`."""

    def __init__(
        self,
        cache: PrefixCache,
        lanes: LanePool,
        post: Post,
        session: Session,
        tokens: Sequence[int],
        positions: frozenset[int],
        *,
        scope: object,
        metadata: object,
    ) -> None:
        self._cache = cache
        self._lanes = lanes
        self._post = post
        self._session = session
        self._tokens = tokens
        self._left = set(positions)
        self._scope = scope
        self._metadata = metadata
        self._is_discarded = False

    @property
    def breakpoints(self) -> tuple[int, ...]:
        """Where the prefill must pause: the end of the prompt is seen by its first token."""
        return tuple(sorted(self._left - {len(self._tokens)}))

    # ---- callbacks, on the engine's thread

    def on_update(self, update: Update) -> None:
        """Ask for the end of the prompt before the first token is passed on."""
        if update.tokens:
            self._ask(len(self._tokens))

    def on_breakpoint(self, position: int) -> None:
        """Ask for the prompt up to there."""
        self._ask(position)

    def _ask(self, position: int) -> None:
        if position not in self._left or self._is_discarded:
            return
        self._left.discard(position)
        try:
            if self._cache.holds(self._session, self._tokens[:position], scope=self._scope):
                return
            lane = self._lanes.take()
            if lane is not None:
                self._clone(position, lane)
        except Exception:
            log.exception("a snapshot could not be asked for")

    def _clone(self, position: int, lane: Lane) -> None:
        try:
            future = self._session.snapshot_async(position)
        except BaseException:
            lane.release()
            raise
        future.add_done_callback(partial(self._settle, position, lane))

    def _settle(self, position: int, lane: Lane, future: Future[Session | None]) -> None:
        snapshot = future.result()
        if snapshot is not None and self._is_discarded:
            snapshot.close()
        elif snapshot is not None:
            self._post(partial(self._keep, position, snapshot))
        lane.release()

    # ---- the control thread

    def _keep(self, position: int, snapshot: Session) -> None:
        if self._is_discarded:
            snapshot.close()
        else:
            self._cache.insert(snapshot, self._tokens[:position], self._metadata, scope=self._scope)

    def discard(self) -> None:
        """Drop what is on its way, and ask for nothing more. Any thread; waits for nothing."""
        self._is_discarded = True
