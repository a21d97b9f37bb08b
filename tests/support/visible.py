"""What a step sees, made from cells alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from ggml_engine.pool.read_plan import Stretch, VisibleCells, find_stretches


def visible_cells(tokens: Any, n_tokens: int, first_query: int, first_seen: int, cells: npt.ArrayLike) -> VisibleCells:
    """`cells` from position `first_seen` on, with their stretches."""
    table = np.array(cells, np.int32)
    los, his = find_stretches(table)
    positions = first_seen + np.cumsum(his - los) - (his - los)
    stretches = [Stretch(int(lo), int(hi - lo), int(p)) for lo, hi, p in zip(los, his, positions, strict=True)]
    return VisibleCells(tokens, n_tokens, first_query, first_seen, table, stretches)
