"""`ServingOptions`: the one place of the names and defaults of what a serving runtime keeps, shares and bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from ggml_engine.errors import OptionError

DEFAULT_SERVER_ENTRIES = 64  # of the shared prefix cache, where a server over a cell cache is not told otherwise
_CHECKPOINT_SLOTS = 2

CheckpointPolicy = Callable[[int, int, Sequence[int]], Iterable[int]]
PromptEnd = Literal["initial", "every"]


@dataclass(frozen=True, slots=True)
class ServingOptions:
    """What a `ServingRuntime` keeps, shares and bounds.

    `prefix_cache_entries` is how many snapshots all callers share; 0 switches the cache off.
    `prefix_checkpoint_prompt_end` says of which prompts the end is captured: of the one that begins a session
    ("initial"), or of every turn's ("every"). `prefix_checkpoint_interval` captures every so many tokens of a prompt as
    well, with "initial" only. `prefix_checkpoint_policy(start, opening, prompt)` says instead of both at which
    positions of a prompt there are snapshots: `start` is where its evaluation begins, `opening` what the request says
    of how many tokens many prompts have in common, and the positions are from start + 1 to len(prompt).
    `prefix_capture_slots` bounds how many clones may be on their way at once (None: `min(max_sessions, max_requests)`,
    2 with an interval or a policy).

    `max_sessions` named sessions are kept, `max_requests` generations compute at once (each of a request's choices is
    one), `max_queue` requests wait, and beyond that those of partitions that have less than their share of the queue.
    `max_session_tokens` bounds prompt and reply together (None: what the runner bounds). A named session that nobody
    used for `session_idle_s` seconds is closed (None: never).

    Raises OptionError for values, and combinations, that cannot be; it names both of these.
    """

    prefix_cache_entries: int = 0
    prefix_checkpoint_prompt_end: PromptEnd = "initial"
    prefix_checkpoint_interval: int | None = None
    prefix_checkpoint_policy: CheckpointPolicy | None = None
    prefix_capture_slots: int | None = None
    max_sessions: int = 64
    max_requests: int = 32
    max_queue: int = 128
    max_session_tokens: int | None = None
    session_idle_s: float | None = 600.0

    def __post_init__(self) -> None:
        for name, least in (("prefix_cache_entries", 0), ("max_sessions", 1), ("max_requests", 1), ("max_queue", 0)):
            _check_count(name, getattr(self, name), least)
        for name in ("prefix_checkpoint_interval", "prefix_capture_slots", "max_session_tokens"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name), 1)
        if self.prefix_checkpoint_prompt_end not in ("initial", "every"):
            raise OptionError(
                f"prefix_checkpoint_prompt_end is initial or every, asked for {self.prefix_checkpoint_prompt_end!r}"
            )
        policy: object = self.prefix_checkpoint_policy
        if policy is not None and not callable(policy):
            raise OptionError(f"prefix_checkpoint_policy is a function of start, opening and prompt, is {policy!r:.60}")
        idle: object = self.session_idle_s
        if idle is not None and (
            isinstance(idle, bool) or not isinstance(idle, (int, float)) or not 0 < idle < math.inf
        ):
            raise OptionError(f"session_idle_s must be a positive number of seconds or None, is {idle!r}")
        self._check_together()

    def _check_together(self) -> None:
        every = self.prefix_checkpoint_prompt_end == "every"
        if every and self.prefix_checkpoint_interval is not None:
            raise OptionError(
                f"prefix_checkpoint_prompt_end 'every' and prefix_checkpoint_interval "
                f"{self.prefix_checkpoint_interval} exclude each other: an interval goes with 'initial'"
            )
        if self.prefix_cache_entries:
            return
        asked = {
            "prefix_checkpoint_prompt_end 'every'": every,
            "prefix_checkpoint_interval": self.prefix_checkpoint_interval is not None,
            "prefix_checkpoint_policy": self.prefix_checkpoint_policy is not None,
        }
        for name, is_asked in asked.items():
            if is_asked:
                raise OptionError(f"{name} needs a cache to capture into, and prefix_cache_entries is 0")

    @classmethod
    def of(cls, values: Mapping[str, object]) -> ServingOptions:
        """Options by name, as a configuration has them; those that are not given have their defaults.

        Raises OptionError for a name that is none.
        """
        names = [field.name for field in fields(cls)]
        unknown = sorted(str(name) for name in values if name not in names)
        if unknown:
            raise OptionError(f"there is no option {', '.join(unknown)}; there are: {', '.join(names)}")
        given: dict[str, Any] = dict(values)  # of whatever types: they are checked
        return cls(**given)

    @property
    def capture_slots(self) -> int:
        """How many clones may be on their way at once."""
        if self.prefix_capture_slots is not None:
            return self.prefix_capture_slots
        has_checkpoints = self.prefix_checkpoint_interval is not None or self.prefix_checkpoint_policy is not None
        return _CHECKPOINT_SLOTS if has_checkpoints else min(self.max_sessions, self.max_requests)

    @property
    def resident_sessions(self) -> int:
        """How many sessions of the runner there may be at once: named ones, live ones, snapshots and clones."""
        return self.max_sessions + self.max_requests + self.prefix_cache_entries + self.capture_slots

    def check_room(self, max_resident: int) -> None:
        """Raise OptionError where a runner of so many sessions (its `max_sessions`) is too small for this."""
        if max_resident < self.resident_sessions:
            raise OptionError(
                f"max_sessions of the runner is {max_resident}, {self.resident_sessions} may be needed: max_sessions "
                f"{self.max_sessions} + max_requests {self.max_requests} + prefix_cache_entries "
                f"{self.prefix_cache_entries} + prefix_capture_slots {self.capture_slots}"
            )


def _check_count(name: str, value: object, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(f"{name} must be an integer of at least {least}, is {value!r}")
