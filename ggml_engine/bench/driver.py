"""`Driver`: one engine as the cases see it, ours or llama.cpp's, with the same calls in the same order.

Sequences are numbered from 0 here, whatever the engine calls them. A step ends synchronised: its logits are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

N_BATCH = 512  # tokens of a step at most, n_batch and n_ubatch of llama.cpp

TokenIds = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Room:
    """What an engine has to hold: `n_sequences` of `n_own` positions each, after `n_shared` that all may share."""

    n_sequences: int
    n_own: int
    n_shared: int = 0

    @property
    def n_positions(self) -> int:
        """The length of the longest sequence."""
        return self.n_shared + self.n_own

    @property
    def n_cells(self) -> int:
        """Cells in one buffer for all, where a shared one counts once."""
        return self.n_shared + self.n_sequences * self.n_own


class Driver(Protocol):
    """An engine with room for some sequences."""

    @property
    def name(self) -> str:
        """What tables call it."""

    @property
    def n_vocab(self) -> int:
        """Token ids are below."""

    def clear(self) -> None:
        """Drop what all sequences hold."""

    def prefill(self, sequence: int, tokens: TokenIds) -> None:
        """Append i32 [n_tokens] in steps of at most `N_BATCH`; the logits of each step's last token are computed."""

    def decode(self, tokens: TokenIds) -> None:
        """One step: append one token to each of the first sequences, i32 [n_sequences], all with logits."""

    def share(self, n_sequences: int) -> None:
        """Let sequences 1 to `n_sequences` - 1 be what sequence 0 is, as cheaply as the engine can."""

    def copy(self, n_sequences: int) -> None:
        """The same with cells of their own, as if each had been prefilled; those that hold something stay."""

    def rewind(self, lengths: Sequence[int]) -> None:
        """Keep that many tokens of each of the first sequences."""

    def close(self) -> None:
        """Free it; idempotent. The model stays."""
