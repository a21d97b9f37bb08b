"""What the control plane must do, as lists of tokens: the oracle of the simulator.

Knows no queue and no schedule. It is told which command ran, which rows a forward had and how that ended, and follows:
who was served first, whose generation gave way when cells ran out, and which cells a sequence owns, are facts that it
takes; what these facts lead to it works out by itself. `keys` of a session are what its cells must hold: tokens, and one number for each position of
a prepared input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from simulated_executor import END, FIRST_OPAQUE, SimulatedInput, is_accepted, next_token

from ggml_engine.control.generation import GenerationState, Reason
from ggml_engine.control.session_state import SessionState
from ggml_engine.errors import (
    ContextLengthError,
    EngineError,
    InputError,
    PoisonedError,
    PoolFullError,
    SessionError,
)


@dataclass(slots=True, eq=False)
class Asked:
    """What a generation is asked for. `script` says what its callbacks do, by their number."""

    tokens: list[int]
    prepared: SimulatedInput | None = None
    is_whole: bool = False
    max_tokens: int | None = 4
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: frozenset[int] = frozenset()  # tokens whose text is a stop string
    ignore_eos: bool = False
    breakpoints: tuple[int, ...] = ()
    listens: bool = False  # has on_update and on_breakpoint
    on_settled: bool = False
    script: dict[int, str] = field(default_factory=dict)

    @property
    def is_heard(self) -> bool:
        """Whether a callback hears of it when nobody has its handle."""
        return self.listens or self.on_settled


@dataclass(slots=True, eq=False)
class ModelGeneration:
    session: ModelSession
    asked: Asked
    number: int
    refusal: type[EngineError] | None = None  # what the caller is told instead of a start
    state: GenerationState | None = None
    has_begun: bool = False
    has_ended: bool = False
    cancel_asked: bool = False
    must_be_reaped: bool = False
    lead: int | None = None
    before: list[int] = field(default_factory=list)  # the session's keys that it goes back to for lack of cells
    todo: list[int] = field(default_factory=list)
    done: int = 0
    evaluated: int = 0
    candidate: int | None = None  # what the last forward makes likeliest, while it is not known to be sampled
    next: int | None = None  # sampled and not committed
    sampled: list[int] = field(default_factory=list)
    due: Reason | None = None
    raised: str | None = None  # the callback that raised: update, breakpoint, token
    n_callbacks: int = 0
    n_settled: int = 0
    breakpoints: list[int] = field(default_factory=list)  # those that it was told of

    @property
    def is_decode(self) -> bool:
        return self.done == len(self.todo)


@dataclass(slots=True, eq=False)
class ModelSession:
    number: int
    sequence: int
    state: SessionState
    keys: list[int]
    is_snapshot: bool
    pending: int | None = None
    status: str = "open"
    active: ModelGeneration | None = None
    cannot_rewind: bool = False  # the executor failed to rewind it in this step
    last_use: int = 0

    @property
    def is_busy(self) -> bool:
        """Seen from outside, as a caller would."""
        return self.active is not None and (self.active.state is None or self.active.state.reason is None)

    @property
    def tokens(self) -> list[int]:
        return [-1 if key >= FIRST_OPAQUE else key for key in self.keys]


COUNTED = ("started", "finished", "cancelled", "failed", "shutdown", "steps", "prefill_tokens", "decode_tokens")


class ControlModel:
    """See the module. Every method is told of one fact, and asserts that it can be."""

    def __init__(
        self, limit: int, max_sessions: int, cells_of: Callable[[int], set[int]], *, is_reserved: bool
    ) -> None:
        self.limit = limit
        self.cells_of = cells_of  # of a sequence
        self.is_reserved = is_reserved  # what is admitted cannot fail for space
        self.max_sessions = max_sessions
        self.sessions: dict[int, ModelSession] = {}  # all that ever were
        self.resident: dict[int, ModelSession] = {}  # by sequence
        self.begun: list[ModelGeneration] = []
        self.counts = dict.fromkeys(COUNTED, 0)
        self.closing: set[int] = set()
        self.is_over = False
        self.n_evicted = 0
        self.n_left_alone = 0  # snapshots that were passed over, since their end frees nothing
        self.n_victims = 0
        self.n_poisoned = 0
        self.most_together = 0  # sequences in one forward
        self._rows: list[tuple[ModelGeneration, list[int]]] = []
        self._was_full = False
        self._had_snapshots = False
        self._n_uses = 0

    # ---- sessions

    def may_be_opened(self) -> bool:
        return len(self.resident) < self.max_sessions

    def rewind_failed(self, sequence: int) -> None:
        session = self.resident[sequence]
        session.cannot_rewind = True
        if session.active in self.begun and self.cancels(session.active):
            session.active.due = Reason.CANCELLED

    def opened(self, sequence: int, state: SessionState, keys: list[int], *, is_snapshot: bool = False) -> ModelSession:
        """A session was made: numbers go up, and neither they nor sequences come twice."""
        number = len(self.sessions)
        assert state.number == number, f"session {state.number} was made, the next one is {number}"
        made = ModelSession(number, sequence, state, keys, is_snapshot)
        assert sequence not in self.resident
        self.sessions[number] = self.resident[sequence] = made
        self.used(made)
        return made

    def can_clone(self, session: ModelSession, upto: int) -> bool:
        is_there = session.status == "open" and session.sequence in self.resident
        return is_there and 0 <= upto <= len(session.keys) and self.may_be_opened()

    def rewound(self, session: ModelSession, to: int) -> None:
        del session.keys[to:]
        session.pending = None

    def can_rewind(self, session: ModelSession, to: int) -> bool:
        is_idle = session.active is None or not session.active.has_begun or session.active.has_ended
        return session.status == "open" and is_idle and 0 <= to <= len(session.keys)

    def closed(self, session: ModelSession) -> None:
        """A close has run."""
        if session.status == "evicted":
            return
        if session.active is not None and session.active in self.begun:
            self._end(session.active, Reason.CANCELLED)
        self.resident.pop(session.sequence, None)
        session.status = "closed"

    def evicted(self, sequence: int) -> None:
        """A sequence is about to be closed that nobody asked to close: a snapshot whose end is of use."""
        session = self.resident[sequence]
        assert session.is_snapshot, f"session {session.number} is given up, it is no snapshot"
        assert not session.is_busy, f"snapshot {session.number} is given up while it generates"
        of_snapshots = self._cells_of_snapshots()
        assert of_snapshots, f"snapshot {session.number} is given up in vain: others have all cells"
        idle = self._idle_snapshots()
        useful = [each for each in idle if self._own_cells(each)]
        if not useful:
            useful = [each for each in idle if self.cells_of(each.sequence) & of_snapshots]
        assert session in useful, f"snapshot {session.number} is given up in vain: the end of others frees cells"
        older = [each.number for each in useful if each.last_use < session.last_use]
        assert not older, f"snapshot {session.number} is given up, {older} were used longer ago"
        self.n_evicted += 1
        self.n_left_alone += len(idle) - len(useful)
        del self.resident[sequence]
        session.status = "evicted"

    def _idle_snapshots(self) -> list[ModelSession]:
        return [session for session in self.resident.values() if session.is_snapshot and not session.is_busy]

    def _own_cells(self, *sessions: ModelSession) -> set[int]:
        """Cells that nobody else owns."""
        others = [each for each in self.resident.values() if each not in sessions]
        return self._union(sessions) - self._union(others)

    def _cells_of_snapshots(self) -> set[int]:
        return self._own_cells(*self._idle_snapshots())

    def _union(self, sessions: Iterable[ModelSession]) -> set[int]:
        return {cell for session in sessions for cell in self.cells_of(session.sequence)}

    def used(self, session: ModelSession) -> None:
        self._n_uses += 1
        session.last_use = self._n_uses

    # ---- generations

    def cancels(self, generation: ModelGeneration) -> bool:
        return generation.cancel_asked or generation.session.number in self.closing

    def started(self, generation: ModelGeneration, *, was_cancelled: bool) -> None:
        """A start has run."""
        self.counts["started"] += 1
        session, asked = generation.session, generation.asked
        if was_cancelled:
            self._end(generation, Reason.CANCELLED)
            return
        refusal = self._refusal(session, asked)
        if refusal is not None:
            self._end(generation, Reason.FAILED, error=refusal)
            return
        if asked.is_whole:
            kept = min(_common_prefix(session.keys, asked.tokens), len(asked.tokens) - 1)
            if session.cannot_rewind:
                session.cannot_rewind = False
                self._end(generation, Reason.FAILED)
                return
            del session.keys[kept:]
            session.pending = None
            generation.todo = asked.tokens[kept:]
            generation.lead = None
        else:
            generation.lead = session.pending
            given = asked.tokens if asked.prepared is None else asked.prepared.keys
            generation.todo = given if session.pending is None else [session.pending, *given]
        generation.before = list(session.keys)
        generation.has_begun = True
        if generation.raised:
            self._end(generation, Reason.FAILED)
        else:
            session.pending = None
            self.begun.append(generation)
            self.used(session)

    def _refusal(self, session: ModelSession, asked: Asked) -> type[EngineError] | None:
        if session.status == "poisoned":
            return PoisonedError
        if session.status != "open":
            return SessionError
        if asked.max_tokens is not None and asked.max_tokens < 1:
            return InputError
        n = len(asked.tokens) if asked.prepared is None else len(asked.prepared.keys)
        if n < 1 or (asked.prepared is not None and not is_accepted(asked.prepared)):
            return InputError
        if not asked.is_whole:
            n += len(session.keys) + (session.pending is not None)
        return ContextLengthError if n > self.limit else None

    def refused(self, generation: ModelGeneration) -> None:
        """A generation was refused without a start."""
        self.counts["started"] += 1
        self._end(generation, Reason.FAILED, error=generation.refusal)

    def _end(self, generation: ModelGeneration, *reasons: Reason, error: type[Exception] | None = None) -> None:
        state, session = generation.state, generation.session
        assert state is not None
        assert not generation.has_ended
        assert state.reason in reasons, f"generation {generation.number} ended as {state.reason}, expected {reasons}"
        generation.has_ended = True
        reason = state.reason
        self.counts[reason.value if reason.value in self.counts else "finished"] += 1
        assert (state.error is not None) == (reason is Reason.FAILED), f"{reason} with {state.error!r}"
        if error is not None and reason is Reason.FAILED:
            assert isinstance(state.error, error), f"failed with {state.error!r}, expected {error.__name__}"
        assert generation.n_settled == generation.asked.on_settled, f"on_settled came {generation.n_settled} times"
        assert state.tokens == generation.sampled, f"{state.tokens} were sampled, expected {generation.sampled}"
        stats, n_reused = state.stats, len(generation.before)
        assert stats.generated_tokens == len(generation.sampled)
        assert (stats.reused_tokens, stats.evaluated_tokens) == (n_reused, generation.evaluated)  # R58
        assert stats.prompt_tokens == n_reused + len(generation.todo)  # R46
        assert state.text == self._text(generation), f"{state.text!r} of {generation.sampled}"
        if generation in self.begun:
            self.begun.remove(generation)
        if not generation.has_begun:
            return
        if generation.next is not None:
            session.pending = generation.next
        elif generation.lead is not None and not generation.done:
            session.pending = generation.lead

    @staticmethod
    def _text(generation: ModelGeneration) -> str:
        shown = generation.sampled
        if shown and (shown[-1] in generation.asked.stop_strings or _ends(generation.asked, shown[-1])):
            shown = shown[:-1]
        return "".join(f"<{token}>" for token in shown)

    # ---- steps

    def before_step(self) -> None:
        """What must end in the step that comes now, whatever else happens in it."""
        self._was_full = False
        for generation in self.begun:
            is_full = generation.is_decode and len(generation.session.keys) >= self.limit
            generation.must_be_reaped = self.cancels(generation) or is_full

    def after_step(self) -> None:
        self.resolve()
        self._rows = []
        for session in self.resident.values():
            session.cannot_rewind = False
        for generation in self.begun:
            assert not generation.must_be_reaped, f"generation {generation.number} was to end before the step"
            assert generation.due is None, f"generation {generation.number} has not ended as {generation.due}"
            assert not generation.raised, f"generation {generation.number} goes on after its callback raised"

    def forward(self, rows: Sequence[tuple[int, list[int], list[bool]]], max_tokens: int) -> None:
        """A forward begins: (sequence, keys, wanted rows) for each sequence in it."""
        self.resolve()
        self._rows = []
        self.most_together = max(self.most_together, len(rows))
        assert sum(len(keys) for _, keys, _ in rows) <= max_tokens
        assert len({sequence for sequence, _, _ in rows}) == len(rows), "the rows of a sequence do not stand together"
        for sequence, keys, wanted in rows:
            session = self.resident[sequence]
            generation = session.active
            assert generation is not None, f"session {session.number} is computed, it is idle"
            assert generation in self.begun, f"session {session.number} is computed, its generation does not run"
            assert not generation.must_be_reaped, f"generation {generation.number} was to end before the forward"
            last = generation.done + len(keys) == len(generation.todo)
            if generation.is_decode:
                assert keys == [generation.next], f"{keys} is forwarded, sampled was {generation.next}"
                last = True
            else:
                todo = generation.todo[generation.done : generation.done + len(keys)]
                assert keys == todo, f"{keys} is forwarded, next is {todo}"
                at = len(session.keys)
                prepared = generation.asked.prepared
                is_sound = prepared is None or keys[-1] < FIRST_OPAQUE or not prepared.has_changed
                assert is_sound, "an input that has changed is forwarded"  # R47
                crossed = [point for point in generation.asked.breakpoints if at < point < at + len(keys)]
                assert not crossed, f"a chunk of {at} to {at + len(keys)} crosses {crossed}"
            assert wanted == [False] * (len(keys) - 1) + [last]
            self._rows.append((generation, keys))

    def outcome(self, outcome: str) -> None:
        """The forward ended."""
        if outcome == "full":
            self._was_full = True
            self._had_snapshots = bool(self._cells_of_snapshots())
        if outcome == "failed":
            for generation, _ in self._rows:
                generation.due = Reason.CANCELLED if self.cancels(generation) else Reason.FAILED
        if outcome != "done":
            return
        self.counts["steps"] += 1
        for generation, keys in self._rows:
            generation.session.keys += keys
            self.used(generation.session)
            if generation.is_decode:
                generation.next = None
                self.counts["decode_tokens"] += 1
            else:
                generation.done += len(keys)
                generation.evaluated += len(keys)
                self.counts["prefill_tokens"] += len(keys)
            if generation.is_decode:
                generation.candidate = next_token(generation.session.keys)

    def resolve(self) -> None:
        """Take up what generations have come to, as their handles show it."""
        for generation in list(self.begun):
            state = generation.state
            assert state is not None
            if generation.candidate is not None:
                self._sampled(generation)
            elif len(state.tokens) != len(generation.sampled):
                raise AssertionError(f"a token of generation {generation.number} comes from nowhere")
            if state.reason is not None:
                self._ended(generation)

    def _sampled(self, generation: ModelGeneration) -> None:
        state, asked, token = generation.state, generation.asked, generation.candidate
        assert state is not None
        assert token is not None
        generation.candidate = None
        n = len(generation.sampled)
        if len(state.tokens) == n:
            is_first = n == 0
            excused = generation.raised in ("update", "breakpoint") or (is_first and self.cancels(generation))
            assert excused, f"generation {generation.number} sampled nothing"
            return
        assert state.tokens[n:] == [token], f"{state.tokens[n:]} came, a cold run samples {token}"
        generation.sampled.append(token)
        generation.next = token
        if token in asked.stop_tokens:
            generation.due = Reason.STOP
        elif token == END and not asked.ignore_eos:
            generation.due = Reason.FINISHED
        elif token in asked.stop_strings:
            generation.due = Reason.STOP
        elif asked.max_tokens is not None and len(generation.sampled) >= asked.max_tokens:
            generation.due = Reason.LENGTH

    def _ended(self, generation: ModelGeneration) -> None:
        """A generation that ran has ended, by a step or the end of the runner: it must be one of the known ways."""
        session, state = generation.session, generation.state
        assert state is not None
        prepared = generation.asked.prepared
        if generation.raised:
            self._end(generation, Reason.FAILED)
        elif session.cannot_rewind:
            session.status = "poisoned"
            generation.next = None
            self._end(generation, Reason.CANCELLED if generation.due is Reason.CANCELLED else Reason.FAILED)
        elif generation.due is Reason.FAILED and not (self.cancels(generation) and state.reason is Reason.CANCELLED):
            # one that a callback cancelled while the failure was told to others may have either end
            session.status = "poisoned"
            self.n_poisoned += 1
            self._end(generation, Reason.FAILED)
        elif generation.due not in (None, Reason.FAILED):
            self._end(generation, generation.due)
        elif self.cancels(generation) and state.reason is Reason.CANCELLED:
            self._end(generation, Reason.CANCELLED)
        elif state.reason is Reason.LENGTH:
            assert generation.is_decode
            assert len(session.keys) >= self.limit, f"generation {generation.number} ended, there is room"
            self._end(generation, Reason.LENGTH)
        elif isinstance(state.error, InputError) and prepared is not None and prepared.has_changed:
            self._end(generation, Reason.FAILED)  # R47
        elif state.reason is Reason.FAILED:
            assert not self.is_reserved, f"generation {generation.number} failed, its cells are reserved"  # R50
            assert self._was_full, f"generation {generation.number} failed for no reason: {state.error!r}"
            assert not self._had_snapshots, "a generation was given up while snapshots alone had cells"
            self.n_victims += 1
            generation.next, generation.done = None, 0  # all of it is undone
            session.keys = list(generation.before)
            self._end(generation, Reason.FAILED, error=PoolFullError)
        else:
            assert self.is_over, f"generation {generation.number} ended as {state.reason} for no reason"
            self._end(generation, Reason.SHUTDOWN)

    def over(self) -> None:
        """The runner has stopped."""
        self.is_over = True
        self.resolve()
        assert not self.begun, "a generation outlives its runner"
        for session in self.resident.values():
            session.status = "closed"
        self.resident.clear()


def _common_prefix(keys: list[int], tokens: list[int]) -> int:
    n = 0
    while n < min(len(keys), len(tokens)) and keys[n] == tokens[n]:
        n += 1
    return n


def _ends(asked: Asked, token: int) -> bool:
    return token in asked.stop_tokens or (token == END and not asked.ignore_eos)
