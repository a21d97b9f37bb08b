"""The K and V of cells as rows of bytes: how they leave a pool, and how they come back.

A row is the same in both layouts of V: layer after layer, first K, then V where it is stored apart, each as it is
stored (rotated and quantised, where it is). Where Python can reach the memory it is used in place; tensors on a device
are copied whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import InputError
from ggml_engine.ggml.backends import get_data, host_view, set_data
from ggml_engine.ggml.ops import Tensor
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.pool.kv_pool import GgmlKvPool
from ggml_engine.pool.kv_types import QUANTISED

Bytes = npt.NDArray[np.uint8]

# Bits of an exponent, all of which are set in what is no finite number.
_EXPONENTS: dict[TensorType, tuple[type[np.unsignedinteger], int]] = {
    TensorType.F32: (np.uint32, 0x7F800000),
    TensorType.F16: (np.uint16, 0x7C00),
    TensorType.BF16: (np.uint16, 0x7F80),
}


class PoolRows:
    """Rows of one pool. `make_room` lets the pool hold an extent; graphs over it must be gone before it grows."""

    def __init__(self, pool: GgmlKvPool, make_room: Callable[[int], None]) -> None:
        self._pool = pool
        self.make_room = make_room

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self._pool.bytes_per_cell

    def read(self, cells: npt.NDArray[np.int64]) -> Bytes:
        """The rows of these cells, u8 [cells, row_bytes]; all are stored."""
        out = np.empty((cells.size, self.row_bytes), np.uint8)
        where = _as_slice(cells)
        for tensor, part, is_columns in self._parts(out):
            data = self._data(tensor)
            if is_columns:
                elements = _elements(part, tensor)
                elements[:] = _columns(data, tensor)[:, where].T
            else:
                part[:] = data.reshape(-1, tensor.nb[1])[where]
        return out

    def write(self, cells: npt.NDArray[np.int64], rows: Bytes) -> None:
        """Replace the rows of these cells; all are stored.

        Raises InputError, with nothing written, when a number in them is not finite: a masked row is read as well.
        """
        if not all(_is_finite(part, tensor.type) for tensor, part, _ in self._parts(rows)):
            raise InputError("K or V of a row has numbers that are not finite")
        where = _as_slice(cells)
        for tensor, part, is_columns in self._parts(rows):
            data = self._data(tensor)
            if is_columns:
                _columns(data, tensor)[:, where] = _elements(part, tensor).T
            else:
                data.reshape(-1, tensor.nb[1])[where] = part
            if host_view(self._pool.libraries, tensor) is None:
                set_data(self._pool.libraries, tensor, data)

    def _parts(self, rows: Bytes) -> Iterator[tuple[Tensor, Bytes, bool]]:
        """Every tensor of the pool, what it has of the rows, and whether it is in columns."""
        is_columns = self._pool.format.v_layout == "columns"
        start = 0
        for layer, (k, v) in zip(self._pool.layers, self._pool.tensors, strict=True):
            for tensor, width, in_columns in ((k, layer.n_embd_k, False), (v, layer.n_embd_v, is_columns)):
                if tensor is None:
                    continue
                n_bytes = tensor.type.row_bytes(width)
                yield tensor, rows[:, start : start + n_bytes], in_columns
                start += n_bytes

    def _data(self, tensor: Tensor) -> Bytes:
        """All of a tensor: its own bytes, or a copy where these lie on a device."""
        view = host_view(self._pool.libraries, tensor)
        if view is not None:
            return np.frombuffer(view, np.uint8)
        copy = np.empty(tensor.span_bytes, np.uint8)
        get_data(self._pool.libraries, tensor, copy)
        return copy


def _columns(data: Bytes, tensor: Tensor) -> npt.NDArray[np.unsignedinteger]:
    """[n_embd_v, rows] of a V in columns, an unsigned integer for each element."""
    dtype, _ = _EXPONENTS[tensor.type]
    return data.view(dtype).reshape(tensor.ne[1], tensor.ne[0])


def _elements(part: Bytes, tensor: Tensor) -> npt.NDArray[np.unsignedinteger]:
    """[cells, n_embd_v] of the bytes of rows."""
    dtype, _ = _EXPONENTS[tensor.type]
    return part.view(dtype)


def _as_slice(cells: npt.NDArray[np.int64]) -> slice | npt.NDArray[np.int64]:
    """Consecutive cells as a slice, which is copied faster."""
    if cells.size and int(cells[-1] - cells[0]) == cells.size - 1 and (cells[1:] > cells[:-1]).all():
        return slice(int(cells[0]), int(cells[-1]) + 1)
    return cells


def _is_finite(part: Bytes, tensor_type: TensorType) -> bool:
    if tensor_type in QUANTISED:  # a block begins with its scale, an f16
        blocks = part.reshape(part.shape[0], -1, tensor_type.block_bytes)
        part, tensor_type = np.ascontiguousarray(blocks[:, :, :2]).reshape(-1, 2), TensorType.F16
    dtype, exponent = _EXPONENTS[tensor_type]
    return not ((part.view(dtype) & exponent) == exponent).any()
