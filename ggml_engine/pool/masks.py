"""Attention masks of a step: which of the rows that are read each query may see.

Owns: the rule of visibility. A query at position p sees its own sequence's cells at positions q <= p that its window
does not hide (`pool/window.py`).
Does not know: cells, owners, spans. It is told, per sequence, the mask columns of its visible cells in position order.
Invariants: every element is written, 0 where visible and -inf elsewhere; every query sees at least itself (a row that
is masked everywhere is NaN in ggml's softmax).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import CacheError
from ggml_engine.pool.window import Window

MaskArray: TypeAlias = npt.NDArray[np.float16] | npt.NDArray[np.float32]

# Rows of the mask made at a time: bounds the temporaries of a long prefill, and keeps them in the processor's cache.
_ROWS_PER_BLOCK = 64

# The position of a column that holds no cell of the sequence: later than every query.
_NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True, slots=True, eq=False)
class QueryGroup:
    """The tokens of a step that belong to one sequence; their positions are consecutive.

    `tokens` says where they stand in the batch, `first_query` is the position of the first, `first_seen` the earliest
    position that any of them sees, and `columns` holds the mask column of every position from there to the last query.
    """

    tokens: slice | npt.NDArray[np.int64]
    n_tokens: int
    first_query: int
    first_seen: int
    columns: npt.NDArray[np.int64]  # [first_query + n_tokens - first_seen]
    is_one_stretch: bool = False  # each column is one past the one before


def check_mask_array(out: MaskArray, n_tokens: int, n_rows: int) -> None:
    """Refuses an array that a mask of `n_tokens` queries over `n_rows` rows cannot be written to (CacheError)."""
    if not isinstance(out, np.ndarray):
        raise CacheError(f"a mask is written to a numpy array, not to a {type(out).__name__}")
    if out.dtype not in (np.dtype(np.float16), np.dtype(np.float32)):
        raise CacheError(f"a mask is float16 or float32, the array is {out.dtype}")
    if out.shape != (n_tokens, n_rows):
        raise CacheError(f"the mask has shape {(n_tokens, n_rows)}, the array has {out.shape}")
    if not (out.flags.c_contiguous and out.flags.writeable):
        raise CacheError("a mask is written to a C-contiguous, writeable array")


def fill_mask(out: MaskArray, groups: Sequence[QueryGroup], window: Window) -> None:
    """Writes the whole mask, [n_tokens, n_rows]: 0 where the query of a row sees the cell of a column, else -inf."""
    out.fill(-np.inf)
    for group in groups:
        if group.n_tokens == 1:
            # One query sees what its sequence reads, but for positions that only align the columns.
            n_hidden = max(0, window.first_seen(group.first_query) - group.first_seen)
            if group.is_one_stretch:
                out[group.tokens, group.columns[n_hidden] : group.columns[-1] + 1] = 0
            else:
                out[group.tokens, group.columns[n_hidden:]] = 0
        else:
            _fill_band(out, group, window)


def _fill_band(out: MaskArray, group: QueryGroup, window: Window) -> None:
    first = int(group.columns.min())
    last = int(group.columns.max()) + 1
    positions = np.full(last - first, _NEVER, np.int32)
    positions[group.columns - first] = np.arange(group.first_seen, group.first_query + group.n_tokens, dtype=np.int32)
    visible_value, hidden_value = out.dtype.type(0), out.dtype.type(-np.inf)
    tokens = np.arange(out.shape[0])[group.tokens]
    contiguous = isinstance(group.tokens, slice)
    for start in range(0, group.n_tokens, _ROWS_PER_BLOCK):
        stop = min(start + _ROWS_PER_BLOCK, group.n_tokens)
        queries = np.arange(group.first_query + start, group.first_query + stop, dtype=np.int32)[:, None]
        visible = positions <= queries
        if window.size:
            visible &= positions >= window.first_seen(queries)
        rows = slice(tokens[start], tokens[start] + stop - start) if contiguous else tokens[start:stop]
        out[rows, first:last] = np.where(visible, visible_value, hidden_value)
