"""What handles ask of the engine thread: one class for each thing.

A command knows how to do it (`run`, on the engine thread) and how to tell that it will not be done (`refuse`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from ggml_engine.control.core import Core
from ggml_engine.control.future import EngineFuture
from ggml_engine.control.generation import GenerationState, without_frames
from ggml_engine.control.session_state import SessionState
from ggml_engine.control.text import TokenSampler
from ggml_engine.errors import AbortedError, ClosedError, EngineError
from ggml_engine.models.adapter_set import AdapterSet

log = logging.getLogger("ggml_engine.control")

Handle = TypeVar("Handle")
Result = TypeVar("Result")
MakeHandle = Callable[[SessionState], Handle]


class OpenCommand(Generic[Handle]):
    """Open a session and hand out its handle."""

    session = None
    is_close = False

    def __init__(
        self, future: EngineFuture[Handle], make: MakeHandle[Handle], adapters: AdapterSet | None = None
    ) -> None:
        self._future = future
        self._make: MakeHandle[Handle] | None = make
        self._adapters = adapters

    def run(self, core: Core) -> None:
        """See the class."""
        make, self._make = self._make, None
        if make is None or not self._future.set_running_or_notify_cancel():
            return
        core.make_room_for_a_session(None)
        try:
            state = core.scheduler.open(self._adapters)
        except Exception as error:
            self._future.refuse(without_frames(error))
            return
        handle = _handle_of(core, state, make)
        if handle is None:
            self._future.refuse(EngineError("the session could not be handed out"))
        else:
            self._future.settle(handle)

    def refuse(self, core: Core) -> None:  # noqa: ARG002  # see Command
        """See Command."""
        self._make = None
        self._future.refuse(ClosedError("the runner has stopped"))


class CloneCommand(Generic[Handle]):
    """Clone a session up to a position (None: all that is committed) and hand out the child's handle, or None."""

    is_close = False

    def __init__(
        self,
        future: EngineFuture[Handle | None],
        make: MakeHandle[Handle],
        source: SessionState,
        upto: int | None,
        *,
        is_snapshot: bool,
    ) -> None:
        self._future = future
        self._make: MakeHandle[Handle] | None = make
        self.session = source
        self._upto = upto
        self._is_snapshot = is_snapshot

    def run(self, core: Core) -> None:
        """See the class."""
        make, self._make = self._make, None
        if make is None or not self._future.set_running_or_notify_cancel():
            return
        upto = self.session.position if self._upto is None else self._upto
        core.make_room_for_a_session(self.session)
        try:
            state = core.scheduler.clone(self.session, upto, is_snapshot=self._is_snapshot)
        except Exception:
            log.exception("a clone failed")
            state = None
        # if the future was settled meanwhile, or dropped, the handle dies here, and its finalizer closes the session
        self._future.settle(None if state is None else _handle_of(core, state, make))

    def refuse(self, core: Core) -> None:  # noqa: ARG002  # see Command
        """See Command."""
        self._make = None
        self._future.settle(None)


def _handle_of(core: Core, state: SessionState, make: MakeHandle[Handle]) -> Handle | None:
    """The handle; a session that cannot have one is closed at once."""
    try:
        return make(state)
    except Exception:
        log.exception("a session could not be handed out")
        core.scheduler.close(state)
        return None


class RewindCommand:
    """Rewind a session."""

    is_close = False

    def __init__(self, future: EngineFuture[int], state: SessionState, to: int) -> None:
        self._future = future
        self.session = state
        self._to = to

    def run(self, core: Core) -> None:
        """See the class."""
        if not self._future.set_running_or_notify_cancel():
            return
        try:
            position = core.scheduler.rewind(self.session, self._to)
        except Exception as error:
            self._future.refuse(without_frames(error))
        else:
            self._future.settle(position)

    def refuse(self, core: Core) -> None:  # noqa: ARG002  # see Command
        """See Command."""
        self._future.refuse(ClosedError("the runner has stopped"))


class CountCellsCommand:
    """Count the distinct cells of sessions; those that are closed or evicted by then have none."""

    session = None
    is_close = False

    def __init__(self, future: EngineFuture[int], states: Sequence[SessionState]) -> None:
        self._future = future
        self._states = states

    def run(self, core: Core) -> None:
        """See the class."""
        if not self._future.set_running_or_notify_cancel():
            return
        resident = {id(state) for state in core.scheduler.sessions}
        try:
            n = core.scheduler.executor.count_cells([s.sequence for s in self._states if id(s) in resident])
        except Exception as error:
            self._future.refuse(without_frames(error))
        else:
            self._future.settle(n)

    def refuse(self, core: Core) -> None:  # noqa: ARG002  # see Command
        """See Command: nobody holds cells of a runner that has stopped."""
        self._future.settle(0)


class CallCommand(Generic[Result]):
    """Call something on the engine thread, between two forwards; its future gets what it gives, or raises."""

    is_close = False

    def __init__(
        self, future: EngineFuture[Result], call: Callable[[Core], Result], session: SessionState | None = None
    ) -> None:
        self._future = future
        self._call: Callable[[Core], Result] | None = call
        self.session = session

    def run(self, core: Core) -> None:
        """See the class."""
        call, self._call = self._call, None
        if call is None or not self._future.set_running_or_notify_cancel():
            return
        try:
            result = call(core)
        except AbortedError:  # only a runner that stops does that between forwards
            self.refuse(core)
        except Exception as error:
            self._future.refuse(without_frames(error))
        else:
            self._future.settle(result)

    def refuse(self, core: Core) -> None:  # noqa: ARG002  # see Command
        """See Command."""
        self._call = None
        self._future.refuse(ClosedError("the runner has stopped"))


class CloseCommand:
    """Close a session."""

    is_close = True

    def __init__(self, state: SessionState) -> None:
        self.session = state

    def run(self, core: Core) -> None:
        """See the class."""
        core.scheduler.close(self.session)

    def refuse(self, core: Core) -> None:
        """See Command: everything is closed there."""


class StartCommand:
    """Start a generation that its session was claimed for."""

    is_close = False

    def __init__(self, state: SessionState, generation: GenerationState, sampler: TokenSampler) -> None:
        self.session = state
        self._generation = generation
        self._sampler = sampler

    def run(self, core: Core) -> None:
        """See the class."""
        core.scheduler.start(self.session, self._generation, self._sampler)

    def refuse(self, core: Core) -> None:
        """See Command."""
        self._sampler.close()
        core.scheduler.shut(self.session, self._generation)


class RefuseCommand:
    """End a generation that cannot begin, on the thread that ends all others."""

    session = None
    is_close = False

    def __init__(self, generation: GenerationState, error: EngineError) -> None:
        self._generation = generation
        self._error = error

    def run(self, core: Core) -> None:
        """See the class."""
        core.scheduler.refuse(self._generation, self._error)

    def refuse(self, core: Core) -> None:
        """See Command."""
        self.run(core)
