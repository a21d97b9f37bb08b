"""Small graphs over numpy arrays, on the CPU: inputs in, one result out.

Arrays have numpy's axis order, tensors ggml's, so that shapes are mirrored. f16 stays f16; bf16 and quantised types are
written as raw bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

from ggml_engine.ggml import backends, library
from ggml_engine.ggml.backends import Backend, Graph
from ggml_engine.ggml.ops import GraphBuilder, Tensor
from ggml_engine.ggml.tensor_types import TensorType

NUMPY_TYPES: dict[TensorType, Any] = {
    TensorType.F32: np.float32,
    TensorType.F16: np.float16,
    TensorType.I32: np.int32,
    TensorType.I64: np.int64,
    TensorType.I16: np.int16,
    TensorType.I8: np.int8,
    TensorType.F64: np.float64,
}


def stored(values: npt.NDArray[Any], kind: TensorType) -> npt.NDArray[Any]:
    """The bytes of an array in a tensor type, by numpy or gguf-py."""
    if kind in NUMPY_TYPES:
        return np.ascontiguousarray(values, NUMPY_TYPES[kind])
    quantised = gguf.quants.quantize(np.ascontiguousarray(values, np.float32), gguf.GGMLQuantizationType(int(kind)))
    return np.ascontiguousarray(quantised).view(np.uint8)


def loaded(raw: npt.NDArray[Any], kind: TensorType, shape: Sequence[int]) -> npt.NDArray[Any]:
    """The array that the bytes of a tensor mean; numpy's shape."""
    if kind in NUMPY_TYPES:
        return raw.view(NUMPY_TYPES[kind]).reshape(shape)
    rows = raw.reshape(-1, kind.row_bytes(shape[-1]))
    if kind == TensorType.BF16:
        rows = rows.view(np.uint8)
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(int(kind))).reshape(shape)


class Bench:
    """One graph under test: make inputs, build on `builder`, run."""

    def __init__(self, max_tensors: int = 64, n_threads: int = 1) -> None:
        self.libraries = library.load()
        self.builder = GraphBuilder(self.libraries, max_tensors)
        self._n_threads = n_threads
        self._inputs: list[tuple[Tensor, npt.NDArray[Any]]] = []

    def input(self, values: npt.ArrayLike, kind: TensorType = TensorType.F32) -> Tensor:
        """A tensor that holds `values`."""
        array = np.asarray(values)
        return self.raw_input(stored(array, kind), kind, *reversed(array.shape))

    def raw_input(self, raw: npt.NDArray[Any], kind: TensorType, *ne: int) -> Tensor:
        """A tensor of bytes that are in its type already; ggml's shape."""
        tensor = self.builder.input(f"input {len(self._inputs)}", kind, *ne)
        self._inputs.append((tensor, raw))
        return tensor

    def zeros(self, kind: TensorType, *ne: int) -> Tensor:
        """A tensor of zero bytes; ggml's shape."""
        return self.raw_input(np.zeros(kind.tensor_bytes(ne), np.uint8), kind, *ne)

    def run(self, result: Tensor, name: str = "bench") -> npt.NDArray[Any]:
        """The values of `result`, in numpy's shape without leading ones."""
        (values,) = self.run_all(result, name=name)
        return values

    def run_all(self, *results: Tensor, name: str = "bench") -> list[npt.NDArray[Any]]:
        """The values of several results."""
        for result in results:
            self.builder.output(result, "result")
        for tensor, _ in self._inputs:
            self.builder.expand(tensor)  # an unused input would have no memory
        backend = Backend(self.libraries, backends.cpu_device(self.libraries), self._n_threads)
        graph = Graph(self.builder, [backend], name)
        for tensor, raw in self._inputs:
            backends.set_data(self.libraries, tensor, raw)
        graph.compute()
        found = [self._read(result) for result in results]
        graph.free()
        backend.free()
        return found

    def _read(self, tensor: Tensor) -> npt.NDArray[Any]:
        raw = np.empty(tensor.span_bytes, np.uint8)
        backends.get_data(self.libraries, tensor, raw)
        shape = list(reversed(tensor.ne))
        while len(shape) > 1 and shape[0] == 1:
            del shape[0]
        if tensor.is_contiguous:
            return loaded(raw, tensor.type, shape)
        if tensor.type not in NUMPY_TYPES:
            raise ValueError(f"{tensor!r} is scattered")
        dtype = np.dtype(NUMPY_TYPES[tensor.type])
        padded = np.concatenate([raw, np.zeros(-len(raw) % dtype.itemsize, np.uint8)])
        view = np.lib.stride_tricks.as_strided(
            padded.view(dtype), tuple(reversed(tensor.ne)), tuple(reversed(tensor.nb))
        )
        return view.reshape(shape).copy()


def evaluate(build: Callable[[Bench], Tensor], *, n_threads: int = 1) -> npt.NDArray[Any]:
    """Build one result on a fresh bench and run it."""
    bench = Bench(n_threads=n_threads)
    return bench.run(build(bench))


def random(*shape: int, seed: int = 0) -> npt.NDArray[np.float32]:
    """Standard normal f32, always the same."""
    return np.random.default_rng([seed, math.prod(shape), *shape]).standard_normal(shape, np.float32)


def close(found: npt.NDArray[np.generic], expected: npt.NDArray[np.generic], bound: float = 2e-6) -> None:
    """Assert that the shapes are alike and the values, against the largest one expected or 1, within `bound`."""
    assert found.shape == expected.shape
    scale = max(1.0, float(np.abs(expected).max()))
    assert np.abs(found.astype(np.float64) - expected).max() <= bound * scale
