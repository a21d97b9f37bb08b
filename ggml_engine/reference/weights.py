"""The tensors of a GGUF in float64, for models by definition.

Reads through the engine's own `GGUFFile`. f32, f16 and bf16 are widened by numpy. Quantised rows go through ggml's own
dequantisation (`get_rows` on the CPU): a mistake in that would be repeated by whoever reads here. The tests compare it
with gguf-py's for the types that tiny models have.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ggml_engine.ggml.backends import Backend, Graph, cpu_device, get_data, set_data
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.library import load
from ggml_engine.ggml.ops import GraphBuilder
from ggml_engine.ggml.tensor_types import TensorType

Array = npt.NDArray[np.float64]

_MAX_ELEMENTS = 1 << 24  # of one dequantising graph: 64 MiB of f32


class FileWeights:
    """Tensors of an open file by name, in numpy's order: a matrix is [n_out, n_in]. Nothing is kept."""

    def __init__(self, file: GGUFFile) -> None:
        self._file = file

    def __contains__(self, name: str) -> bool:
        return name in self._file.tensors

    def tensor(self, name: str) -> Array:
        """The whole tensor. Raises WeightError for a name that the file does not have."""
        raw = self._file.tensor_bytes(name)
        info = self._file.tensors[name]
        rows = np.frombuffer(raw, np.uint8).reshape(-1, info.type.row_bytes(info.shape[0]))
        return widen(rows, info.type).reshape(tuple(reversed(info.shape)))

    def rows(self, name: str, ids: npt.ArrayLike) -> Array:
        """Rows of a matrix, [len(ids), n_in]. Raises as `tensor`, and IndexError for a row that there is not."""
        raw = self._file.tensor_bytes(name)
        info = self._file.tensors[name]
        table = np.frombuffer(raw, np.uint8).reshape(-1, info.type.row_bytes(info.shape[0]))
        return widen(np.ascontiguousarray(table[np.asarray(ids)]), info.type)


def widen(rows: npt.NDArray[np.uint8], tensor_type: TensorType) -> Array:
    """Stored rows, bytes [n_rows, row_bytes], as numbers [n_rows, n_in]."""
    if tensor_type is TensorType.F32:
        return rows.view(np.float32).astype(np.float64)
    if tensor_type is TensorType.F16:
        return rows.view(np.float16).astype(np.float64)
    if tensor_type is TensorType.BF16:
        return (rows.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    n_in = rows.shape[1] // tensor_type.block_bytes * tensor_type.block_size
    found = np.empty((len(rows), n_in), np.float64)
    n_at_once = max(1, _MAX_ELEMENTS // n_in)
    for start in range(0, len(rows), n_at_once):
        found[start : start + n_at_once] = _dequantised(rows[start : start + n_at_once], n_in, tensor_type)
    return found


def _dequantised(rows: npt.NDArray[np.uint8], n_in: int, tensor_type: TensorType) -> npt.NDArray[np.float32]:
    libraries = load()
    backend = Backend(libraries, cpu_device(libraries), 1)
    b = GraphBuilder(libraries, 8)
    try:
        stored = b.input("rows", tensor_type, n_in, len(rows))
        ids = b.input("ids", TensorType.I32, len(rows))
        result = b.output(b.get_rows(stored, ids), "numbers")
        graph = Graph(b, (backend,), f"dequantisation of {tensor_type.name}")
        try:
            set_data(libraries, stored, np.ascontiguousarray(rows))
            set_data(libraries, ids, np.arange(len(rows), dtype=np.int32))
            graph.compute()
            found = np.empty((len(rows), n_in), np.float32)
            get_data(libraries, result, found)
        finally:
            graph.free()
    finally:
        b.free()
        backend.free()
    return found
