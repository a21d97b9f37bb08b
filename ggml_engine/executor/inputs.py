"""The tensors that a graph takes, and how they are filled for a step.

One `GraphInputs` belongs to one graph. It is also the graph's way to the pool (`KvStore`): which rows it writes is an
input, which rows it reads is part of its shape (`GraphKey`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import InputError
from ggml_engine.executor.batch import Batch
from ggml_engine.ggml.backends import has_data, set_data
from ggml_engine.ggml.ops import GraphBuilder, Tensor
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.models.attention import KvRows
from ggml_engine.pool.cell_cache import GgmlCellCache
from ggml_engine.pool.cells import Placement

Spans = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class GraphKey:
    """All that a graph's shape depends on."""

    n_tokens: int
    n_outputs: int
    reads: tuple[Spans, ...]  # per window

    @classmethod
    def of(cls, batch: Batch, placement: Placement) -> GraphKey:
        """The key of a step."""
        return cls(batch.n_tokens, batch.n_outputs, tuple(tuple(read.spans) for read in placement.reads))


class GraphInputs:
    """The inputs of a graph of `key`'s shape, as tensors of `b`."""

    def __init__(self, b: GraphBuilder, key: GraphKey, cache: GgmlCellCache, n_vocab: int) -> None:
        n = key.n_tokens
        self._b = b
        self._key = key
        self._cache = cache
        self._n_vocab = n_vocab
        self.tokens = b.input("inp_tokens", TensorType.I32, n)
        self.positions = b.input("inp_positions", TensorType.I32, n)
        self._cells = b.input("inp_cells", TensorType.I64, n)
        self._v_rows: dict[int, Tensor] = {}
        if cache.pool.v_layout == "columns":
            for width in sorted({layer.n_embd_v for layer in cache.pool.layers}):
                self._v_rows[width] = b.input(f"inp_v_rows_{width}", TensorType.I64, n * width)
        self._masks = []
        self._mask_data: list[npt.NDArray[np.float16]] = []
        for index, spans in enumerate(key.reads):
            n_rows = sum(length for _, length in spans)
            self._masks.append(b.input(f"inp_mask_{index}", TensorType.F16, n_rows, n))
            self._mask_data.append(np.empty((n, n_rows), np.float16))
        self.outputs: Tensor | None = None
        if 0 < key.n_outputs < n:
            self.outputs = b.input("inp_outputs", TensorType.I32, key.n_outputs)

    # ---- KvStore

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store k and v in the step's cells."""
        width = self._cache.pool.layers[layer].n_embd_v
        self._cache.pool.write(self._b, layer, k, v, self._cells, self._v_rows.get(width, self._cells))

    def read(self, layer: int, n_head_kv: int) -> KvRows:
        """What the step's queries see in this layer."""
        window = self._cache.window_of_layer[layer]
        k, v = self._cache.pool.read(self._b, layer, n_head_kv, self._key.reads[window])
        return KvRows(k, v, self._cache.pool.v_layout == "columns", self._masks[window])

    # ---- filling

    def fill(self, batch: Batch, placement: Placement) -> None:
        """Set every input for a step of this shape. Raises InputError for a token id outside of the vocabulary."""
        check_tokens(batch.tokens, self._n_vocab)
        libraries = self._b.libraries
        set_data(libraries, self.tokens, batch.tokens)
        set_data(libraries, self.positions, placement.positions)
        set_data(libraries, self._cells, placement.cells)
        for width, tensor in self._v_rows.items():
            set_data(libraries, tensor, self._cache.pool.v_row_ids(placement.cells, width))
        for tensor, data, read in zip(self._masks, self._mask_data, placement.reads, strict=True):
            if not has_data(tensor):  # no layer of this graph reads through the window
                continue
            read.fill_mask(data)
            set_data(libraries, tensor, data)
        if self.outputs is not None:
            set_data(libraries, self.outputs, np.flatnonzero(batch.wants_logits).astype(np.int32))


def check_tokens(tokens: npt.NDArray[np.int32], n_vocab: int) -> None:
    """Raise InputError for an id that has no embedding: ggml dies of it."""
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= n_vocab:
        raise InputError(f"token ids must be 0 to {n_vocab - 1}, got {low if low < 0 else high}")
