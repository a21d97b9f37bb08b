"""`GgmlKvPool`: the K and V of every layer, off the graph; row r is cell r.

Owns the tensors and their growth: storage starts with one row and doubles to a step's extent, bounded by a capacity in
cells. Knows nothing of sequences, owners or masks: that is the cell cache's. K is row-major; V is row-major ("rows":
what flash attention and gathers read) or transposed ("columns": what the matmul form reads), fixed at construction.
Where V is a part of K it is read out of K's rows, if it is not to be in columns or of another type. Rows that no cell
uses are zero, so that a masked row is finite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import CacheError, OptionError
from ggml_engine.ggml.backends import Backend, Buffer, Graph, TensorContext, allocate_tensors, get_data, set_data
from ggml_engine.ggml.library import Libraries
from ggml_engine.ggml.ops import GraphBuilder, Tensor
from ggml_engine.models.config import KvLayer
from ggml_engine.pool.compaction import Piece
from ggml_engine.pool.kv_types import KvFormat, decode
from ggml_engine.pool.read_plan import Comb, group_spans

# Bounds the memory of a copy's graph; a move has few copies, since most have pieces at equal distances.
_COPIES_PER_GRAPH = 64


@dataclass(frozen=True, slots=True)
class _LayerStorage:
    k: Tensor  # [n_embd_k, rows]
    v: Tensor | None  # [n_embd_v, rows], or [rows, n_embd_v] in columns; None: the first n_embd_v elements of k's rows
    context: TensorContext
    buffer: Buffer

    def free(self) -> None:
        self.buffer.free()
        self.context.free()


def _stores_v(layer: KvLayer, kv_format: KvFormat) -> bool:
    """Whether V has memory of its own."""
    return not layer.v_in_k or kv_format.v_layout == "columns" or kv_format.v_type != kv_format.k_type


def bytes_per_cell(layers: Sequence[KvLayer], kv_format: KvFormat) -> int:
    """Bytes of one cell over all layers."""
    n_bytes = sum(kv_format.k_type.row_bytes(layer.n_embd_k) for layer in layers)
    stored = [layer.n_embd_v for layer in layers if _stores_v(layer, kv_format)]
    return n_bytes + sum(kv_format.v_type.row_bytes(n_embd_v) for n_embd_v in stored)


def check_memory(layers: Sequence[KvLayer], backends: Sequence[Backend], capacity: int, kv_format: KvFormat) -> None:
    """Raise OptionError when `capacity` cells exceed the memory of the layers' devices."""
    total = sum({backend.device.name: backend.device.memory_total for backend in backends}.values())
    needed = capacity * bytes_per_cell(layers, kv_format)
    if total and needed > total:
        raise OptionError(
            f"{capacity} cells take {needed / 2**20:.0f} MiB of K/V, the devices have {total / 2**20:.0f} MiB"
        )


def _free_all(storages: Sequence[_LayerStorage]) -> None:
    for storage in storages:
        storage.free()


def _teeth(
    b: GraphBuilder, x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], comb: Comb, row_stride: int, name: str
) -> Tensor:
    """The view of shape and strides at every tooth of `comb`; `row_stride` in bytes from one row to the next."""
    if comb.n_teeth > 1:
        shape, strides = (*shape, comb.n_teeth), (*strides, comb.stride * row_stride)
    return b.view(x, shape, strides, comb.lo * row_stride, name)


def _rows(b: GraphBuilder, x: Tensor, comb: Comb) -> Tensor:
    return _teeth(b, x, (x.ne[0], comb.n_rows), (x.nb[1],), comb, x.nb[1], "")


def _columns(b: GraphBuilder, x: Tensor, comb: Comb) -> Tensor:
    return _teeth(b, x, (comb.n_rows, x.ne[1]), (x.nb[1],), comb, x.nb[0], "")


def _ranges(piece: Piece) -> tuple[tuple[int, int], tuple[int, int]]:
    source, target, n_rows = piece
    return (source, n_rows), (target, n_rows)


