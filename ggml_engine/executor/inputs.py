"""The tensors that a graph takes, and how they are filled for a step.

One `GraphInputs` belongs to one graph. It is also the graph's way to the pool (`KvStore`): which rows it writes is an
input, which rows it reads is part of its shape (`GraphKey`). ggml computes in place over inputs, so every one is filled
before every run.

A step may be padded to a multiple of `row_tile` rows: kernels round by the number of rows, and with whole tiles each
row's result is its own. A padding row repeats the last token, cell and all, and so writes the same bytes once more; a
last row that is a prepared one is repeated as such.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import InputError
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.best_rows import BestKey
from ggml_engine.executor.input_memory import InputMemory
from ggml_engine.executor.planned_rows import PlannedReading, PlannedRows
from ggml_engine.executor.prepared import EmbeddingInput
from ggml_engine.ggml.ops import GraphBuilder, Tensor
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.models.adapted import AdaptedProducts
from ggml_engine.models.adapter import Adapter
from ggml_engine.models.adapter_set import NO_ADAPTERS, AdapterSet
from ggml_engine.models.attention import AttentionForm, KvCells, KvRows
from ggml_engine.models.blocks import OfPositions, PreparedRows
from ggml_engine.pool.cell_plan import CellPlan
from ggml_engine.pool.kv_types import hadamard
from ggml_engine.pool.next_token import NextToken
from ggml_engine.pool.read_plan import Comb, group_spans
from ggml_engine.pool.registry import GgmlCache
from ggml_engine.pool.step import Placement

Spans = tuple[tuple[int, int], ...]

# Queries are copied for every tooth of a comb: that saves nodes, and must cost less than they do.
_MAX_COMB_TOKENS = 16

# Of so few numbers Python finds the least sooner than numpy does.
_FEW = 64


class GraphKey(NamedTuple):
    """All that a graph's shape depends on. Rows and outputs are padded ones."""

    n_tokens: int
    n_outputs: int
    selects_outputs: bool  # whether the outputs are not just all tokens in their order
    reads: tuple[Spans, ...]  # per window; empty where they are told by a plan
    plans: tuple[int, ...] = ()  # per window the capacity of its plan
    n_prepared: int = 0  # rows that are not looked up, padding included
    gives_hidden: bool = False  # in place of logits
    adapters: tuple[Adapter, ...] = ()  # whatever their scales
    best: BestKey | None = None  # what is found in the rows of logits
    form: AttentionForm = AttentionForm.MATMUL

    @classmethod
    def of(
        cls,
        batch: Batch,
        placement: Placement,
        row_tile: int = 1,
        adapters: tuple[Adapter, ...] = (),
        *,
        gives_hidden: bool = False,
        plans: Sequence[CellPlan] = (),
        form: AttentionForm = AttentionForm.MATMUL,
    ) -> GraphKey:
        """The key of a step; one without outputs has the same, whatever it would give."""
        reads = () if plans else tuple(tuple(read.spans) for read in placement.reads)
        capacities = tuple([plan.capacity for plan in plans])
        n_outputs = batch.n_outputs
        n_tokens = _padded(batch.n_tokens, row_tile)
        n_prepared = 0
        if batch.prepared:
            n_prepared = _padded(_prepared_rows(batch, n_tokens).size, row_tile)
        selects = 0 < n_outputs < batch.n_tokens
        gives_hidden = gives_hidden and n_outputs > 0
        n_outputs = _padded(n_outputs, row_tile)
        return cls(n_tokens, n_outputs, selects, reads, capacities, n_prepared, gives_hidden, adapters, form=form)


