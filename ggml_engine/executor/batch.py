"""What one forward is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
    sequences: npt.NDArray[np.int64]  # [n_tokens]
    wants_logits: npt.NDArray[np.bool_]  # [n_tokens]
    positions: npt.NDArray[np.int32] | None = None  # [n_tokens]

    def __post_init__(self) -> None:
        """Take any integers that fit; raises InputError for other arrays, and for arrays that do not go together."""
        tokens = _integers("tokens", self.tokens)
        if tokens.min() < -(2**31) or tokens.max() >= 2**31:
            raise InputError(f"token ids must fit 32 bits, got {tokens.min()} to {tokens.max()}")
        sequences = _integers("sequences", self.sequences)
        wants_logits = np.asarray(self.wants_logits)
        if wants_logits.dtype != np.bool_ or wants_logits.ndim != 1:
            raise InputError(f"wants_logits must be a list of truth values, got {_shown(wants_logits)}")
        if not tokens.size == sequences.size == wants_logits.size:
            raise InputError(
                f"a batch of {tokens.size} tokens, {sequences.size} sequences and {wants_logits.size} marks"
            )
        object.__setattr__(self, "tokens", np.ascontiguousarray(tokens, np.int32))
        object.__setattr__(self, "sequences", np.ascontiguousarray(sequences, np.int64))
        object.__setattr__(self, "wants_logits", wants_logits)

    @classmethod
    def of_sequence(cls, sequence: int, tokens: npt.ArrayLike, *, logits: str = "last") -> Batch:
        """Tokens of one sequence; logits of the "last", of "all" or of "none"."""
        if logits not in ("last", "all", "none"):
            raise InputError(f"logits are wanted of 'last', 'all' or 'none', asked for {logits!r}")
        ids = _integers("tokens", tokens)
        wanted = np.full(ids.size, logits == "all")
        wanted[-1] = logits != "none"
        return cls(ids, _integers("sequences", [sequence] * ids.size), wanted)  # type: ignore[arg-type]

    @property
    def n_tokens(self) -> int:
        """Number of tokens."""
        return int(self.tokens.size)

    @property
    def n_outputs(self) -> int:
        """Number of tokens whose logits are wanted."""
        return int(np.count_nonzero(self.wants_logits))


def _integers(what: str, values: npt.ArrayLike) -> npt.NDArray[np.integer[Any]]:
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError):
        raise InputError(f"{what} must be a list of integers") from None
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise InputError(f"{what} must be a non-empty list of integers that fit 64 bits, got {_shown(array)}")
    return array


def _shown(array: npt.NDArray[Any]) -> str:
    return f"{array.dtype} {list(array.shape)}"
