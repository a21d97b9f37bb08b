"""`GgmlCellCache`: a `CellCache` over a `GgmlKvPool`.

Joins the bookkeeping of cells with their storage, and says which window each layer reads through.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggml_engine.ggml.backends import Backend
from ggml_engine.ggml.library import Libraries
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.models.config import KvLayer
from ggml_engine.pool.cells import CellCache
from ggml_engine.pool.kv_pool import GgmlKvPool, VLayout, check_memory


class GgmlCellCache(CellCache):
    """Many sequences over one pool of K and V. `pool` is the storage; a step's extent is grown to by the executor.

    `window_of_layer[il]` is the index into a placement's `reads` for layer il.
    """

    def __init__(
        self,
        libraries: Libraries,
        layers: Sequence[KvLayer],
        backends: Sequence[Backend],
        capacity: int,
        *,
        k_type: TensorType = TensorType.F16,
        v_type: TensorType = TensorType.F16,
        v_layout: VLayout = "rows",
        run: int = 64,
        read_block: int = 256,
    ) -> None:
        check_memory(layers, backends, capacity, k_type, v_type)  # before the table of cells, which is as long
        windows = sorted({layer.window for layer in layers})
        super().__init__(capacity, windows, run=run, read_block=read_block)
        self.window_of_layer = tuple(windows.index(layer.window) for layer in layers)
        self.pool = GgmlKvPool(
            libraries, layers, backends, self.capacity, k_type=k_type, v_type=v_type, v_layout=v_layout
        )

    def free(self) -> None:
        """Free the pool; idempotent."""
        self.pool.free()
