"""`PromptRounds`: many prompts over one runner, once each in a round, and a prefix cache from round to round.

Owns the sessions of the prompts and the order of look-ups and captures. Knows no text of a prompt and prints nothing.
All of a round is looked up before anything of it is captured, and nothing of it is collected before its end.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue

from ggml_engine.control.capture import PromptCapture
from ggml_engine.control.config import GenConfig
from ggml_engine.control.future import EngineFuture
from ggml_engine.control.generation import Generation, GenerationStats, Reason
from ggml_engine.control.prefix_cache import PrefixCache
from ggml_engine.control.prefix_match import Miss
from ggml_engine.control.runner import Runner
from ggml_engine.control.session import Session
from ggml_engine.errors import AllocationError, EngineError, PoolFullError

_POLL_S = 0.25  # a wait is cut into such pieces, so that Ctrl-C is noticed on every platform
_CELLS_AHEAD = 64  # that a prompt needs beside its own to begin: an answer, or the first part of it


def reserved_sessions(n_prompts: int, n_entries: int) -> int:
    """How many sessions can be resident at once: those of the prompts, snapshots kept, and snapshots being taken.

    No more prompts are captured than the cache has entries, nor more than there are.
    """
    n_captured = min(n_prompts, n_entries)
    return n_prompts + n_captured + n_captured


@dataclass(frozen=True, slots=True)
class RoundPrompt:
    """A prompt and how to go on after it; `error` says why there is none, and becomes its result."""

    tokens: Sequence[int]
    config: GenConfig
    error: EngineError | None = None


@dataclass(frozen=True, slots=True)
class RoundResult:
    """What became of a prompt in a round: `index` counts prompts and `round` rounds, from 0.

    `stats` are those of its generation, the last one where there were `n_restarts` for lack of cells. In seconds from
    the beginning of the round: `queued_s` until its prompt was begun (None: it never was), `total_s` until its end.
    `miss` says why no more of the prompt was reused, where a look-up was made.
    """

    index: int
    round: int
    text: str
    reason: Reason
    error: BaseException | None
    stats: GenerationStats
    miss: Miss | None
    queued_s: float | None
    total_s: float
    n_restarts: int

    @property
    def has_failed(self) -> bool:
        """Whether it ended by no wish of its caller or its model."""
        return self.reason in {Reason.FAILED, Reason.SHUTDOWN}


class PromptRounds:
    """Runs all of `prompts` in each round, together as far as there is room, and begins them after what is cached.

    The first `cache_entries` prompts of a round are captured (0: nothing is cloned). `runner` must have room for
    `reserved_sessions` sessions. `max_running` bounds how many run at the same time: 1 where the executor holds one
    sequence. What finds no cells waits, or is started again, until others have ended. Used by one thread; `cancel` may
    be called from any, signal handlers included.
    """

    def __init__(
        self,
        runner: Runner,
        prompts: Sequence[RoundPrompt],
        cache_entries: int = 0,
        *,
        max_running: int | None = None,
    ) -> None:
        self.cache = PrefixCache(cache_entries)
        self._runner = runner
        self._prompts = tuple(prompts)
        self._max_running = max_running
        self._n_rounds = 0
        self._current: _Round | None = None
        self._is_cancelled = False

    def run_round(self) -> Generator[RoundResult, None, None]:
        """One more round: results as they come; none after `cancel`. Closing the generator cancels what still runs."""
        number, self._n_rounds = self._n_rounds, self._n_rounds + 1
        current = self._current = _Round(self._runner, self.cache, number, self._prompts, self._max_running)
        try:
            if not self._is_cancelled:  # what comes from here on finds the round
                yield from current.run()
        finally:
            self._current = None
            current.close()

    def cancel(self) -> None:
        """End what runs, and begin nothing more. Idempotent; waits for nothing."""
        self._is_cancelled = True
        if (current := self._current) is not None:
            current.cancel()


@dataclass(slots=True, eq=False)
class _Turn:
    """One prompt in one round."""

    index: int
    prompt: RoundPrompt
    session: Session | None = None
    miss: Miss | None = None
    capture: PromptCapture | None = None
    generation: Generation | None = None
    submitted_s: float = 0.0
    ended_s: float = 0.0
    n_restarts: int = 0
    n_cells: int = 0  # that its prompt takes, and what comes first


@dataclass(slots=True, eq=False)
class _Round:
    runner: Runner
    cache: PrefixCache
    number: int
    prompts: Sequence[RoundPrompt]
    max_running: int | None
    _turns: list[_Turn] = field(default_factory=list)
    _waiting: deque[_Turn] = field(default_factory=deque)
    _running: dict[int, _Turn] = field(default_factory=dict)
    _ended: SimpleQueue[_Turn] = field(default_factory=SimpleQueue)
    _is_cancelled: bool = False
    _begun_at: float = field(default_factory=time.perf_counter)

    def run(self) -> Iterator[RoundResult]:
        self._turns = [_Turn(index, prompt) for index, prompt in enumerate(self.prompts)]
        for turn in self._turns:
            error = turn.prompt.error or self._look_up(turn)
            if error is None:
                self._waiting.append(turn)
            else:
                yield self._unbegun(turn, Reason.FAILED, error)
        while self._waiting or self._running:
            if self._is_cancelled:
                while self._waiting:
                    yield self._unbegun(self._waiting.popleft(), Reason.CANCELLED)
            else:
                yield from self._begin_what_fits()
            if self._running and (result := self._result(self._next_ended())) is not None:
                yield result
        if not self._is_cancelled:
            self._collect()

    def cancel(self) -> None:
        self._is_cancelled = True
        for turn in list(self._running.values()):
            if turn.generation is not None:
                turn.generation.cancel()

    def close(self) -> None:
        """Let go of everything; what runs is cancelled."""
        for turn in self._turns:
            self._close_session(turn)
            if turn.capture is not None:
                turn.capture.discard()

    # ---- before and after

    def _look_up(self, turn: _Turn) -> EngineError | None:
        """Find where to begin; what is wrong with the prompt, if something is."""
        if self.cache.max_entries and not self._is_cancelled:
            try:
                found = self.cache.lookup(self.runner, turn.prompt.tokens)
            except EngineError as error:
                return error
            turn.session, turn.miss = found.session, found.miss
        return None

    def _collect(self) -> None:
        for turn in self._turns:
            if turn.capture is not None:
                turn.capture.collect()

    # ---- beginning

    def _begin_what_fits(self) -> list[RoundResult]:
        """Begin those that there is room for, at once: an open waits for a step, and not one for each. What cannot."""
        opening: list[tuple[_Turn, EngineFuture[Session] | None]] = []
        while self._waiting and self._fits(self._waiting[0]):
            turn = self._waiting.popleft()
            self._running[turn.index] = turn
            opening.append((turn, None if turn.session is not None else self.runner.open_session_async()))
        failed: list[RoundResult] = []
        for turn, future in opening:
            try:
                if future is not None:
                    turn.session = future.result()
            except EngineError as error:  # this prompt's trouble only
                del self._running[turn.index]
                failed.append(self._unbegun(turn, Reason.FAILED, error))
        for turn, _ in opening:
            if turn.session is not None:
                self._begin(turn, turn.session)
        return failed

    def _fits(self, turn: _Turn) -> bool:
        run = self.runner.executor.run
        n_reused = 0 if turn.session is None else turn.session.position
        n_positions = len(turn.prompt.tokens) + _CELLS_AHEAD
        turn.n_cells = -(-n_positions // run) * run - n_reused // run * run
        if not self._running:
            return True  # nobody will make more room than there is
        if self.max_running is not None and len(self._running) >= self.max_running:
            return False
        claimed = sum(each.n_cells for each in self._running.values())
        return claimed + turn.n_cells <= self.runner.executor.capacity

    def _begin(self, turn: _Turn, session: Session) -> None:
        if turn.capture is None and turn.index < self.cache.max_entries:
            turn.capture = self.cache.capture_prompt(session, turn.prompt.tokens)
        turn.submitted_s = self._now()
        turn.generation = session.generate_from(
            turn.prompt.tokens,
            turn.prompt.config,
            None if turn.capture is None else turn.capture.wrap(),
            on_settled=lambda _generation: self._end(turn),
        )
        if self._is_cancelled:  # it came after this was asked last
            turn.generation.cancel()

    # ---- ending

    def _end(self, turn: _Turn) -> None:
        """On the engine's thread."""
        turn.ended_s = self._now()
        self._ended.put(turn)

    def _next_ended(self) -> _Turn:
        while True:
            try:
                turn = self._ended.get(timeout=_POLL_S)
            except Empty:
                continue
            del self._running[turn.index]
            return turn

    def _result(self, turn: _Turn) -> RoundResult | None:
        """What came of a generation that has ended; None where it is to be tried once more."""
        generation, turn.generation = turn.generation, None
        assert generation is not None
        if isinstance(generation.error, (PoolFullError, AllocationError)) and self._waits_for_room(turn):
            return None
        self._close_session(turn)
        stats, reason = generation.stats, generation.reason
        assert reason is not None
        return RoundResult(
            turn.index,
            self.number,
            generation.text,
            reason,
            generation.error,
            stats,
            turn.miss,
            turn.submitted_s + stats.queued_s,
            turn.ended_s,
            turn.n_restarts,
        )

    def _waits_for_room(self, turn: _Turn) -> bool:
        """Whether a prompt whose cells were given to others is to begin again: only where there will be more room."""
        if self._is_cancelled:
            return False
        if self._running:
            self.max_running = len(self._running)  # so many get on
        else:
            holders = [each for each in (*self._waiting, turn) if each.session is not None and each.session.position]
            if not holders:
                return False
            for each in holders:  # what they reuse takes cells; read again it will not, while it waits
                self._close_session(each)
        if turn.session is not None and turn.session.status != "open":
            self._close_session(turn)
        turn.n_restarts += 1
        self._waiting.appendleft(turn)
        return True

    def _unbegun(self, turn: _Turn, reason: Reason, error: EngineError | None = None) -> RoundResult:
        self._close_session(turn)
        stats = GenerationStats(prompt_tokens=len(turn.prompt.tokens), reason=reason)
        return RoundResult(
            turn.index, self.number, "", reason, error, stats, turn.miss, None, self._now(), turn.n_restarts
        )

    def _close_session(self, turn: _Turn) -> None:
        if turn.session is not None:
            turn.session.close()
            turn.session = None

    def _now(self) -> float:
        return time.perf_counter() - self._begun_at
