"""`GgmlKvPool`: the K and V of every layer, off the graph; row r is cell r.

Owns the tensors and their growth: storage starts with one row and doubles to a step's extent, bounded by a capacity in
cells. Knows nothing of sequences, owners or masks: that is the cell cache's. K is row-major; V is row-major ("rows":
what flash attention and gathers read) or transposed ("columns": what the matmul form reads), fixed at construction.
Rows that no cell uses are zero, so that a masked row is finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import CacheError, OptionError
from ggml_engine.ggml.backends import Backend, Buffer, TensorContext, allocate_tensors, get_data, set_data
from ggml_engine.ggml.library import Libraries
from ggml_engine.ggml.ops import GraphBuilder, Tensor
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.models.config import KvLayer

VLayout = Literal["rows", "columns"]
Spans = Sequence[tuple[int, int]]

KV_TYPES = {"f32": TensorType.F32, "f16": TensorType.F16}
_NUMPY_TYPES: dict[TensorType, np.dtype[Any]] = {
    TensorType.F32: np.dtype(np.float32),
    TensorType.F16: np.dtype(np.float16),
}


def kv_type(name: str) -> TensorType:
    """The K/V type of that name. Raises OptionError listing the known ones."""
    if name not in KV_TYPES:
        raise OptionError(f"a K/V type is one of {', '.join(KV_TYPES)}, asked for {name!r}")
    return KV_TYPES[name]


@dataclass(frozen=True, slots=True)
class _LayerStorage:
    k: Tensor  # [n_embd_k, rows]
    v: Tensor  # [n_embd_v, rows], or [rows, n_embd_v] in columns
    context: TensorContext
    buffer: Buffer

    def free(self) -> None:
        self.buffer.free()
        self.context.free()


def check_memory(
    layers: Sequence[KvLayer], backends: Sequence[Backend], capacity: int, k_type: TensorType, v_type: TensorType
) -> int:
    """Bytes of a cell. Raises OptionError when `capacity` of them exceed the memory of the layers' devices."""
    bytes_per_cell = sum(k_type.row_bytes(layer.n_embd_k) + v_type.row_bytes(layer.n_embd_v) for layer in layers)
    total = sum({backend.device.name: backend.device.memory_total for backend in backends}.values())
    needed = capacity * bytes_per_cell
    if total and needed > total:
        raise OptionError(
            f"{capacity} cells take {needed / 2**20:.0f} MiB of K/V, the devices have {total / 2**20:.0f} MiB"
        )
    return bytes_per_cell


def _free_all(storages: Sequence[_LayerStorage]) -> None:
    for storage in storages:
        storage.free()


