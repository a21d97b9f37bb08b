"""Weights once more, in a type whose products of many columns are faster: steps of many tokens use these.

Owns their memory; the ordinary weights stay, for short steps. Only quantised matrices of layers that compute on the CPU
are laid out: embedding, output, experts, norms and what the file has in floats stay as they are. Made from the file by
ggml's own conversions. Products with f16, bf16 and f32 round activations to that type, quantised ones to 8 bits, so
the float layouts come closer to what the file's values mean; f32 holds these values exactly.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import AllocationError, CancelledError, OptionError
from ggml_engine.ggml.backends import (
    Backend,
    Buffer,
    Graph,
    allocate_tensors,
    buffer_type_name,
    get_data,
    set_data,
    set_row_ids,
)
from ggml_engine.ggml.gguf import GGUFFile, TensorInfo
from ggml_engine.ggml.library import Libraries
from ggml_engine.ggml.ops import FLOAT_TYPES, GraphBuilder, Tensor, TensorContext
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.models.weights import Cancel, Placer, Role, TensorSpec, Weights

log = logging.getLogger("ggml_engine.weights")

PrefillLayout = Literal["off", "f16", "bf16", "f32", "q8_0"]

# From so many tokens on a step uses the second layout: below, reading more bytes costs what faster products gain
# (docs/performance.md).
MIN_TOKENS = 8

_PIECE_ELEMENTS = 1 << 20  # converted at once: 4 MiB of f32
_MIB = 1 << 20


def check_layout(layout: str) -> None:
    """Raises OptionError for what is no layout."""
    known = get_args(PrefillLayout)
    if layout not in known:
        raise OptionError(f"prefill_weights is {', '.join(known[:-1])} or {known[-1]}, asked for {layout!r}")


class PrefillWeights:
    """The second layout of a model's weights. `tensors` has them by the names of the ordinary ones."""

    def __init__(self, layout: str, weights: Weights) -> None:
        self.layout = layout
        self.min_tokens = MIN_TOKENS
        self.tensors = weights
        self.n_bytes = weights.n_bytes_copied

    def free(self) -> None:
        """Free them; idempotent. Graphs over them must be gone."""
        self.tensors.free()


@dataclass(frozen=True, slots=True)
class _Matrix:
    name: str
    info: TensorInfo
    buffer_type: Any