def _padded(n: int, tile: int) -> int:
    return -(-n // tile) * tile


def _repeat_last(values: npt.NDArray[Any], n: int) -> npt.NDArray[Any]:
    """`values` as an array of n, its last one repeated."""
    if values.size == n:
        return values
    return np.concatenate((values, np.repeat(values[-1:], n - values.size)))


def _prepared_rows(batch: Batch, n: int) -> npt.NDArray[np.int64]:
    """Rows of a step of n rows that are prepared ones: slice by slice, then what repeats such a last row."""
    rows = [np.arange(piece.row, piece.row + piece.stop - piece.start) for piece in batch.prepared]
    if any(batch.n_tokens - 1 in piece for piece in rows):
        rows.append(np.arange(batch.n_tokens, n))
    return np.concatenate(rows, dtype=np.int64)


class GraphInputs:
    """The inputs of a graph of `key`'s shape, as tensors of `b`. `join` as in `KvRows`."""

    def __init__(
        self,
        b: GraphBuilder,
        key: GraphKey,
        cache: GgmlCache,
        n_embd: int,
        *,
        join: bool = False,
        reading: PlannedReading | None = None,
    ) -> None:
        n = key.n_tokens
        self._b = b
        self._key = key
        self._cache = cache
        self._join = join
        self.tokens = b.input("inp_tokens", TensorType.I32, n)
        self.prepared: PreparedRows | None = None
        if key.n_prepared:
            rows = b.input("inp_prepared", TensorType.F32, n_embd, key.n_prepared)
            self.prepared = PreparedRows(rows, b.input("inp_prepared_rows", TensorType.I64, key.n_prepared))
        self.positions = b.input("inp_positions", TensorType.I32, n)
        self._of_positions: dict[str, tuple[Tensor, OfPositions]] = {}
        self._cells = b.input("inp_cells", TensorType.I64, n)
        self._v_rows: dict[int, Tensor] = {}
        self._v_offsets: dict[int, npt.NDArray[np.int64]] = {}
        if cache.pool.format.v_layout == "columns":
            for width in sorted({layer.n_embd_v for layer in cache.pool.layers}):
                self._v_rows[width] = b.input(f"inp_v_rows_{width}", TensorType.I64, n * width)
                self._v_offsets[width] = cache.pool.v_row_offsets(width)
        self._memories: dict[Tensor, InputMemory] = {}
        self._masks = []
        self._repeated_masks: list[dict[int, Tensor]] = [{} for _ in key.reads]
        single = join or n > _MAX_COMB_TOKENS
        self._combs = [[Comb(*span) for span in spans] if single else group_spans(spans) for spans in key.reads]
        for index, spans in enumerate(key.reads):
            n_rows = sum(length for _, length in spans)
            self._masks.append(b.input(f"inp_mask_{index}", TensorType.F16, n_rows, n))
        self._planned = None if reading is None else PlannedRows(b, key.plans, n, cache, reading)
        self.outputs = b.input("inp_outputs", TensorType.I32, key.n_outputs) if key.selects_outputs else None
        self._rotations: dict[int, Tensor] = {}
        self.adapted = AdaptedProducts(b, key.adapters) if key.adapters else None

    def of_positions(self, name: str, function: OfPositions) -> Tensor:
        """An input f32 [1, 1, tokens]: what `function` makes of the tokens' positions i32 [tokens]. One for a name."""
        if name not in self._of_positions:
            self._of_positions[name] = (self._b.input(name, TensorType.F32, 1, 1, self._key.n_tokens), function)
        return self._of_positions[name][0]

    # ---- KvStore

    def rotate_k(self, layer: int, x: Tensor) -> Tensor:
        """A query or key as the pool wants it."""
        return self._rotate(x, self._cache.pool.k_rotation(layer))

    def rotate_v(self, layer: int, x: Tensor) -> Tensor:
        """A value as the pool wants it, and back."""
        return self._rotate(x, self._cache.pool.v_rotation(layer))

    def _rotate(self, x: Tensor, n: int | None) -> Tensor:
        if n is None:
            return x
        if n not in self._rotations:
            self._rotations[n] = self._b.input(f"inp_rotation_{n}", TensorType.F32, n, n)
        return self._b.hadamard(x, self._rotations[n])

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store k and v in the step's cells."""
        width = self._cache.pool.layers[layer].n_embd_v
        self._cache.pool.write(self._b, layer, k, v, self._cells, self._v_rows.get(width, self._cells))

    def read(self, layer: int) -> KvRows | KvCells:
        """What the step's queries see in this layer."""
        if self._planned is not None:
            return self._planned.read(layer)
        window = self._cache.window_of_layer[layer]
        k, v = self._cache.pool.read(self._b, layer, self._combs[window])
        columns = self._cache.pool.format.v_layout == "columns"
        return KvRows(k, v, columns, self._masks[window], self._join, self._repeated_masks[window])

    # ---- filling

    def fill(
        self,
        batch: Batch,
        placement: Placement | NextToken,
        adapters: AdapterSet = NO_ADAPTERS,
        plans: Sequence[CellPlan] = (),
    ) -> None:
        """Set every input for a step of this shape, computed with `adapters`: those of the key, at any scales.

        The token ids were checked (`check_tokens`): ggml dies of one without an embedding.
        """
        n = self._key.n_tokens
        self._set(self.tokens, _repeat_last(batch.tokens, n))
        if self.prepared is not None:
            self._fill_prepared(self.prepared, batch)
        positions = _repeat_last(placement.positions, n)
        self._set(self.positions, positions)
        for tensor, function in self._of_positions.values():
            self._set(tensor, function(positions))
        cells = _repeat_last(placement.cells, n)
        self._set(self._cells, cells)
        for width, tensor in self._v_rows.items():
            v_rows = self._memory(tensor)
            np.add(cells[:, None], self._v_offsets[width], out=v_rows.array.reshape(n, width))
            v_rows.send()
        if self._planned is not None:
            self._planned.fill(plans, self._memory)
        for tensor, read in zip(self._masks, placement.reads, strict=False):  # none where there are plans
            mask = self._memory(tensor)
            if mask.is_read:  # some layer of this graph reads through the window
                rows = mask.array.reshape(n, read.n_rows)
                read.fill_mask(rows[: batch.n_tokens])
                if n > batch.n_tokens:
                    rows[batch.n_tokens :] = rows[batch.n_tokens - 1]
                mask.send()
        if self.outputs is not None:
            wanted = np.flatnonzero(batch.wants_logits).astype(np.int32)
            self._set(self.outputs, _repeat_last(wanted, self._key.n_outputs))
        for size, tensor in self._rotations.items():
            self._set(tensor, hadamard(size))
        for tensor, row in () if self.adapted is None else self.adapted.values(adapters):
            self._set(tensor, row)

    def _fill_prepared(self, prepared: PreparedRows, batch: Batch) -> None:
        ids = _prepared_rows(batch, self._key.n_tokens)
        rows = np.empty((self._key.n_tokens, prepared.rows.ne[0]), np.float32)
        for piece in batch.prepared:
            if not isinstance(piece.source, EmbeddingInput):
                raise InputError(f"{piece.source.kind} cannot stand in rows of a batch here")
            rows[piece.row : piece.row + piece.stop - piece.start] = piece.source.rows[piece.start : piece.stop]
        rows[batch.n_tokens :] = rows[batch.n_tokens - 1]
        ids = _repeat_last(ids, self._key.n_prepared)
        self._set(prepared.ids, ids)
        self._set(prepared.rows, rows[ids])

    def _set(self, tensor: Tensor, values: npt.NDArray[Any]) -> None:
        self._memory(tensor).set(values)

    def _memory(self, tensor: Tensor) -> InputMemory:
        memory = self._memories.get(tensor)
        if memory is None:  # at the first step: the graph has its memory by then
            memory = self._memories[tensor] = InputMemory(self._b.libraries, tensor)
        return memory


def check_tokens(tokens: npt.NDArray[np.int32], n_vocab: int) -> None:
    """Raise InputError for an id that has no embedding: ggml dies of it."""
    if tokens.size <= _FEW:
        ids = tokens.tolist()
        low, high = min(ids), max(ids)
    else:
        low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= n_vocab:
        raise InputError(f"token ids must be 0 to {n_vocab - 1}, got {low if low < 0 else high}")
