"""`Scheduler`: sessions, their generations, and one step after the other.

Pure: no thread, no randomness, and a clock that is given. The runner's thread drives it; so can a simulator. `cancel`
and `abort` may come from any thread, and so does what ends requests after the runner has stopped (`shut`, `refuse`,
`settle`); all else is the engine thread's. Errors of a step end the generations that they concern and never leave
`step`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from ggml_engine.control.draws import LEAST_WIDTH, DrawPool, default_threads
from ggml_engine.control.generation import Generation, GenerationState, Reason, failure
from ggml_engine.control.image_table import ImageTable
from ggml_engine.control.options import RunnerOptions
from ggml_engine.control.session_state import SessionState, SessionStatus
from ggml_engine.control.step_parts import Part, Running, batch_of, checked_outputs, needs_of, plan_parts, rows_of
from ggml_engine.control.step_plan import GroupTurns, StepCost
from ggml_engine.control.text import TextModel, TokenSampler
from ggml_engine.control.work import Drawn, Work
from ggml_engine.errors import (
    AbortedError,
    AllocationError,
    ContextLengthError,
    EngineError,
    ExecutorError,
    InputError,
    PoisonedError,
    PoolFullError,
    SequenceLimitError,
    SessionError,
)
from ggml_engine.executor.outputs import Outputs
from ggml_engine.executor.prepared import PreparedInput
from ggml_engine.executor.protocol import Executor

log = logging.getLogger("ggml_engine.control")

T = TypeVar("T")


class Scheduler(ImageTable):
    """The state machine of the control plane over one executor."""

    def __init__(self, executor: Executor, text: TextModel, options: RunnerOptions, clock: Callable[[], float]) -> None:
        super().__init__(executor, options)
        self.text = text
        self.cost = StepCost()
        self.counts = dict.fromkeys(
            ("started", "finished", "cancelled", "failed", "shutdown", "steps", "prefill_tokens", "decode_tokens"), 0
        )
        self._clock = clock
        self._draws = DrawPool(options.sampling_threads or default_threads())
        self._running: list[Running] = []
        self._n_turns = 0
        self._group_turns = GroupTurns()
        self._in_forward: dict[GenerationState, bool] = {}  # whether its rows are a prefill
        self._abort_lock = threading.RLock()  # a finalizer may come while its own thread holds it
        self._aborts_all = False
        self._has_idle_work = True
        self._is_over = False
        self._count_lock = threading.Lock()  # what comes after the end is settled on its caller's thread

    # ---- sessions

    @property
    def running(self) -> tuple[SessionState, ...]:
        """Those whose generation has not ended."""
        return tuple(running.session for running in self._running)

    def is_generating(self, state: SessionState) -> bool:
        """Whether a generation of this session has not ended."""
        return any(running.session is state for running in self._running)

    def close(self, state: SessionState) -> None:
        """Close a session; a generation in it is cancelled. Idempotent."""
        if self._sessions.pop(state.number, None) is None:
            return
        for running in [each for each in self._running if each.session is state]:
            self._end(running, Reason.CANCELLED)
        state.status = SessionStatus.CLOSED
        self.executor.close(state.sequence)

    # ---- generations

    def start(self, state: SessionState, generation: GenerationState, sampler: TokenSampler) -> None:
        """Queue a generation that the session was claimed for. What it cannot be ends it as failed."""
        try:
            work = Work(generation, sampler, self.text)
        except Exception as error:
            sampler.close()
            self.refuse(generation, failure(error))
            state.release(generation)
            return
        self._count_start(generation)
        running = Running(state, work, state.position)
        self._running.append(running)
        if generation.cancel_requested or state.close_requested:
            self._end(running, Reason.CANCELLED)
            return
        try:
            self._begin(running)
        except BaseException as error:
            self._fail(running, error)

    def _begin(self, running: Running) -> None:
        state, request = running.session, running.work.request
        if state.number not in self._sessions or state.status is not SessionStatus.OPEN:
            kind = PoisonedError if state.status is SessionStatus.POISONED else SessionError
            raise kind(state.refusal() or "the session was closed")
        max_tokens = request.max_tokens
        if max_tokens is not None and max_tokens < 1:
            raise InputError(f"max_tokens must be positive, is {max_tokens}")
        if isinstance(request.delta, PreparedInput):
            self._begin_delta(running, request.delta, self._size_of(request.delta))
        elif not request.delta.size:
            raise InputError("there is nothing to generate from: no tokens were given")
        elif request.is_whole:
            self._begin_whole(running, request.delta)
        else:
            self._begin_delta(running, request.delta, int(request.delta.size))
        self._touch(state)

    def _size_of(self, prepared: PreparedInput) -> int:
        n = prepared.size()
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise InputError(f"a prepared input needs at least one position, this one has {n!r}")
        if not self.executor.accepts(prepared):
            raise InputError(f"this executor does not take {prepared.kind!r} inputs, or not this one with its model")
        return n

    def _begin_delta(self, running: Running, delta: npt.NDArray[np.int32] | PreparedInput, n: int) -> None:
        state = running.session
        lead = [] if state.pending is None else [state.pending]
        self._check_room(state.position + len(lead) + n)
        running.work.begin(state.tokens, lead, delta, n, self._clock())
        state.pending = None

    def _begin_whole(self, running: Running, tokens: npt.NDArray[np.int32]) -> None:
        state = running.session
        self._check_room(int(tokens.size))
        kept = min(common_prefix(state.tokens, tokens.tolist()), int(tokens.size) - 1)
        if kept < state.position:
            if not self.executor.can_rewind(state.sequence, kept):
                kept = 0
            self.executor.rewind(state.sequence, kept)
            del state.tokens[kept:]
        state.pending = None
        running.first = kept
        running.work.begin(state.tokens, [], tokens[kept:], int(tokens.size) - kept, self._clock())

    def _check_room(self, n_positions: int) -> None:
        limit = self.session_limit
        if n_positions > limit:
            raise ContextLengthError(n_positions, limit)

    @property
    def session_limit(self) -> int:
        """The most positions that a session can hold."""
        most = self.options.max_session_tokens
        return self.executor.max_positions if most is None else min(most, self.executor.max_positions)

    def cancel(self, generation: GenerationState) -> None:
        """Make a cancelled generation's long forward end soon. Any thread."""
        with self._abort_lock:
            if self._in_forward.get(generation):
                self.executor.abort()

    def abort(self) -> None:
        """Let the running forward, and any later one, end soon: the runner stops. Any thread."""
        with self._abort_lock:
            if not self._is_over:  # the executor may be somebody else's by now
                self._aborts_all = True
                self.executor.abort()

    def _end(self, running: Running, reason: Reason, error: BaseException | None = None) -> None:
        """Take a generation off; every end of one that was started comes through here."""
        with suppress(ValueError):
            self._running.remove(running)
        work, state = running.work, running.session
        if reason is Reason.CANCELLED:
            work.publish_rest()
        if (token := work.uncommitted_token) is not None:
            state.pending = token
        work.finish(reason, error)
        state.release(work.state)
        if state.is_single_use:
            self._close_spent(state)
        self.settle(work.state)

    def _close_spent(self, state: SessionState) -> None:
        """Close a session whose result may be kept: nobody can use its cells any more."""
        try:
            self.close(state)
        except Exception:  # the generation has ended well
            log.exception("a session could not be closed")

    def settle(self, generation: GenerationState) -> None:
        """Count an ended generation and tell `on_settled`, once."""
        if not generation.mark_settled():
            return
        reason = generation.reason
        ended_early = reason in {Reason.CANCELLED, Reason.FAILED, Reason.SHUTDOWN}
        with self._count_lock:
            self.counts[reason.value if reason is not None and ended_early else "finished"] += 1
        if generation.request.on_settled is not None:
            try:
                generation.request.on_settled(Generation(generation, cancels_when_dropped=False))
            except BaseException:
                log.exception("an on_settled callback raised")

    def _count_start(self, generation: GenerationState) -> None:
        if generation.mark_started():
            with self._count_lock:
                self.counts["started"] += 1

    def shut(self, state: SessionState, generation: GenerationState) -> None:
        """End a generation because the runner stops. Any thread."""
        generation.end(Reason.SHUTDOWN)
        state.release(generation)
        self._count_start(generation)
        self.settle(generation)

    def _fail(self, running: Running, error: BaseException) -> None:
        self._end(running, Reason.FAILED, failure(error))

    def refuse(self, generation: GenerationState, error: EngineError) -> None:
        """End a generation that never began."""
        self._count_start(generation)
        generation.end(Reason.FAILED, error)
        self.settle(generation)

    def fail_running(self, error: BaseException) -> None:
        """After a fault of the scheduler itself: nothing is known of what runs."""
        for running in list(self._running):
            self._poison(running, error)

    def settle_all(self) -> None:
        """End every generation as shut down, and close every session."""
        for running in list(self._running):
            self._end(running, Reason.SHUTDOWN)
        self._draws.close()
        self._end_images()
        for state in self.sessions:
            with suppress(Exception):  # an executor that broke must not keep the others open
                self.close(state)
        with self._abort_lock, suppress(Exception):
            self._is_over = True
            self.executor.clear_abort()

    # ---- between steps

    def compute_apart(self, function: Callable[[Executor], T]) -> T:
        """What `function` makes of the executor, which is its own meanwhile; sequences that it opens stay its own.

        Where it finds too few cells (PoolFullError), snapshots go, and it is called again.
        """
        with self._abort_lock:
            if not self._aborts_all:
                self.executor.clear_abort()  # of a generation whose forward had ended
        while True:
            try:
                return function(self.executor)
            except PoolFullError:
                if not self._evict_snapshot():
                    raise

    def do_idle_work(self) -> bool:
        """A slice of the executor's work that can wait; whether there is more. None before a generation has ended.

        The caller looks for commands between two slices. What fails is not tried again.
        """
        if not self._has_idle_work or self._running or not self.counts["finished"]:
            return False
        try:
            self._has_idle_work = self.executor.do_idle_work()
        except Exception:
            log.exception("the executor's idle work failed")
            self._has_idle_work = False
        return self._has_idle_work

    # ---- a step

    def step(self) -> bool:
        """At most one forward. Whether there may be more to do.

        A step that ends a generation before its forward leaves this to the next one: what `on_settled` queued comes
        first.
        """
        if self._reap():
            return True
        self._admit()
        parts = self._plan()
        while parts:
            try:
                self._forward(parts)
            except PoolFullError as error:
                parts = self._make_room(parts, error)
            else:
                break
        return bool(self._running)

    def _reap(self) -> bool:
        """End what is cancelled or has no room left; whether there was something."""
        n_before = len(self._running)
        for running in list(self._running):
            if running.is_to_end:
                self._end(running, Reason.CANCELLED)
            elif running.work.is_decode and running.session.position >= self.session_limit:
                running.work.publish_rest()
                self._end(running, Reason.LENGTH)
        return len(self._running) < n_before

    def _admit(self) -> None:
        """Let prefills begin whose prompts fit beside those that have begun, in the order in which they came."""
        waiting = [running for running in self._running if not running.is_admitted]
        if not waiting:
            return
        room = self._room_beside_prefills()
        for running in waiting:
            needed = running.work.n_wanted
            while needed > room and self._evict_snapshot():
                room = self._room_beside_prefills()
            if needed > room and any(each.is_admitted for each in self._running):
                return  # it waits: what runs may free cells
            running.is_admitted = True
            running.work.admit(self._clock())
            room -= needed

    def _room_beside_prefills(self) -> int:
        claimed = sum(each.work.n_wanted for each in self._running if each.is_admitted and not each.work.is_decode)
        return self.executor.free_cells - claimed

    def _plan(self) -> list[Part]:
        self._n_turns += 1
        admitted = [running for running in self._running if running.is_admitted]
        if not admitted:
            return []
        if (parts := self._plan_decodes(admitted)) is not None:
            return parts
        adapters = self._group_turns.next([running.session.adapters for running in admitted])
        ready = [running for running in admitted if running.session.adapters == adapters]
        others = any(running.work.is_decode for running in admitted if running.session.adapters != adapters)
        budget, most = self.cost.prefill_budget(), self.options.max_decode_sequences
        return plan_parts(ready, self.executor, budget, self._n_turns, most, others_stream=others)

    def _plan_decodes(self, admitted: list[Running]) -> list[Part] | None:
        """What `plan_parts` gives where all decode in one group and fit a step, or None: nearly every step is so."""
        adapters, most = admitted[0].session.adapters, self.options.max_decode_sequences
        for running in admitted:
            if not running.work.is_decode or running.session.adapters is not adapters:
                return None
        if len(admitted) > self.executor.max_batch_tokens or (most is not None and len(admitted) > most):
            return None
        self._group_turns.clear()
        return [Part(running, 1, running.work.tokens(1), 1, False) for running in admitted]

    def _forward(self, parts: list[Part]) -> None:
        """One forward of `parts`; none where a prompt is to end. Raises PoolFullError, with nothing changed."""
        if self._fail_changed(parts):
            return
        n_vocab = self.executor.n_vocab
        batch, needs = batch_of(parts), needs_of(parts, n_vocab)
        begun_at = self._clock()
        # made outside of the lock: allocating may run finalizers, which may wait for other locks
        in_forward = {part.running.work.state: part.is_prefill for part in parts}
        with self._abort_lock:
            if not self._aborts_all:
                self.executor.clear_abort()
            self._in_forward = in_forward
        try:
            # who cancels from here on finds the forward, and who did before is found: one of the two sees the other
            if any(part.is_prefill and part.running.is_to_end for part in parts):
                return
            found = self.executor.forward_outputs(batch, needs)
            outputs = checked_outputs(found, len(needs), n_vocab)
        except PoolFullError:
            raise
        except AbortedError:
            self._undo(parts)
            return
        except (AllocationError, MemoryError) as error:
            # nothing was computed: one gives way, the others try again with less
            self._undo(parts)
            if any(running.is_admitted for running in self._running):
                self._give_up(self._victim(), failure(error))
            return
        except Exception as error:
            log.exception("a forward of %d tokens failed", batch.n_tokens)
            self._fail_all(parts, error)
            return
        finally:
            with self._abort_lock:
                self._in_forward = {}
        now = self._clock()
        self._count(parts, now - begun_at)
        for part in parts:
            part.running.session.tokens.extend(part.tokens.tolist())
            self._touch(part.running.session)
        rows = rows_of(parts)
        drawn = self._draw_together(parts, outputs, rows)
        for i, part in enumerate(parts):
            self._advance(part, outputs, rows[i], now, drawn.get(i))

    def _draw_together(
        self, parts: list[Part], outputs: Outputs, rows: list[range]
    ) -> dict[int, Drawn | BaseException]:
        """By part, the tokens of those that go over whole rows, where several threads are faster than one."""
        n_vocab = self.executor.n_vocab
        if len(parts) < 2 or n_vocab < LEAST_WIDTH or self._draws.n_threads < 2:
            return {}
        apart = [i for i, part in enumerate(parts) if part.running.work.draws_apart(n_vocab)]
        if len(apart) < 2:
            return {}
        calls = [partial(parts[i].running.work.draw, outputs, rows[i][-1]) for i in apart]
        return dict(zip(apart, self._draws.run(calls), strict=True))

    def _fail_changed(self, parts: list[Part]) -> bool:
        """Fail those whose prepared input is not what it was; whether there was one."""
        found = False
        for part in parts:
            if not part.is_prefill:
                continue
            try:
                part.prepared = part.running.work.prepared(part.n)
            except Exception as error:
                found = True
                self._fail(part.running, error)
        return found

    def _advance(
        self, part: Part, outputs: Outputs, rows: range, now: float, drawn: Drawn | BaseException | None
    ) -> None:
        running = part.running
        if running not in self._running:
            return
        try:
            reason = running.work.advance(part.n, part.tokens, outputs, rows, now, drawn)
        except BaseException as error:
            self._fail(running, error)
        else:
            if reason is not None:
                self._end(running, reason)

    def _count(self, parts: list[Part], seconds: float) -> None:
        n_prefill = n_decode = 0
        for part in parts:
            if part.is_prefill:
                n_prefill += part.n
            else:
                n_decode += part.n
        self.counts["steps"] += 1
        self.counts["prefill_tokens"] += n_prefill
        self.counts["decode_tokens"] += n_decode
        self.cost.note(n_decode, n_prefill, seconds)

    # ---- what goes wrong

    def _undo(self, parts: list[Part]) -> None:
        """After an abort: nobody's fault but the cancelled one's; the others' rows are run again."""
        for part in parts:
            running = part.running
            if not self._rewound(running.session):
                reason = Reason.CANCELLED if running.is_to_end else Reason.FAILED
                self._poison(running, ExecutorError("a step that was aborted could not be undone"), reason)
        self._reap()

    def _rewound(self, state: SessionState) -> bool:
        try:
            self.executor.rewind(state.sequence, state.position)
        except Exception:
            log.exception("an executor could not rewind")
            return False
        return True

    def _fail_all(self, parts: list[Part], error: Exception) -> None:
        for part in parts:
            running = part.running
            if running.is_to_end:
                # it was to end anyway, and the caller must not be told of a failure
                if self._rewound(running.session):
                    self._end(running, Reason.CANCELLED)
                else:
                    self._poison(running, error, Reason.CANCELLED)
            else:
                self._poison(running, error)

    def _poison(self, running: Running, error: BaseException, reason: Reason = Reason.FAILED) -> None:
        running.session.status = SessionStatus.POISONED
        running.session.trouble = f"{type(error).__name__}: {error}"
        self._end(running, reason, failure(error) if reason is Reason.FAILED else None)

    # ---- room

    def _make_room(self, parts: list[Part], error: PoolFullError) -> list[Part]:
        """What to try after a step that found too few cells: snapshots go first, then prefills wait, then a victim."""
        if isinstance(error, SequenceLimitError):
            return self._make_room_for_sequences(parts, error)
        if self._evict_snapshot():
            return parts
        decodes = [part for part in parts if not part.is_prefill]
        if decodes and len(decodes) < len(parts):
            return decodes
        if len(parts) > 1 and not decodes:
            return parts[:1]
        self._give_up(self._victim(), error)
        return []

    def _make_room_for_sequences(self, parts: list[Part], error: SequenceLimitError) -> list[Part]:
        """What to try where too few sequences may have tokens: snapshots go first, then those without tokens wait.

        The end of a generation that has a sequence leaves it with its session, so nobody else is given up.
        """
        if self._evict_snapshot_with_tokens():
            return parts
        lacking = [part for part in parts if not part.running.session.position]
        waiting = lacking[error.free :]
        kept = [part for part in parts if all(part is not each for each in waiting)]
        if not kept or not waiting:
            self._give_up((waiting or parts)[-1].running, error)
            return []
        return kept

    def _victim(self) -> Running:
        admitted = [running for running in self._running if running.is_admitted]
        try:
            chosen = self.options.victim([running.session for running in admitted])
            return next(running for running in admitted if running.session is chosen)
        except Exception:
            log.exception("the choice of a victim failed: the youngest generation is given up")
            return admitted[-1]

    def _give_up(self, running: Running, error: EngineError) -> None:
        """End a generation for lack of cells or memory; its session goes back to where it was before it began.

        Where the executor's memory cannot, the session is evicted: its cells are needed.
        """
        state = running.session
        running.work.next_token = None
        pending = running.work.lead_token
        to = min(running.first, state.position)
        try:
            if not self.executor.can_rewind(state.sequence, to):
                self._evict(state)
                self._end(running, Reason.FAILED, error)
                return
            self.executor.rewind(state.sequence, to)
        except Exception as trouble:
            self._poison(running, trouble)
            return
        del state.tokens[to:]
        state.pending = pending
        self._end(running, Reason.FAILED, error)


def common_prefix(a: list[int], b: list[int]) -> int:
    """How many tokens two histories begin with in common; an opaque position is like no token."""
    for n, (left, right) in enumerate(zip(a, b, strict=False)):
        if left != right:
            return n
    return min(len(a), len(b))
