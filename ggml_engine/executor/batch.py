"""What one forward is asked to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import InputError
from ggml_engine.executor.prepared import PreparedSlice

# Of so few numbers Python finds the sum sooner than numpy does.
_FEW = 64


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Tokens of one or more sequences, in any order that keeps each sequence's own.

    `wants_logits` marks the tokens whose logits come back, in batch order. `positions` may be left out: then every
    sequence continues where it is. Tokens in the rows of `prepared` slices are ignored: positions of a prepared input
    stand there.
    """

    tokens: npt.NDArray[np.int32]  # [n_tokens]
    sequences: npt.NDArray[np.int64]  # [n_tokens]
    wants_logits: npt.NDArray[np.bool_]  # [n_tokens]
    positions: npt.NDArray[np.int32] | None = None  # [n_tokens]
    prepared: tuple[PreparedSlice, ...] = ()
    n_tokens: int = field(init=False)
    n_outputs: int = field(init=False)  # tokens whose logits are wanted

    def __post_init__(self) -> None:
        """Take any integers that fit; raises InputError for other arrays, and for arrays that do not go together."""
        tokens = _integers("tokens", self.tokens)
        sequences = _integers("sequences", self.sequences)
        wants_logits = np.asarray(self.wants_logits)
        if wants_logits.dtype != np.bool_ or wants_logits.ndim != 1:
            raise InputError(f"wants_logits must be a list of truth values, got {_shown(wants_logits)}")
        if not tokens.size == sequences.size == wants_logits.size:
            raise InputError(
                f"a batch of {tokens.size} tokens, {sequences.size} sequences and {wants_logits.size} marks"
            )
        prepared = tuple(self.prepared)
        if prepared:
            tokens = np.where(_prepared_rows(prepared, tokens.size), 0, tokens)  # ignored, and an id for a lookup
        self._set(_token_ids(tokens), np.ascontiguousarray(sequences, np.int64), wants_logits, self.positions, prepared)

    @classmethod
    def of_sequence(cls, sequence: int, tokens: npt.ArrayLike, *, logits: str = "last") -> Batch:
        """Tokens of one sequence; logits of the "last", of "all" or of "none"."""
        if logits not in ("last", "all", "none"):
            raise InputError(f"logits are wanted of 'last', 'all' or 'none', asked for {logits!r}")
        ids = _integers("tokens", tokens)
        wanted = np.full(ids.size, logits == "all")
        wanted[-1] = logits != "none"
        batch = object.__new__(cls)  # these arrays go together, and a decode step makes one per token
        batch._set(_token_ids(ids), np.full(ids.size, _sequence_id(sequence), np.int64), wanted, None, ())
        return batch

    @classmethod
    def of_next_token(cls, sequence: int, token: npt.NDArray[np.int32]) -> Batch:
        """One more token i32 [1] of a sequence, whose logits are wanted."""
        batch = object.__new__(cls)
        batch._set(token, np.array([sequence], np.int64), _WANTED, None, ())
        return batch

    def _set(
        self,
        tokens: npt.NDArray[np.int32],
        sequences: npt.NDArray[np.int64],
        wants_logits: npt.NDArray[np.bool_],
        positions: npt.NDArray[np.int32] | None,
        prepared: tuple[PreparedSlice, ...],
    ) -> None:
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "sequences", sequences)
        object.__setattr__(self, "wants_logits", wants_logits)
        object.__setattr__(self, "positions", positions)
        object.__setattr__(self, "prepared", prepared)
        object.__setattr__(self, "n_tokens", tokens.size)
        n_outputs = sum(wants_logits.tolist()) if tokens.size <= _FEW else int(np.count_nonzero(wants_logits))
        object.__setattr__(self, "n_outputs", n_outputs)

    @property
    def n_prepared(self) -> int:
        """Number of rows that are positions of prepared inputs."""
        return sum(piece.stop - piece.start for piece in self.prepared)


_WANTED = np.ones(1, np.bool_)
_WANTED.setflags(write=False)


def _prepared_rows(prepared: tuple[PreparedSlice, ...], n_tokens: int) -> npt.NDArray[np.bool_]:
    """Which rows of a batch the slices take, bool [n_tokens]. Raises InputError for slices that cannot be in it."""
    taken = np.zeros(n_tokens, np.bool_)
    for piece in prepared:
        bounds = (piece.start, piece.stop, piece.row)
        if any(isinstance(bound, bool) or not isinstance(bound, int | np.integer) for bound in bounds):
            raise InputError(f"a prepared slice has integer bounds, got {bounds}")
        start, stop, row = map(int, bounds)
        size = piece.source.size()
        if not 0 <= start < stop <= size:
            raise InputError(f"positions {start} to {stop} of a prepared input that has {size}")
        if row < 0 or row + stop - start > n_tokens:
            raise InputError(f"a prepared slice in rows {row} to {row + stop - start} of a batch of {n_tokens} tokens")
        if taken[row : row + stop - start].any():
            raise InputError(f"a prepared slice in rows {row} to {row + stop - start}, some of which another one takes")
        taken[row : row + stop - start] = True
    return taken


def _integers(what: str, values: npt.ArrayLike) -> npt.NDArray[np.integer[Any]]:
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError):
        raise InputError(f"{what} must be a list of integers") from None
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise InputError(f"{what} must be a non-empty list of integers that fit 64 bits, got {_shown(array)}")
    return array


def _token_ids(ids: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int32]:
    if ids.dtype != np.int32 and (ids.min() < -(2**31) or ids.max() >= 2**31):
        raise InputError(f"token ids must fit 32 bits, got {ids.min()} to {ids.max()}")
    return np.ascontiguousarray(ids, np.int32)


def _sequence_id(sequence: int) -> int:
    if isinstance(sequence, bool) or not isinstance(sequence, int | np.integer) or not -(2**63) <= sequence < 2**63:
        raise InputError(f"sequences must be integers that fit 64 bits, got {sequence!r}")
    return int(sequence)


def _shown(array: npt.NDArray[Any]) -> str:
    return f"{array.dtype} {list(array.shape)}"
