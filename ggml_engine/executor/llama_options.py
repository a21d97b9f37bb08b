"""`LlamaOptions`: how libllama executes a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from ggml_engine.errors import OptionError
from ggml_engine.ggml.backends import MAX_THREADS
from ggml_engine.ggml.llama_context import MAX_SLOTS

# libllama keeps a row of logits for each sequence, and a recurrent state from the start.
_SEQUENCES: Final = 32
_RECURRENT_SEQUENCES: Final = 8


@dataclass(frozen=True, slots=True)
class LlamaOptions:
    """How libllama executes a model.

    `capacity` is in cells, all of which take their memory at once. `max_sequences` may have tokens at a time, 32 by
    default and 8 where each has a recurrent state; at most 255. `attention` "auto" is libllama's choice.
    """

    capacity: int = 4096
    max_batch_tokens: int = 512
    max_sequences: int | None = None
    attention: Literal["auto", "flash", "matmul"] = "auto"
    k_type: str = "f16"
    v_type: str = "f16"
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.attention not in ("auto", "flash", "matmul"):
            raise OptionError(f"libllama's attention is auto, flash or matmul, asked for {self.attention!r}")
        limits = {"capacity": 2**31 - 1024, "max_batch_tokens": 2**20, "max_sequences": MAX_SLOTS - 1}
        for name, most in {**limits, "threads": MAX_THREADS}.items():
            value = getattr(self, name)
            if value is None and name in ("max_sequences", "threads"):
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise OptionError(f"{name} must be an integer from 1 to {most}, is {value!r}")

    def sequences(self, *, keeps_positions: bool) -> int:
        """How many sequences may have tokens at a time, for a memory of that kind."""
        return self.max_sequences or (_SEQUENCES if keeps_positions else _RECURRENT_SEQUENCES)
