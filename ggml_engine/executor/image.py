"""K/V images: what sequences hold as rows of bytes, to be kept outside of the executor and to come back.

Owns the words between the control plane, which stores an image and knows no cells, and an executor, which knows no
files. Rows are read and written in parts, so that forwards may run in between.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.uint8]  # [rows, row_bytes]
Table = npt.NDArray[np.int64]  # of one sequence: which rows it is made of, in order


@dataclass(frozen=True, slots=True, eq=False)
class KvImage:
    """The shape of an image: `n_rows` rows of `row_bytes` bytes, and which of them each sequence is made of.

    `lengths` are the positions of each sequence. A row that several sequences share is there once. Where an executor
    knows cells, a table has one row for every position; another one may cut its state into rows as it likes.
    """

    row_bytes: int
    n_rows: int
    lengths: tuple[int, ...]
    tables: tuple[Table, ...]

    def choose(self, indices: Sequence[int]) -> tuple[KvImage, Table]:
        """The image of some of its sequences, and which rows of this one it has, ascending."""
        tables = [self.tables[i] for i in indices]
        rows = np.unique(np.concatenate([np.empty(0, np.int64), *tables]))
        lengths = tuple(self.lengths[i] for i in indices)
        chosen = tuple(np.searchsorted(rows, table) for table in tables)
        return KvImage(self.row_bytes, rows.size, lengths, chosen), rows

    @property
    def n_cells(self) -> int:
        """How many cells it takes: what is shared counts once where it can be told."""
        has_row_each = all(table.size == n for table, n in zip(self.tables, self.lengths, strict=True))
        return self.n_rows if has_row_each else sum(self.lengths)


class ImageReader(ABC):
    """Reads an image of sequences. Its rows stay readable while these are open, are not rewound, and are in no step.

    A step may move the cells of its own sequences; a clone that is kept for the reading is in none.
    """

    @property
    @abstractmethod
    def image(self) -> KvImage:
        """What there is to read."""

    @abstractmethod
    def read(self, start: int, n: int) -> Rows:
        """A copy of rows [start, start + n). Raises CacheError when the sequences do not hold them any more."""


class ImageWriter(ABC):
    """Brings an image in. Its cells are taken from the start; the sequences can be used once it is committed."""

    @abstractmethod
    def write(self, rows: Rows) -> None:
        """The next rows, in order. Raises InputError for rows that cannot be, with none of them written."""

    @abstractmethod
    def commit(self) -> tuple[int, ...]:
        """The sequences, in the order of the image. Raises InputError when rows are missing."""

    @abstractmethod
    def close(self) -> None:
        """Give everything up that was not committed; idempotent."""
