"""How a runner is bounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ggml_engine.control.session_state import SessionState
from ggml_engine.errors import OptionError

_MOST_SESSIONS = 1 << 20  # what a reservation may be asked for, however few of them will fit

Victim = Callable[[Sequence[SessionState]], SessionState]


def youngest(sessions: Sequence[SessionState]) -> SessionState:
    """The session whose generation began last: it has least to lose."""
    return sessions[-1]


@dataclass(frozen=True, slots=True)
class RunnerOptions:
    """Bounds of a runner.

    `max_sessions` counts all that are resident: active, idle and snapshots. `reserve` "full" admits a session only
    where the `max_session_tokens` of all fit the capacity at once, so that none can fail for space; "none" overcommits,
    and when cells run out snapshots go first, then `victim` (given the sessions that generate, oldest generation first)
    chooses whose generation ends with PoolFullError. `switch_interval_s` shortens Python's own thread switch interval
    (`sys.setswitchinterval`, for the whole process) to that: the engine's thread asks for Python's lock between
    forwards, and a thread that computes in Python keeps it for so long each time. None leaves it. At most
    `max_decode_sequences` sessions decode in one step (None: all that a step has room for); where there are more, they
    take turns. Tokens of sessions whose samplers go over whole rows are chosen by `sampling_threads` threads (None: one
    for each processor, 4 at most), the engine's among them. Raises OptionError for what cannot be.
    """

    max_sessions: int = 1024
    max_session_tokens: int | None = None
    reserve: Literal["none", "full"] = "none"
    victim: Victim = youngest
    switch_interval_s: float | None = 0.0005
    max_decode_sequences: int | None = None
    sampling_threads: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_sessions", "max_session_tokens", "max_decode_sequences", "sampling_threads"):
            value = getattr(self, name)
            if value is None and name != "max_sessions":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(f"{name} must be a positive integer, is {value!r}")
        interval = self.switch_interval_s
        if interval is not None and not (isinstance(interval, (int, float)) and 1e-5 <= interval <= 1):
            raise OptionError(f"switch_interval_s must be 0.00001 to 1 second or None, is {interval!r}")
        if self.reserve not in ("none", "full"):
            raise OptionError(f"reserve is none or full, asked for {self.reserve!r}")
        if self.reserve == "full" and self.max_session_tokens is None:
            raise OptionError("reserve 'full' needs max_session_tokens: that is what it reserves for each session")

    def check(self, capacity: int) -> None:
        """Raise OptionError for bounds that no executor of `capacity` cells can keep."""
        if self.reserve != "full" or self.max_session_tokens is None:
            return
        if self.max_session_tokens > capacity or self.max_sessions > max(capacity, _MOST_SESSIONS):
            raise OptionError(
                f"reserve 'full' of max_session_tokens={self.max_session_tokens} for up to "
                f"max_sessions={self.max_sessions} cannot fit {capacity} cells"
            )

    def refusal(self, n_sessions: int, capacity: int, run: int = 1) -> str:
        """Why there cannot be `n_sessions` in `capacity` cells, taken in runs; empty when there can."""
        if n_sessions > self.max_sessions:
            return f"{n_sessions} sessions were asked for, at most {self.max_sessions} may be resident (max_sessions)"
        if self.reserve == "full" and self.max_session_tokens is not None:
            needed = n_sessions * -(-self.max_session_tokens // run) * run
            if needed > capacity:
                return (
                    f"{n_sessions} sessions of {self.max_session_tokens} tokens need {needed} cells, there are "
                    f"{capacity} (reserve 'full')"
                )
        return ""