def _copies(pieces: Sequence[Piece]) -> list[tuple[Comb, Comb]]:
    """Pieces as sources and targets of copies: equally long ones at equal distances are one, which saves nodes."""
    copies = []
    start = 0
    for source in group_spans([(first, n) for first, _, n in pieces], 2):
        rest = [(first, n) for _, first, n in pieces[start : start + source.n_teeth]]
        start += source.n_teeth
        targets = group_spans(rest, 2)
        n_done = 0
        for target in targets:
            lo = source.lo + n_done * source.stride
            stride = source.stride if target.n_teeth > 1 else 0
            copies.append((Comb(lo, source.n_rows, target.n_teeth, stride), target))
            n_done += target.n_teeth
    return copies


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
        kv_format: KvFormat | None = None,
    ) -> None:
        self.format = kv_format or KvFormat()
        for layer in layers:
            self.format.check_head("K", self.format.k_type, layer.head_k)
            self.format.check_head("V", self.format.v_type, layer.head_v)
        if capacity < 1:
            raise OptionError(f"the capacity must be at least one cell, asked for {capacity}")
        self.libraries = libraries
        self.layers = tuple(layers)
        self.capacity = capacity
        self._backends = tuple(backends)
        self.bytes_per_cell = bytes_per_cell(layers, self.format)
        check_memory(layers, backends, capacity, self.format)
        self.n_grown = 0
        self.rows = 1
        self._storage = self._allocate(1)
        for storage in self._storage:
            storage.buffer.clear()

    @property
    def n_bytes(self) -> int:
        """Bytes of storage held now."""
        return self.rows * self.bytes_per_cell

    @property
    def tensors(self) -> tuple[tuple[Tensor, Tensor | None], ...]:
        """K and V of every layer, until the pool grows; None for a V that is a part of K."""
        return tuple((storage.k, storage.v) for storage in self._storage)

    def _allocate(self, rows: int) -> list[_LayerStorage]:
        made: list[_LayerStorage] = []
        try:
            for il, (layer, backend) in enumerate(zip(self.layers, self._backends, strict=True)):
                context = TensorContext(self.libraries, 2)
                tensors = [context.new_tensor(f"cache_k_l{il}", self.format.k_type, layer.n_embd_k, rows)]
                if _stores_v(layer, self.format):
                    v_shape = (rows, layer.n_embd_v) if self.format.v_layout == "columns" else (layer.n_embd_v, rows)
                    tensors.append(context.new_tensor(f"cache_v_l{il}", self.format.v_type, *v_shape))
                try:
                    buffer = allocate_tensors(self.libraries, backend.buffer_type, tensors)
                except BaseException:
                    context.free()
                    raise
                made.append(_LayerStorage(tensors[0], tensors[1] if len(tensors) > 1 else None, context, buffer))
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
        for source, target in ((old.k, new.k), (old.v, new.v)):
            if source is None or target is None:
                continue
            raw: npt.NDArray[np.uint8] = np.empty(source.span_bytes, np.uint8)
            get_data(self.libraries, source, raw)
            if self.format.v_layout == "columns" and source is old.v:
                table = raw.reshape(source.ne[1], -1)
                wide = np.zeros((target.ne[1], target.nb[1]), np.uint8)
                wide[:, : table.shape[1]] = table
                raw = wide.ravel()
            set_data(self.libraries, target, raw)

    def copy_rows(self, pieces: Sequence[Piece], backends: Sequence[Backend]) -> int:
        """Copies the rows of every piece (first row, first row of the copy, number of rows), and returns the bytes.

        Pieces and copies have no row in common, and all are stored. `backends` as in `Graph`. Graphs over this pool
        stay valid. Raises NativeError; then some copies may have been made, and the rows copied are as they were.
        """
        if not all(first >= 0 and first + n <= self.rows for piece in pieces for first, n in _ranges(piece)):
            raise CacheError(f"rows to copy lie outside of the {self.rows} that are stored")
        combs = _copies(pieces)
        for start in range(0, len(combs), _COPIES_PER_GRAPH):
            self._copy_combs(combs[start : start + _COPIES_PER_GRAPH], backends)
        return sum(n for _, _, n in pieces) * self.bytes_per_cell

    def _copy_combs(self, combs: Sequence[tuple[Comb, Comb]], backends: Sequence[Backend]) -> None:
        b = GraphBuilder(self.libraries, 6 * len(self.layers) * len(combs), 2 * len(self.layers))
        try:
            for il, storage in enumerate(self._storage):
                for source, target in combs:
                    view = _rows if self.format.v_layout == "rows" else _columns
                    k, k_copy = _rows(b, storage.k, source), _rows(b, storage.k, target)
                    b.expand(b.copy(k, k_copy, f"blk.{il}.k_copy"))
                    if storage.v is not None:
                        v, v_copy = view(b, storage.v, source), view(b, storage.v, target)
                        b.expand(b.copy(v, v_copy, f"blk.{il}.v_copy"))
            graph = Graph(b, backends, f"copy of {len(combs)} pieces of the pool")
        except BaseException:
            b.free()
            raise
        try:
            graph.compute()
        finally:
            graph.free()

    # ---- the graph's side

    def k_rotation(self, layer: int) -> int | None:
        """Size of the rotation of a layer's K and queries; None for none.

        Where V is a part of K there is none of either: a mix of values goes on into a weight as it was computed.
        """
        kept = self.layers[layer]
        return None if kept.v_in_k else self.format.k_rotation(kept.head_k)

    def v_rotation(self, layer: int) -> int | None:
        """Size of the rotation of a layer's V; None for none."""
        kept = self.layers[layer]
        return None if kept.v_in_k else self.format.v_rotation(kept.head_v)

    def v_row_offsets(self, n_embd_v: int) -> npt.NDArray[np.int64]:
        """In "columns", what to add to a cell for where each element of its V goes: i64 [n_embd_v]. Until it grows."""
        return np.arange(n_embd_v, dtype=np.int64) * self.rows

    def write(self, b: GraphBuilder, layer: int, k: Tensor, v: Tensor, cells: Tensor, v_rows: Tensor) -> None:
        """Add the storing of k and v f32 [n_embd, tokens] to a graph.

        `cells` i64 [tokens]; `v_rows` is the same in "rows"; in "columns" i64 [tokens * n_embd_v]: token by
        token its cell plus `v_row_offsets`.
        """
        storage = self._storage[layer]
        b.expand(b.set_rows(storage.k, k, cells, f"blk.{layer}.k_store"))
        if storage.v is None:
            return
        if self.format.v_layout == "rows":
            b.expand(b.set_rows(storage.v, v, v_rows, f"blk.{layer}.v_store"))
            return
        flat = b.reshape(storage.v, 1, storage.v.n_elements)
        elements = b.reshape(v if v.is_contiguous else b.cont(v), 1, v.n_elements)
        b.expand(b.set_rows(flat, elements, v_rows, f"blk.{layer}.v_store"))

    def read(self, b: GraphBuilder, layer: int, combs: Sequence[Comb]) -> tuple[list[Tensor], list[Tensor]]:
        """Add the reading of combs to a graph: views, nothing is copied.

        Gives for each comb k [head, rows of a tooth, heads, teeth], and v the same, or [rows of a tooth, head, heads,
        teeth] in "columns".
        """
        storage = self._storage[layer]
        n_head = self.layers[layer].n_head
        k = [self._row_heads(b, storage.k, n_head, comb, f"blk.{layer}.k") for comb in combs]
        if storage.v is None:
            shape = (self.layers[layer].n_embd_v, self.rows)
            v = b.view(storage.k, shape, (storage.k.nb[1],), 0)
            return k, [self._row_heads(b, v, n_head, comb, f"blk.{layer}.v") for comb in combs]
        view = self._row_heads if self.format.v_layout == "rows" else self._column_heads
        return k, [view(b, storage.v, n_head, comb, f"blk.{layer}.v") for comb in combs]

    @staticmethod
    def _row_heads(b: GraphBuilder, x: Tensor, n_head: int, comb: Comb, name: str) -> Tensor:
        head = x.ne[0] // n_head
        shape, strides = (head, comb.n_rows, n_head), (x.nb[1], x.type.row_bytes(head))
        return _teeth(b, x, shape, strides, comb, x.nb[1], name)

    @staticmethod
    def _column_heads(b: GraphBuilder, x: Tensor, n_head: int, comb: Comb, name: str) -> Tensor:
        head = x.ne[1] // n_head
        shape, strides = (comb.n_rows, head, n_head), (x.nb[1], head * x.nb[1])
        return _teeth(b, x, shape, strides, comb, x.nb[0], name)

    # ---- the checker's side

    def cell(self, layer: int, cell: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """K [n_embd_k] and V [n_embd_v] of one cell as they are stored (rotated, where they are), as f32.

        Raises CacheError for a row that is not stored.
        """
        if not 0 <= cell < self.rows:
            raise CacheError(f"cell {cell} is not stored, the pool holds rows 0 to {self.rows - 1}")
        storage = self._storage[layer]
        k = self._row(storage.k, cell)
        if storage.v is None:
            both = decode(k, self.format.k_type)
            return both, both[: self.layers[layer].n_embd_v]
        if self.format.v_layout == "rows":
            return decode(k, self.format.k_type), decode(self._row(storage.v, cell), self.format.v_type)
        table = np.empty((storage.v.ne[1], storage.v.nb[1]), np.uint8)
        get_data(self.libraries, storage.v, table)
        n_bytes = self.format.v_type.block_bytes
        v = np.ascontiguousarray(table[:, cell * n_bytes : (cell + 1) * n_bytes]).ravel()
        return decode(k, self.format.k_type), decode(v, self.format.v_type)

    def _row(self, tensor: Tensor, row: int) -> npt.NDArray[np.uint8]:
        raw = np.empty(tensor.nb[1], np.uint8)
        get_data(self.libraries, tensor, raw, row * tensor.nb[1])
        return raw

    def free(self) -> None:
        """Free all storage; idempotent. Graphs over it must be gone."""
        _free_all(self._storage)
        self._storage = []
        self.rows = 0
