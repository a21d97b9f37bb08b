"""`LlamaOptions`: how libllama executes a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ggml_engine.errors import OptionError
from ggml_engine.ggml.llama_context import MAX_SLOTS
from ggml_engine.ggml.threads import ThreadCounts

# libllama keeps a row of logits for each sequence, and a recurrent state from the start.
_SEQUENCES: Final = 32
_RECURRENT_SEQUENCES: Final = 8


@dataclass(frozen=True, slots=True)
class LlamaOptions:
    """How libllama executes a model.

    `capacity` is in cells, all of which take their memory at once. `max_sequences` may have tokens at a time, 32 by
    default and 8 where each has a recurrent state; at most 255. `attention` "auto" is libllama's choice. `threads`,
    `threads_batch` and `leave_cores` are those of `ThreadCounts.choose`.
    """

    capacity: int = 4096
    max_batch_tokens: int = 512
    max_sequences: int | None = None
    attention: Literal["auto", "flash", "matmul"] = "auto"
    k_type: str = "f16"
    v_type: str = "f16"
    threads: int | None = None
    threads_batch: int | None = None
    leave_cores: int = 0

    def __post_init__(self) -> None:
        if self.attention not in ("auto", "flash", "matmul"):
            raise OptionError(f"libllama's attention is auto, flash or matmul, asked for {self.attention!r}")
        limits = {"capacity": 2**31 - 1024, "max_batch_tokens": 2**20, "max_sequences": MAX_SLOTS - 1}
        for name, most in limits.items():
            value = getattr(self, name)
            if value is None and name == "max_sequences":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise OptionError(f"{name} must be an integer from 1 to {most}, is {value!r}")

        self.thread_counts()

    def thread_counts(self) -> ThreadCounts:
        """How many threads compute a step. Raises OptionError."""
        return ThreadCounts.choose(self.threads, self.threads_batch, self.leave_cores)

    def sequences(self, *, keeps_positions: bool) -> int:
        """How many sequences may have tokens at a time, for a memory of that kind."""
        return self.max_sequences or (_SEQUENCES if keeps_positions else _RECURRENT_SEQUENCES)
