"""Images of sequences in a cell cache: a row is the K and V of one cell.

Owns the order of rows (ascending by cell, so that a part is read in few stretches), and what must hold between parts.
Does not know: tensors, which are behind `RowStorage`, and files.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import CacheError, InputError, PositionError, UnknownSequenceError
from ggml_engine.executor.image import ImageReader, ImageWriter, KvImage, Rows
from ggml_engine.pool.adoption import Adoption, adopt
from ggml_engine.pool.cells import CellCache


class RowStorage(Protocol):
    """Where the rows of cells lie."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""

    def make_room(self, extent: int) -> None:
        """Let it hold the first `extent` cells. Raises NativeError with nothing changed."""

    def read(self, cells: npt.NDArray[np.int64]) -> Rows:
        """The rows of these cells, u8 [cells, row_bytes]."""

    def write(self, cells: npt.NDArray[np.int64], rows: Rows) -> None:
        """Replace the rows of these cells. Raises InputError, with nothing written, for what no K/V can be."""


class CellImageReader(ImageReader):
    """Reads positions [0, upto) of sequences, given as pairs of both.

    The caller has the turn. Raises UnknownSequenceError, and PositionError for positions that are not committed.
    """

    def __init__(
        self,
        cache: CellCache,
        storage: RowStorage,
        turn: AbstractContextManager[object],
        parts: Sequence[tuple[int, int]],
    ) -> None:
        for sequence, upto in parts:
            if not 0 <= upto <= cache.length(sequence):
                raise PositionError(
                    f"{upto} positions of sequence {sequence} of {cache.length(sequence)} are asked for"
                )
        self._cache = cache
        self._storage = storage
        self._turn = turn
        self._owned = [(sequence, cache.cells_of(sequence)[:upto]) for sequence, upto in parts]
        is_owned = np.zeros(cache.capacity, np.bool_)
        for _, cells in self._owned:
            is_owned[cells] = True
        self._rows = np.flatnonzero(is_owned)
        row_of = np.cumsum(is_owned) - 1
        tables = tuple(row_of[cells] for _, cells in self._owned)
        lengths = tuple(upto for _, upto in parts)
        self._image = KvImage(storage.row_bytes, self._rows.size, lengths, tables)

    @property
    def image(self) -> KvImage:
        """See ImageReader."""
        return self._image

    def read(self, start: int, n: int) -> Rows:
        """See ImageReader."""
        with self._turn:
            if any(not np.array_equal(self._cache.cells_of(s)[: cells.size], cells) for s, cells in self._owned):
                raise CacheError("the cells of a sequence are others than when its image was begun")
            return self._storage.read(self._rows[start : start + n])


class CellImageWriter(ImageWriter):
    """Takes cells for an image, and writes its rows into them.

    The caller has the turn. Raises InputError for an image that no sequences of a cell cache can have, PoolFullError,
    other kinds of CacheError of `CellCache.open`, and NativeError; then nothing has changed.
    """

    def __init__(
        self, cache: CellCache, storage: RowStorage, turn: AbstractContextManager[object], image: KvImage
    ) -> None:
        if image.row_bytes != storage.row_bytes:
            raise InputError(f"rows of {image.row_bytes} bytes are given, here a cell has {storage.row_bytes}")
        if any(table.size != n for table, n in zip(image.tables, image.lengths, strict=True)):
            raise InputError("an image of cells has one row for every position")
        self._cache = cache
        self._storage = storage
        self._turn = turn
        self._n_written = 0
        self._adoption: Adoption | None = adopt(cache, image.tables, image.n_rows)
        try:
            storage.make_room(self._adoption.extent)
        except BaseException:
            self._drop()
            raise

    def write(self, rows: Rows) -> None:
        """See ImageWriter."""
        with self._turn:
            cells = self._adopted().cells[self._n_written : self._n_written + len(rows)]
            if rows.shape != (cells.size, self._storage.row_bytes):
                raise InputError(f"{rows.shape[0]} rows are given, {cells.size} are missing")
            self._storage.write(cells, rows)
            self._n_written += cells.size

    def commit(self) -> tuple[int, ...]:
        """See ImageWriter."""
        with self._turn:
            adoption = self._adopted()
            if self._n_written < adoption.cells.size:
                raise InputError(f"an image has {adoption.cells.size} rows, {self._n_written} were given")
            adoption.commit()
            self._adoption = None
            return adoption.sequences

    def _adopted(self) -> Adoption:
        if self._adoption is None:
            raise InputError("the image was committed, or given up")
        return self._adoption

    def close(self) -> None:
        """See ImageWriter."""
        if self._adoption is not None:
            with self._turn:
                self._drop()

    def _drop(self) -> None:
        adoption, self._adoption = self._adoption, None
        for sequence in () if adoption is None else adoption.sequences:
            try:
                self._cache.close(sequence)
            except UnknownSequenceError:  # closed by hand
                continue
