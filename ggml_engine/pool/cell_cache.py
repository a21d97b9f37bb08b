"""Caches over a `GgmlKvPool`: the bookkeeping of cells joined with their storage.

`GgmlCellCache` holds many sequences, `GgmlSequenceCache` one. Both say which window each layer reads through; a step's
extent is grown to by the executor, which holds the graphs over the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggml_engine.ggml.backends import Backend
from ggml_engine.ggml.library import Libraries
from ggml_engine.models.config import KvLayer
from ggml_engine.pool.cells import CellCache
from ggml_engine.pool.compaction import Move
from ggml_engine.pool.kv_pool import GgmlKvPool, check_memory
from ggml_engine.pool.kv_types import KvFormat
from ggml_engine.pool.read_plan import ReadKind
from ggml_engine.pool.sequence_cache import SequenceCache
from ggml_engine.pool.window import Window


def _window(layer: KvLayer) -> Window:
    return Window(layer.window, layer.is_chunked)


def _windows(layers: Sequence[KvLayer]) -> list[Window]:
    return sorted({_window(layer) for layer in layers})


def _window_of_layer(layers: Sequence[KvLayer]) -> tuple[int, ...]:
    windows = _windows(layers)
    return tuple(windows.index(_window(layer)) for layer in layers)


class GgmlCellCache(CellCache):
    """Many sequences over one pool of K and V.

    `window_of_layer[il]` is the index into a placement's `reads` for layer il.
    """

    def __init__(
        self,
        libraries: Libraries,
        layers: Sequence[KvLayer],
        backends: Sequence[Backend],
        capacity: int,
        *,
        kv_format: KvFormat | None = None,
        run: int = 64,
        read_block: int = 256,
        reads: ReadKind = ReadKind.IN_BLOCKS,
    ) -> None:
        check_memory(layers, backends, capacity, kv_format or KvFormat())  # before the table of cells, as long as that
        super().__init__(capacity, _windows(layers), run=run, read_block=read_block, reads=reads)
        self.window_of_layer = _window_of_layer(layers)
        self.pool = GgmlKvPool(libraries, layers, backends, self.capacity, kv_format=kv_format)

    def move(self, move: Move, backends: Sequence[Backend]) -> int:
        """Copy the K and V of a move's cells, then let its sequence own the copies; returns the bytes copied.

        The pool holds the move's extent already. Raises StepError for a stale move, and NativeError; then the sequence
        owns what it did, unchanged.
        """
        self.check_move(move)
        n_bytes = self.pool.copy_rows(move.pieces(), backends)
        self.apply_move(move)
        return n_bytes

    def free(self) -> None:
        """Free the pool; idempotent."""
        self.pool.free()


class GgmlSequenceCache(SequenceCache):
    """One contiguous sequence over one pool of K and V."""

    def __init__(
        self,
        libraries: Libraries,
        layers: Sequence[KvLayer],
        backends: Sequence[Backend],
        capacity: int,
        *,
        kv_format: KvFormat | None = None,
        read_block: int = 256,
    ) -> None:
        check_memory(layers, backends, capacity, kv_format or KvFormat())  # before the table of cells, as long as that
        super().__init__(capacity, _windows(layers), read_block=read_block)
        self.window_of_layer = _window_of_layer(layers)
        self.pool = GgmlKvPool(libraries, layers, backends, self.capacity, kv_format=kv_format)

    def free(self) -> None:
        """Free the pool; idempotent."""
        self.pool.free()
