"""How far back queries see: everything, a window that slides, or the chunk that they are in.

Sliding windows: Beltagy et al. 2020, arXiv:2004.05150. Chunks: Llama 4; llama.cpp's src/llama-hparams.h has both rules.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

Positions = TypeVar("Positions", int, npt.NDArray[np.int32])


@dataclass(frozen=True, slots=True, order=True)
class Window:
    """A query sees itself and up to `size` - 1 positions before it; 0: all of them.

    With `is_chunked` positions are cut into chunks of `size`, and a query sees its own up to itself.
    """

    size: int = 0
    is_chunked: bool = False

    def first_seen(self, position: Positions) -> Positions:
        """The earliest position that a query at `position` sees; 0 or less where it sees all. Never falls."""
        if self.size == 0:
            return position * 0
        return position - position % self.size if self.is_chunked else position - self.size + 1

    def bounded(self, length: int) -> Window:
        """What is the same for positions below `length`."""
        return self if self.size <= length else replace(self, size=length)

    def __str__(self) -> str:
        return f"chunk {self.size}" if self.is_chunked else f"window {self.size}"
