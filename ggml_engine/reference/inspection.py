"""A look inside: which rows a placement reads, who sees them, and the K and V of any cell.

For people who check the engine, or build on its cache. Reading takes no turn: look between steps, on the thread that
runs them. Everything given out is a copy.

    step = executor.cache.declare([sequence])
    placement = step.place(step.positions)
    for read in placement.reads:  # one for each window of executor.cache.windows
        rows_of(read), mask_of(read)
    executor.rewind(sequence, executor.length(sequence))  # gives the placed cells back
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import CacheError, PositionError
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.pool.cells import CellCache
from ggml_engine.pool.kv_types import hadamard
from ggml_engine.pool.read_plan import WindowRead

Values = npt.NDArray[np.float32]


class KeyValue(NamedTuple):
    """K and V of one cell in one layer. K was rotated by its position (rotary embedding) before it was stored."""

    k: Values  # f32 [n_head_kv, head size of K]
    v: Values  # f32 [n_head_kv, head size of V]


def rows_of(read: WindowRead) -> npt.NDArray[np.int64]:
    """The cells that the layers of one window read, i64 [n_rows]: column j of the mask is about cell `rows[j]`.

    In deterministic mode a cell may come more than once, and only one of its columns is visible to a query.
    """
    return read.rows()


def mask_of(read: WindowRead) -> npt.NDArray[np.float32]:
    """The mask over those rows, f32 [n_tokens, n_rows]: 0 where the query of a token sees the row, else -inf."""
    mask = np.empty((read.n_tokens, read.n_rows), np.float32)
    read.fill_mask(mask)
    return mask


def kv_of(executor: GgmlExecutor, layer: int, cell: int) -> KeyValue:
    """K and V of a cell as they are stored: rounded to their type, and rotated where a quantised type asks for it.

    Raises CacheError for a layer that the model does not have, and for a cell that is not stored.
    """
    pool = executor.cache.pool
    if not 0 <= layer < len(pool.layers):
        raise CacheError(f"there is no layer {layer}, the model has {len(pool.layers)}")
    k, v = pool.cell(layer, cell)
    n_head = pool.layers[layer].n_head
    return KeyValue(k.reshape(n_head, -1), v.reshape(n_head, -1))


def kv_of_position(executor: GgmlExecutor, sequence: int, layer: int, position: int) -> KeyValue:
    """K and V of a sequence's position as the model computed them, but for the rounding of their type.

    Where the pool stores heads rotated (the Hadamard rotation of quantised types), they are rotated back. Raises
    UnknownSequenceError, PositionError for a position that the sequence does not hold, and CacheError as `kv_of`.
    """
    if not isinstance(executor.cache, CellCache):
        raise CacheError(f"a {type(executor.cache).__name__} does not say which cells a sequence holds")
    cells = executor.cache.cells_of(sequence)
    if not 0 <= position < cells.size:
        raise PositionError(f"sequence {sequence} holds {cells.size} positions, asked for {position}")
    stored = kv_of(executor, layer, int(cells[position]))
    pool = executor.cache.pool
    return KeyValue(_rotated_back(stored.k, pool.k_rotation(layer)), _rotated_back(stored.v, pool.v_rotation(layer)))


def _rotated_back(heads: Values, n: int | None) -> Values:
    if n is None:
        return heads
    # the matrix is symmetric and orthonormal: it is its own inverse
    turned: Values = (heads.reshape(-1, n) @ hadamard(n)).reshape(heads.shape)
    return turned
