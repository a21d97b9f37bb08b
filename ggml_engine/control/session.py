"""`Session`: one conversation, owned by the caller, used from any thread."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ggml_engine.control.commands import CloneCommand, CloseCommand, RefuseCommand, RewindCommand, StartCommand
from ggml_engine.control.config import GenConfig
from ggml_engine.control.deadline import Deadline
from ggml_engine.control.future import EngineFuture
from ggml_engine.control.generation import (
    Generation,
    GenerationState,
    OnBreakpoint,
    OnSettled,
    OnUpdate,
    Request,
    failure,
    without_frames,
)
from ggml_engine.control.saved_names import Directory, path_of
from ggml_engine.control.session_state import SessionState
from ggml_engine.errors import ClosedError, EngineError, InputError, SessionBusyError, WouldBlockError
from ggml_engine.executor.prepared import PreparedInput
from ggml_engine.models.adapter_set import AdapterLike

if TYPE_CHECKING:
    from ggml_engine.control.core import Core
    from ggml_engine.control.runner import Runner
    from ggml_engine.control.text import TokenSampler

Tokens = Sequence[int] | npt.NDArray[np.integer]


class Session:
    """A sequence of committed tokens that can be continued, cloned and rewound.

    Made by `Runner.open_session` and `clone_async`. Dropping the last reference closes it, as `close` does.
    """

    def __init__(self, runner: Runner, core: Core, state: SessionState) -> None:
        self._runner = runner  # a session keeps its runner going
        self._core = core
        self._state = state
        self._close = weakref.finalize(self, _close, core, state)
        self._close.atexit = False

    # ---- what it is

    @property
    def id(self) -> int:
        """A number that no other session of the runner has, or had."""
        return self._state.number

    @property
    def runner(self) -> Runner:
        """The runner that it belongs to."""
        return self._runner

    @property
    def adapters(self) -> tuple[tuple[AdapterLike, float], ...]:
        """What it is computed with, each with its scale; those of scale 0 are left out."""
        return self._state.adapters.scaled

    @property
    def fingerprint(self) -> str:
        """The executor's, where there are no adapters: K/V of another name cannot stand for this session's."""
        return self._state.adapters.fingerprint_over(self._core.scheduler.executor.fingerprint)

    @property
    def position(self) -> int:
        """Committed positions: those whose K/V is there."""
        return self._state.position

    @property
    def tokens(self) -> list[int]:
        """The tokens committed so far; -1 for a position of a prepared input."""
        return list(self._state.tokens)

    @property
    def pending(self) -> int | None:
        """The last sampled token, which the next generation commits first; None when there is none."""
        return self._state.pending

    @property
    def limit(self) -> int:
        """The most positions that it can hold."""
        return self._core.scheduler.session_limit

    @property
    def status(self) -> str:
        """open, poisoned, evicted or closed."""
        return self._state.status.value

    @property
    def is_busy(self) -> bool:
        """Whether a generation was asked for that has not ended."""
        return self._state.active is not None

    # ---- generating

    def generate(
        self,
        delta: Tokens | PreparedInput,
        config: GenConfig | None = None,
        *,
        max_tokens: int | None = None,
        timeout: float | None = None,
    ) -> Generation:
        """`generate_async`, waited for. Raises what it failed with, TimeoutError, and WouldBlockError in a callback.

        Whatever ends the waiting, Ctrl-C included, cancels the generation.
        """
        if self._core.is_engine_thread():
            raise WouldBlockError("generate waits for the thread that this callback runs on: use generate_async")
        generation = self.generate_async(delta, config, max_tokens=max_tokens)
        try:
            generation.result(timeout)
        except BaseException:  # Ctrl-C and timeouts: a traceback that is kept must not keep it going
            generation.cancel()
            raise
        return generation

    def generate_async(
        self,
        delta: Tokens | PreparedInput,
        config: GenConfig | None = None,
        on_update: OnUpdate | None = None,
        *,
        max_tokens: int | None = None,
        on_breakpoint: OnBreakpoint | None = None,
        on_settled: OnSettled | None = None,
    ) -> Generation:
        """Commit the pending token if there is one, then `delta`, and generate.

        Never raises: what cannot be ends the generation as failed. Callbacks run on the engine thread and must not
        wait; what they queue runs before the next forward. `on_update` gets every `Update`, `on_breakpoint` the
        position of each prefill breakpoint, `on_settled` the generation, once, when it has ended (on the caller's
        thread where the runner has stopped). `max_tokens` stands for the one in `config`. `delta` are token ids
        [tokens]. The session must be kept: dropping it cancels; dropping the result cancels where no callback listens.
        """
        request = Request(config or GenConfig(), max_tokens, False, on_update, on_breakpoint, on_settled)
        return self._generate(delta, request)

    def generate_from(
        self,
        tokens: Tokens,
        config: GenConfig | None = None,
        on_update: OnUpdate | None = None,
        *,
        max_tokens: int | None = None,
        on_breakpoint: OnBreakpoint | None = None,
        on_settled: OnSettled | None = None,
    ) -> Generation:
        """Generate after the whole history `tokens`: rewinds to the longest common prefix and forwards the rest.

        Where the executor cannot rewind to that position, everything is forwarded again. At least the last token is
        forwarded. Else as `generate_async`.
        """
        request = Request(config or GenConfig(), max_tokens, True, on_update, on_breakpoint, on_settled)
        return self._generate(tokens, request)

    def generate_alone(
        self, tokens: Tokens, config: GenConfig | None = None, *, max_tokens: int | None = None
    ) -> Generation:
        """As `generate_async`, with a result that owns this session: it is closed when the generation has ended."""
        self._state.is_single_use = True
        return self._generate(tokens, Request(config or GenConfig(), max_tokens), keep=self)

    def _generate(self, delta: Tokens | PreparedInput, request: Request, *, keep: object = None) -> Generation:
        """Queue `request`, with `delta` as its tokens when these can be; `keep` lives as long as the handle."""
        core, state = self._core, self._state
        trouble: EngineError | None = None
        sampler: TokenSampler | None = None
        try:
            if state.close_requested:
                raise ClosedError("the session was closed")
            if request.is_whole and isinstance(delta, PreparedInput):
                raise InputError("a history to generate from is token ids, a prepared input was given")
            taken = delta if isinstance(delta, PreparedInput) else self._checked(delta)
            request = replace(request, delta=taken)
            sampler = core.scheduler.text.sampler(request.config.sampler)
        except Exception as error:
            trouble = failure(without_frames(error))  # while it waits to be told, it must not keep this session
        generation = GenerationState(request, core.clock(), core.is_engine_thread, core.scheduler.cancel)
        handle = Generation(generation, keep, cancels_when_dropped=not request.has_listener)
        if sampler is not None and state.claim(generation):
            core.submit(StartCommand(state, generation, sampler))
            return handle
        if sampler is not None:
            sampler.close()
        busy = SessionBusyError("the session is busy: its generation has not ended")
        core.submit(RefuseCommand(generation, trouble or busy))
        return handle

    def _checked(self, tokens: Tokens) -> npt.NDArray[np.int32]:
        given: object = tokens  # a caller without types may give anything
        if given is None or isinstance(given, str):
            raise InputError(f"a session takes token ids, {'nothing' if given is None else 'text'} was given")
        return self._core.scheduler.text.check_tokens(tokens) if len(tokens) else np.empty(0, np.int32)

    # ---- clone, rewind, close

    def clone_async(self, upto: int | None = None) -> EngineFuture[Session | None]:
        """A future of a session that shares the first `upto` committed positions (None: all), idle, nothing pending.

        None instead of a session when that cannot be had: `upto` is not a committed boundary, there is no room for a
        session, this one was closed or poisoned, or the runner stops. Dropping the future drops the clone.
        """
        return self._clone(upto, is_snapshot=False)

    def snapshot_async(self, upto: int | None = None) -> EngineFuture[Session | None]:
        """As `clone_async`, of a session whose cells may be given to others when they run out."""
        return self._clone(upto, is_snapshot=True)

    def _clone(self, upto: int | None, *, is_snapshot: bool) -> EngineFuture[Session | None]:
        if upto is not None and (isinstance(upto, bool) or not isinstance(upto, (int, np.integer))):
            future: EngineFuture[Session | None] = EngineFuture(self._core.is_engine_thread)
            future.refuse(InputError(f"upto is a position, {upto!r} was given"))
            return future
        upto = None if upto is None else int(upto)
        return _clone(self._runner, self._core, self._state, upto, is_snapshot=is_snapshot)

    def rewind_async(self, to: int) -> EngineFuture[int]:
        """A future of the new position: what is held from position `to` on is dropped, the pending token too.

        Fails with SessionBusyError when a generation was asked for that has not ended, with PositionError,
        PoisonedError or SessionError, and with RewindError where the executor keeps no state of that position; then
        nothing has changed.
        """
        future: EngineFuture[int] = EngineFuture(self._core.is_engine_thread)
        if isinstance(to, bool) or not isinstance(to, (int, np.integer)):
            future.refuse(InputError(f"to is a position, {to!r} was given"))
        elif self.is_busy:
            future.refuse(
                SessionBusyError("a session cannot be rewound while it generates: cancel the generation first")
            )
        else:
            self._core.submit(RewindCommand(future, self._state, int(to)))
        return future

    def save(self, directory: Directory, name: str, timeout: float | None = None) -> None:
        """Save what is committed, and the pending token, as `name` in `directory`; one of that name is replaced.

        Its file is there whole or not at all (docs/saved-state.md). Forwards run in between; the session may generate
        meanwhile, and what it commits then is not saved. Prepared inputs cannot be saved. Raises SavedStateError,
        SessionError, PoisonedError, TimeoutError, and WouldBlockError in a callback; then no file has changed.
        """
        if self._core.is_engine_thread():
            raise WouldBlockError("save waits for the thread that this callback runs on: do it after the generation")
        from ggml_engine.control.saving import save_session  # noqa: PLC0415  # a start needs none of it

        save_session(self._core, self._state, path_of(directory, name), Deadline(timeout))

    def yield_when_idle(self) -> None:
        """From now on its cells may be given to others when they run out, while it does not generate: as a snapshot's.

        It is evicted then, and generates no more.
        """
        self._state.is_snapshot = True

    def close(self) -> None:
        """Close it; a running generation is cancelled. Does not wait. Idempotent."""
        self._close()

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Session {self.id}, {self.status}, at {self.position}>"


class SessionLink:
    """Which session it is, however its handles are moved about: keeps neither it nor its runner open."""

    def __init__(self, session: Session) -> None:
        self._runner = weakref.ref(session._runner)
        self._state = session._state
        self.is_in_callback = session._core.is_engine_thread

    def snapshot_async(self, upto: int | None) -> EngineFuture[Session | None] | None:
        """As `Session.snapshot_async`; None when the runner is gone."""
        runner = self._runner()
        return None if runner is None else _clone(runner, runner._core, self._state, upto, is_snapshot=True)

    def barrier_async(self) -> EngineFuture[int] | None:
        """A future of when the engine's thread has done what it is at, callbacks included; None as above."""
        runner = self._runner()
        return None if runner is None else runner.count_cells_async(())


def _clone(
    runner: Runner, core: Core, source: SessionState, upto: int | None, *, is_snapshot: bool
) -> EngineFuture[Session | None]:
    future: EngineFuture[Session | None] = EngineFuture(core.is_engine_thread)
    core.submit(CloneCommand(future, partial(Session, runner, core), source, upto, is_snapshot=is_snapshot))
    return future


def _close(core: Core, state: SessionState) -> None:
    state.close_requested = True
    if (active := state.active) is not None:
        active.request_cancel()
    core.submit(CloseCommand(state))
