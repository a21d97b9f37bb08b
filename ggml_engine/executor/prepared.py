"""Opaque input: positions that are not tokens, prepared outside and computed by an executor that knows their kind.

The control plane only counts positions and cuts slices; what is inside is between the maker and the executor.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import InputError

OPAQUE = -1  # what stands in a history of tokens for a position that is not a token; equal to no token


class Kind:
    """A process-local tag of a kind of prepared input: compared by identity, named for messages."""

    __slots__ = ("name",)

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<kind {self.name}>"


class PreparedInput(ABC):
    """A fixed number of positions of one kind. The same kind does not mean that it was made for the same model."""

    kind: ClassVar[Kind]

    @abstractmethod
    def size(self) -> int:
        """How many positions it takes; the same at every call."""

    @abstractmethod
    def content_hash(self) -> bytes:
        """A hash of everything that K/V made from it depends on."""


@dataclass(frozen=True, slots=True)
class PreparedSlice:
    """Positions [start, stop) of a prepared input, in the rows of a batch from `row` on."""

    source: PreparedInput
    start: int
    stop: int
    row: int


class EmbeddingInput(PreparedInput):
    """Rows that stand where a model has its token embeddings, f32 [positions, n_embd].

    `fingerprint` names the model that they were made for ("" where any of that width will do). The rows are copied.
    Raises InputError for another shape, no rows, or numbers that are not finite.
    """

    kind = Kind("embeddings")

    def __init__(self, rows: npt.ArrayLike, fingerprint: str = "") -> None:
        taken = np.array(rows, np.float32, order="C")
        if taken.ndim != 2 or not taken.size:
            raise InputError(f"embeddings are [positions, n_embd], got an array of shape {taken.shape}")
        if not np.isfinite(taken).all():
            raise InputError("embeddings must be finite numbers")
        taken.setflags(write=False)
        self.rows: npt.NDArray[np.float32] = taken
        self.fingerprint = fingerprint

    def size(self) -> int:
        """How many rows there are."""
        return int(self.rows.shape[0])

    def content_hash(self) -> bytes:
        """SHA-256 of shape and rows."""
        import hashlib  # noqa: PLC0415  # it loads OpenSSL, and a start needs none

        return hashlib.sha256(repr(self.rows.shape).encode() + self.rows.tobytes()).digest()
