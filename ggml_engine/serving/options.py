from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ggml_engine.errors import OptionError

DEFAULT_SERVER_ENTRIES = 64


@dataclass(frozen=True)
class ServingOptions:
    prefix_cache_entries: int = 0
    prefix_checkpoint_prompt_end: Literal["initial", "every"] = "initial"
    prefix_checkpoint_interval: int | None = None
    prefix_checkpoint_policy: Callable[[int, int, Sequence[int]], Iterable[int]] | None = None
    prefix_capture_slots: int | None = None
    max_sessions: int = 64
    max_requests: int = 32
    max_queue: int = 128
    max_session_tokens: int | None = None
    session_idle_s: float | None = 600.0

    def __post_init__(self) -> None:
        if self.prefix_checkpoint_prompt_end == "every" and not self.prefix_cache_entries:
            raise OptionError("prefix_checkpoint_prompt_end 'every' cannot go with prefix_cache_entries 0")