class GgmlKvPool:
    """K and V of `layers`, each on its layer's backend.

    Raises OptionError for a combination that cannot be, before anything is allocated.
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
    ) -> None:
        if v_layout not in {"rows", "columns"}:
            raise OptionError(f"V is laid out in 'rows' or 'columns', asked for {v_layout!r}")
        for what, tensor_type in (("K", k_type), ("V", v_type)):
            if tensor_type not in _NUMPY_TYPES:
                raise OptionError(f"{what} can be {', '.join(KV_TYPES)}, asked for {tensor_type.name.lower()}")
        if capacity < 1:
            raise OptionError(f"the capacity must be at least one cell, asked for {capacity}")
        self.libraries = libraries
        self.layers = tuple(layers)
        self.capacity = capacity
        self.k_type = k_type
        self.v_type = v_type
        self.v_layout: VLayout = v_layout
        self._backends = tuple(backends)
        self.bytes_per_cell = check_memory(layers, backends, capacity, k_type, v_type)
        self.n_grown = 0
        self.rows = 1
        self._storage = self._allocate(1)
        for storage in self._storage:
            storage.buffer.clear()

    @property
    def n_bytes(self) -> int:
        """Bytes of storage held now."""
        return self.rows * self.bytes_per_cell

    def _allocate(self, rows: int) -> list[_LayerStorage]:
        made: list[_LayerStorage] = []
        try:
            for il, (layer, backend) in enumerate(zip(self.layers, self._backends, strict=True)):
                context = TensorContext(self.libraries, 2)
                v_shape = (rows, layer.n_embd_v) if self.v_layout == "columns" else (layer.n_embd_v, rows)
                k = context.new_tensor(f"cache_k_l{il}", self.k_type, layer.n_embd_k, rows)
                v = context.new_tensor(f"cache_v_l{il}", self.v_type, *v_shape)
                try:
                    buffer = allocate_tensors(self.libraries, backend.buffer_type, [k, v])
                except BaseException:
                    context.free()
                    raise
                made.append(_LayerStorage(k, v, context, buffer))
        except BaseException:
            _free_all(made)
            raise
        return made

    def must_grow(self, extent: int) -> bool:
        """Whether a step of this extent needs more rows; graphs over this pool must be gone before `grow`."""
        if extent > self.capacity:
            raise CacheError(f"an extent of {extent} rows in a pool of {self.capacity}")
        return extent > self.rows

    def grow(self, extent: int) -> None:
        """Make room for `extent` rows by doubling; rows keep their bytes.

        Raises AllocationError, and keeps everything as it was, when memory runs out.
        """
        if not self.must_grow(extent):
            return
        rows = min(max(extent, 2 * self.rows), self.capacity)
        fresh = self._allocate(rows)
        try:
            for old, new in zip(self._storage, fresh, strict=True):
                new.buffer.clear()
                self._copy(old, new)
        except BaseException:  # Python's own memory may run out in the copy
            _free_all(fresh)
            raise
        _free_all(self._storage)
        self._storage = fresh
        self.rows = rows
        self.n_grown += 1

    def _copy(self, old: _LayerStorage, new: _LayerStorage) -> None:
        k = np.empty(old.k.span_bytes, np.uint8)
        get_data(self.libraries, old.k, k)
        set_data(self.libraries, new.k, k)
        v: npt.NDArray[Any] = np.empty(tuple(reversed(old.v.ne[:2])), _NUMPY_TYPES[self.v_type])
        get_data(self.libraries, old.v, v)
        if self.v_layout == "columns":
            wide = np.zeros(tuple(reversed(new.v.ne[:2])), v.dtype)
            wide[:, : v.shape[1]] = v
            v = wide
        set_data(self.libraries, new.v, v)

    # ---- the graph's side

    def v_row_ids(self, cells: npt.NDArray[np.int64], n_embd_v: int) -> npt.NDArray[np.int64]:
        """Where the elements of new V rows go in "columns": i64 [n_embd_v * tokens], token by token."""
        offsets = np.arange(n_embd_v, dtype=np.int64) * self.rows
        return (cells[:, None] + offsets[None, :]).ravel()

    def write(self, b: GraphBuilder, layer: int, k: Tensor, v: Tensor, cells: Tensor, v_rows: Tensor) -> None:
        """Add the storing of k and v f32 [n_embd, tokens] to a graph.

        `cells` i64 [tokens]; `v_rows` is the same in "rows", `v_row_ids` in "columns".
        """
        storage = self._storage[layer]
        b.expand(b.set_rows(storage.k, k, cells, f"blk.{layer}.k_store"))
        if self.v_layout == "rows":
            b.expand(b.set_rows(storage.v, v, v_rows, f"blk.{layer}.v_store"))
            return
        flat = b.reshape(storage.v, 1, storage.v.n_elements)
        elements = b.reshape(v, 1, v.n_elements)
        b.expand(b.set_rows(flat, elements, v_rows, f"blk.{layer}.v_store"))

    def read(self, b: GraphBuilder, layer: int, n_head: int, spans: Spans) -> tuple[Tensor, Tensor]:
        """Add the reading of spans (first row, number) to a graph.

        Gives k [head, rows, heads] and v [head, rows, heads], or [rows, head, heads] in "columns". One span is a view
        and copies nothing; several are joined in their order.
        """
        storage = self._storage[layer]
        k = self._join(b, [self._row_heads(b, storage.k, n_head, span, f"blk.{layer}.k") for span in spans], 1)
        if self.v_layout == "rows":
            return k, self._join(
                b, [self._row_heads(b, storage.v, n_head, span, f"blk.{layer}.v") for span in spans], 1
            )
        columns = [self._column_heads(b, storage.v, n_head, span, f"blk.{layer}.v") for span in spans]
        return k, self._join(b, columns, 0)

    @staticmethod
    def _row_heads(b: GraphBuilder, x: Tensor, n_head: int, span: tuple[int, int], name: str) -> Tensor:
        head = x.ne[0] // n_head
        lo, n = span
        return b.view(x, (head, n, n_head), (x.nb[1], x.type.row_bytes(head)), lo * x.nb[1], name)

    @staticmethod
    def _column_heads(b: GraphBuilder, x: Tensor, n_head: int, span: tuple[int, int], name: str) -> Tensor:
        head = x.ne[1] // n_head
        lo, n = span
        return b.view(x, (n, head, n_head), (x.nb[1], head * x.nb[1]), lo * x.nb[0], name)

    @staticmethod
    def _join(b: GraphBuilder, parts: Sequence[Tensor], dim: int) -> Tensor:
        joined = parts[0]
        for part in parts[1:]:
            joined = b.concat(joined, part, dim)
        return joined

    # ---- the checker's side

    def cell(self, layer: int, cell: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """K [n_embd_k] and V [n_embd_v] of one cell, as f32. Raises CacheError for a row that is not stored."""
        if not 0 <= cell < self.rows:
            raise CacheError(f"cell {cell} is not stored, the pool holds rows 0 to {self.rows - 1}")
        storage = self._storage[layer]
        k = np.empty(storage.k.ne[0], _NUMPY_TYPES[self.k_type])
        get_data(self.libraries, storage.k, k, cell * storage.k.nb[1])
        if self.v_layout == "rows":
            v = np.empty(storage.v.ne[0], _NUMPY_TYPES[self.v_type])
            get_data(self.libraries, storage.v, v, cell * storage.v.nb[1])
        else:
            table = np.empty(tuple(reversed(storage.v.ne[:2])), _NUMPY_TYPES[self.v_type])
            get_data(self.libraries, storage.v, table)
            v = table[:, cell]
        return k.astype(np.float32), v.astype(np.float32)

    def free(self) -> None:
        """Free all storage; idempotent. Graphs over it must be gone."""
        _free_all(self._storage)
        self._storage = []
        self.rows = 0
