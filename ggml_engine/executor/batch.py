"""What one forward is asked to do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Tokens of one or more sequences, in any order that keeps each sequence's own.

    `wants_logits` marks the tokens whose logits come back, in batch order. `positions` may be left out: then every
    sequence continues where it is.
    """

    tokens: npt.NDArray[np.int32]  # [n_tokens]
    sequences: npt.NDArray[np.int32]  # [n_tokens]
    wants_logits: npt.NDArray[np.bool_]  # [n_tokens]
    positions: npt.NDArray[np.int32] | None = None  # [n_tokens]

    @classmethod
    def of_sequence(cls, sequence: int, tokens: npt.ArrayLike, *, logits: str = "last") -> Batch:
        """Tokens of one sequence; logits of the "last", of "all" or of "none"."""
        ids = np.asarray(tokens)
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
            raise InputError(f"tokens must be a non-empty list of integers, got {ids.dtype} {list(ids.shape)}")
        wanted = np.full(ids.size, logits == "all")
        wanted[-1] = logits != "none"
        return cls(_as_i32(ids), np.full(ids.size, sequence, np.int32), wanted)

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return int(self.tokens.size)

    @property
    def n_outputs(self) -> int:
        """Number of tokens whose logits are wanted."""
        return int(np.count_nonzero(self.wants_logits))


def _as_i32(ids: npt.NDArray[np.generic]) -> npt.NDArray[np.int32]:
    if ids.min() < -(2**31) or ids.max() >= 2**31:
        raise InputError(f"token ids must fit 32 bits, got {ids.min()} to {ids.max()}")
    return ids.astype(np.int32)
