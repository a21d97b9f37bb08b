"""What callers and their callbacks do with generations in the simulator of the control plane."""

from __future__ import annotations

from typing import Any

import numpy as np
from control_model import Asked, ModelGeneration, ModelSession
from simulated_callers import Callers, Expectation
from simulated_executor import N_VOCAB, ForeignInput, SimulatedInput

from ggml_engine.control.commands import RefuseCommand, StartCommand
from ggml_engine.control.config import GenConfig
from ggml_engine.control.generation import Generation, Reason, Update
from ggml_engine.control.session import Session
from ggml_engine.errors import ClosedError, InputError, SessionBusyError


class CallbackError(Exception):
    """Raised by a callback on purpose."""


class GeneratingCallers(Callers):
    """Callers that generate, with callbacks that do what their script says."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.generations: dict[int, Generation] = {}
        self.asked: list[ModelGeneration] = []  # all that ever were, by number
        self._queued: ModelGeneration | None = None
        self._n_inputs = 0

    def _pick_idle(self) -> Session | None:
        """Rather one that can generate."""
        sessions = self.model.sessions
        idle = [n for n in self.handles if sessions[n].status == "open" and not sessions[n].is_busy]
        if self.random.random() < 0.1:
            return self.pick()
        if not idle:
            return None
        return self.handles[self.random.choice(idle)]

    def generate(self) -> None:
        session = self._pick_idle()
        if session is None:
            return self.open()
        model = self.model.sessions[session.id]
        asked = self._asked(model)
        generation = ModelGeneration(model, asked, len(self.asked))
        self.asked.append(generation)
        if session.id in self.model.closing:
            generation.refusal = ClosedError
        elif not all(0 <= token < N_VOCAB for token in asked.tokens):
            generation.refusal = InputError
        elif model.is_busy:
            generation.refusal = SessionBusyError
        self.note(f"generate {generation.number} in {session.id}: {asked}")
        self._queued = generation

        def ran(was_cancelled: bool) -> None:
            if generation.refusal is not None:
                self.model.refused(generation)
            else:
                self.model.started(generation, was_cancelled=was_cancelled)

        def refused() -> None:
            reasons = Reason.SHUTDOWN if generation.refusal is None else Reason.FAILED
            self.model.counts["started"] += 1
            self.model._end(generation, reasons, error=generation.refusal)

        expectation = Expectation(ran, refused, lambda: self.model.cancels(generation))
        if generation.refusal is None:
            model.active = generation
        self.next_expectation = expectation
        handle = self._generate(session, generation)
        if not asked.is_heard and self.random.random() < 0.1:
            self.note(f"generation {generation.number} is dropped")
            generation.cancel_asked = True
        else:
            self.generations[generation.number] = handle
        return None

    def on_queued(self, command: StartCommand | RefuseCommand) -> None:
        generation, self._queued = self._queued, None
        assert generation is not None
        generation.state = command._generation
        if isinstance(command, RefuseCommand):
            assert generation.refusal is not None, f"it was refused: {command._error!r}"
        else:
            assert generation.refusal is None, "what cannot be was started"

    def _asked(self, model: ModelSession) -> Asked:
        pick, chance = self.random.choice, self.random.random
        tokens = [pick(range(N_VOCAB)) for _ in range(pick((1, 1, 2, 3, 5, 8)))]
        prepared = None
        is_whole = chance() < 0.3
        if is_whole:
            shared = model.tokens[: self.random.randint(0, len(model.keys))]
            tokens = [token for token in shared if token >= 0] + (tokens if chance() < 0.8 else [])
        elif chance() < 0.15:
            self._n_inputs += 1
            kind = ForeignInput if chance() < 0.2 else SimulatedInput
            prepared, tokens = kind(self._n_inputs, pick((0, 1, 3, 7)), pick((1 << 30, 1 << 30, 1, 2))), []
        elif chance() < 0.05:
            tokens = pick(([], [N_VOCAB], [-1]))
        at = len(model.keys)
        asked = Asked(tokens, prepared, is_whole and prepared is None)
        asked.max_tokens = pick((1, 2, 4, 9, 9, None)) if chance() > 0.03 else 0
        if chance() < 0.2:
            asked.stop_tokens = frozenset((pick(range(N_VOCAB)), pick(range(N_VOCAB))))
        if chance() < 0.2:
            asked.stop_strings = frozenset((pick(range(N_VOCAB)),))
        asked.ignore_eos = chance() < 0.2
        if chance() < 0.3:
            asked.breakpoints = tuple(max(1, at + self.random.randint(-2, 8)) for _ in range(2))
        asked.listens = chance() < 0.5
        asked.on_settled = chance() < 0.5
        if asked.listens or asked.on_settled:
            for _ in range(pick((0, 0, 1, 2))):
                asked.script[pick(range(6))] = pick(("act", "act", "act", "cancel", "raise"))
        return asked

    def _generate(self, session: Session, generation: ModelGeneration) -> Generation:
        asked = generation.asked
        config = GenConfig(
            max_tokens=asked.max_tokens or None,
            stop=tuple(f"<{token}>" for token in asked.stop_strings),
            stop_tokens=asked.stop_tokens,
            ignore_eos=asked.ignore_eos,
            prefill_breakpoints=asked.breakpoints,
        )
        on_update: Any = None
        on_breakpoint: Any = None
        on_settled: Any = None
        if asked.listens:

            def on_update(update: Update) -> None:
                self._called(generation, "token" if update.tokens else "update")

            def on_breakpoint(at: int) -> None:
                self.noting(lambda: self._at_breakpoint(generation, at))
                self._called(generation, "breakpoint")

        if asked.on_settled:

            def on_settled(handle: Generation) -> None:
                generation.n_settled += 1
                if handle.reason is None and self.trouble is None:
                    self.trouble = AssertionError("on_settled came before the end")
                self._called(generation, "settled")

        given = np.array(asked.tokens, np.int64) if asked.prepared is None else asked.prepared
        call = session.generate_from if asked.is_whole else session.generate_async
        most = 0 if asked.max_tokens == 0 else None
        return call(given, config, on_update, max_tokens=most, on_breakpoint=on_breakpoint, on_settled=on_settled)

    def _at_breakpoint(self, generation: ModelGeneration, at: int) -> None:
        assert at in generation.asked.breakpoints, f"told of {at}, asked for {generation.asked.breakpoints}"
        assert at == len(generation.session.keys), f"told of {at} at position {len(generation.session.keys)}"
        assert at not in generation.breakpoints, f"told of {at} twice"
        assert not generation.cancel_asked, "a generation that is to end shows a checkpoint"  # R59
        generation.breakpoints.append(at)

    def _called(self, generation: ModelGeneration, what: str) -> None:
        """A callback: do what the script says."""
        todo = generation.asked.script.get(generation.n_callbacks)
        generation.n_callbacks += 1
        if todo is None:
            return
        self.note(f"callback of {generation.number} ({what}): {todo}")
        if todo == "cancel":
            self._cancel(generation.number)
        elif todo == "act":
            self.noting(self.act_in_callback)
        elif todo == "raise":
            if what != "settled":
                generation.raised = what
            raise CallbackError

    def _cancel(self, number: int) -> None:
        handle = self.generations.get(number)
        if handle is not None:
            self.note(f"cancel {number}")
            self.asked[number].cancel_asked = True
            handle.cancel()

    def cancel(self) -> None:
        numbers = [number for number in self.generations if not self.asked[number].has_ended]
        if not numbers or self.random.random() < 0.1:
            numbers = list(self.generations)
        if numbers:
            self._cancel(self.random.choice(numbers))

    def drop_generation(self) -> None:
        if self.generations:
            number = self.random.choice(list(self.generations))
            self.note(f"drop generation {number}")
            if not self.asked[number].asked.is_heard:
                self.asked[number].cancel_asked = True
            del self.generations[number]