class PrefillPlan:
    """Which matrices are laid out, as what and where. Nothing is allocated yet."""

    def __init__(self, layout: str, matrices: Sequence[_Matrix]) -> None:
        self.layout = layout
        self.kind = TensorType[layout.upper()]
        self._matrices = list(matrices)

    @classmethod
    def of(
        cls, layout: PrefillLayout, file: GGUFFile, specs: Iterable[TensorSpec], placer: Placer, n_layer: int
    ) -> PrefillPlan | None:
        """The plan for a model's tensors; None where nothing is asked for, or there is nothing to lay out.

        Raises OptionError for what is no layout.
        """
        check_layout(layout)
        if layout == "off":
            return None
        kind = TensorType[layout.upper()]
        found = []
        for spec in specs:
            info = file.tensors.get(spec.name)
            if info is None or not _is_laid_out(spec, info, kind, placer, n_layer):
                continue
            as_laid_out = _in_type(info, kind)
            buffer_type, _ = placer.choose(spec, as_laid_out)
            found.append(_Matrix(spec.name, info, buffer_type))
        if not found:
            log.warning("%s: no quantised matrix that the CPU multiplies: prefill_weights changes nothing", file.path)
            return None
        return cls(layout, found)

    @property
    def n_bytes(self) -> int:
        """Bytes that the layout takes."""
        return sum(self.kind.tensor_bytes(matrix.info.shape) for matrix in self._matrices)

    def check_memory(self, available: int | None) -> None:
        """Raises AllocationError where it takes more than the bytes that are available (None: not known)."""
        if available is not None and self.n_bytes > available:
            raise AllocationError(
                f"prefill_weights {self.layout!r} takes {self.n_bytes / _MIB:.1f} MiB beside the model's weights, "
                f"and {available / _MIB:.1f} MiB are available"
            )

    def make(
        self,
        file: GGUFFile,
        backend: Backend,
        *,
        advance: Callable[[int], object] | None = None,
        cancel: Cancel | None = None,
    ) -> PrefillWeights:
        """Convert, in the backend's threads. `advance` is told how many of `n_bytes` each tensor was.

        Raises AllocationError, and CancelledError when `cancel()` turns true; nothing stays allocated then.
        """
        libraries = backend.libraries
        context = TensorContext(libraries, len(self._matrices))
        tensors: dict[str, Tensor] = {}
        buffers: list[Buffer] = []
        made = Weights(tensors, buffers, [context])
        converters: dict[tuple[TensorType, int, int], _Converter] = {}
        try:
            for matrix in self._matrices:
                tensors[matrix.name] = context.new_tensor(matrix.name, self.kind, *matrix.info.shape)
            buffers += self._allocate(libraries, tensors)
            made = Weights(tensors, buffers, [context])
            for matrix in self._matrices:
                width, n_rows = matrix.info.shape
                key = (matrix.info.type, width, min(n_rows, max(1, _PIECE_ELEMENTS // width)))
                if key not in converters:
                    converters[key] = _Converter(backend, *key, self.kind)
                data = np.frombuffer(file.tensor_bytes(matrix.name), np.uint8)
                # one call per tensor: a rearranging buffer takes it whole
                set_data(libraries, tensors[matrix.name], converters[key].convert(data, n_rows))
                if cancel is not None and cancel():
                    raise CancelledError(f"loading {file.path} was cancelled")
                if advance is not None:
                    advance(self.kind.tensor_bytes(matrix.info.shape))
        except BaseException:
            made.free()
            raise
        finally:
            for converter in converters.values():
                converter.free()
        for buffer in buffers:
            buffer.mark_as_weights()
        log.info("%s: %.1f MiB of weights as %s for prefill", file.path, made.n_bytes_copied / _MIB, self.layout)
        return PrefillWeights(self.layout, made)

    def _allocate(self, libraries: Libraries, tensors: Mapping[str, Tensor]) -> list[Buffer]:
        by_type: dict[str, list[_Matrix]] = {}
        for matrix in self._matrices:
            by_type.setdefault(buffer_type_name(libraries, matrix.buffer_type), []).append(matrix)
        return [
            allocate_tensors(libraries, group[0].buffer_type, [tensors[matrix.name] for matrix in group])
            for group in by_type.values()
        ]


def _is_laid_out(spec: TensorSpec, info: TensorInfo, kind: TensorType, placer: Placer, n_layer: int) -> bool:
    if spec.role is not Role.MATMUL or spec.layer is None or spec.layer >= n_layer:
        return False
    if info.type in FLOAT_TYPES or info.type is kind or len(info.shape) != 2:
        return False
    return placer.device_of(spec.layer).kind == "cpu"


def _in_type(info: TensorInfo, kind: TensorType) -> TensorInfo:
    return replace(info, type=kind, n_bytes=kind.tensor_bytes(info.shape))


class _Converter:
    """Rows of one type and width into another type, `n` at once: looked up as f32, stored as what is wanted."""

    def __init__(self, backend: Backend, source: TensorType, width: int, n: int, kind: TensorType) -> None:
        self._libraries = libraries = backend.libraries
        self._n_rows = n
        self._source_bytes, self._bytes = source.row_bytes(width), kind.row_bytes(width)
        self._context = TensorContext(libraries, 3)
        self._rows = self._context.new_tensor("rows", source, width, n)
        self._ids = self._context.new_tensor("ids", TensorType.I32, n)
        self._stored = self._context.new_tensor("stored", kind, width, n)
        self._buffer = allocate_tensors(libraries, backend.buffer_type, [self._rows, self._ids, self._stored])
        self._buffer.clear()  # a last piece is shorter: what lies behind it must be numbers
        set_row_ids(libraries, self._ids, np.arange(n, dtype=np.int32), n)
        b = GraphBuilder(libraries, 4, 3)
        b.expand(b.set_rows(self._stored, b.get_rows(self._rows, self._ids), self._ids))
        self._graph = Graph(b, [backend], f"conversion from {source.name} to {kind.name}")

    def convert(self, data: npt.NDArray[np.uint8], n_rows: int) -> npt.NDArray[np.uint8]:
        """`n_rows` rows, as bytes."""
        out = np.empty(n_rows * self._bytes, np.uint8)
        for first in range(0, n_rows, self._n_rows):
            n = min(self._n_rows, n_rows - first)
            piece = data[first * self._source_bytes : (first + n) * self._source_bytes]
            set_data(self._libraries, self._rows, piece)
            self._graph.compute()
            get_data(self._libraries, self._stored, out[first * self._bytes : (first + n) * self._bytes])
        return out

    def free(self) -> None:
        self._graph.free()
        self._context.free()
        self._buffer.free()
