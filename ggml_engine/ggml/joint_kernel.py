"""Joint products, where the package was built with them: several weights times the same few activations at once.

Knows the C side's parameters (native/joint_products.h) and ggml's functions of a tensor type, which do the work row by
row as in ggml's own products. Without the extension built, or with a ggml whose CPU part lies elsewhere,
`find_joint_kernel` finds nothing, and every product is an operation of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ggml_engine.ggml.library import Libraries, ffi
from ggml_engine.ggml.tensor_types import TensorType

MOST_WEIGHTS = 4

_PARAMS = struct.Struct("@f6i4i4q4P4P")  # struct joint_products_params
_LINE = 16  # JOINT_LINE

# Each thread packs the activations for itself: of more tokens that costs more than waiting.
_MOST_TOKENS = 4

# From two tokens on ggml multiplies these by tiles of both, which sum in another order (llamafile/sgemm.cpp).
_TILED_TYPES = frozenset(
    {
        TensorType.F32, TensorType.F16, TensorType.BF16, TensorType.Q8_0, TensorType.Q4_0, TensorType.Q5_0,
        TensorType.IQ4_NL,
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Dot:
    """How ggml multiplies rows of a type: by `function`, with activations that `pack` has made `kind` of."""

    function: int
    pack: int
    kind: int  # a number of ggml's: some types are never stored
    n_rows: int  # that it takes at once


class JointKernel:
    """An operation for `ggml_custom_4d`, and what its parameters are."""

    def __init__(self, libraries: Libraries, address: int) -> None:
        self.operation = ffi.cast("ggml_custom_op_t", address)
        self._libraries = libraries
        self._dots: dict[TensorType, _Dot | None] = {}

    def takes(self, weight: TensorType, n_tokens: int) -> bool:
        """Whether a weight of this type times so many tokens comes out as in ggml's own product, bit for bit."""
        if n_tokens > _MOST_TOKENS or (n_tokens > 1 and weight in _TILED_TYPES):
            return False
        dot = self._dot(weight)
        return dot is not None and (n_tokens == 1 or dot.n_rows == 1)

    @staticmethod
    def takes_some(n_tokens: int) -> bool:
        """Whether there are types that it takes with so many tokens."""
        return n_tokens <= _MOST_TOKENS

    def params(
        self,
        weights: Sequence[TensorType],
        n_dims: int,
        n_tokens: int,
        n_threads: int,
        *,
        eps: float | None = None,
        adds: bool = False,
    ) -> tuple[Any, int]:
        """The constants of an operation, as memory that must live as long as its graph, and its floats of scratch.

        `eps` is that of the norm before it, None for none. At most `n_threads` work at once.
        """
        dots = [dot for weight in weights if (dot := self._dot(weight)) is not None]
        kinds: list[int] = []
        packs: list[int] = []
        for dot in dots:
            if dot.kind != TensorType.F32 and dot.kind not in kinds:
                kinds.append(dot.kind)
                packs.append(dot.pack)
        forms = [kinds.index(dot.kind) if dot.kind in kinds else -1 for dot in dots]
        sizes = [int(self._libraries.base.ggml_row_size(kind, n_dims)) for kind in kinds]
        packed = _PARAMS.pack(
            0.0 if eps is None else eps, len(dots), eps is not None, adds, n_threads, 0, 0,
            *_filled(forms, -1), *_filled(sizes, 0), *_filled(packs, 0), *_filled([dot.function for dot in dots], 0),
        )  # fmt: skip
        memory = ffi.new("char[]", _PARAMS.size)
        ffi.memmove(memory, packed, _PARAMS.size)
        slice_floats = _whole_lines(n_dims * n_tokens) if eps is not None else 0
        slice_floats += sum(_whole_lines(size * n_tokens // 4 + 1) for size in sizes)
        return memory, n_threads * slice_floats + _LINE

    def _dot(self, weight: TensorType) -> _Dot | None:
        if weight not in self._dots:
            self._dots[weight] = self._find(weight)
        return self._dots[weight]

    def _find(self, weight: TensorType) -> _Dot | None:
        of_type = self._libraries.registry.ggml_get_type_traits_cpu
        traits = of_type(int(weight))
        kind = int(traits.vec_dot_type)
        if traits.vec_dot == ffi.NULL:
            return None
        pack = of_type(kind).from_float
        if kind != TensorType.F32 and pack == ffi.NULL:
            return None
        return _Dot(_address(traits.vec_dot), _address(pack), kind, int(traits.nrows))


@lru_cache(maxsize=1)
def find_joint_kernel(libraries: Libraries) -> JointKernel | None:
    """The operation over the open libraries, or None."""
    try:
        from ggml_engine.native import _kernels as native  # noqa: PLC0415  # absent where nothing was built
    except ImportError:
        return None
    found = native.joint_products()
    if found is None or found[:2] != (MOST_WEIGHTS, _PARAMS.size):
        return None
    # by way of the library that was loaded with it: opened by its own name it might come a second time
    if getattr(libraries.registry, "ggml_get_type_traits_cpu", None) is None:
        return None
    return JointKernel(libraries, found[2])


def _filled(values: Sequence[int], rest: int) -> list[int]:
    return [*values, *[rest] * (MOST_WEIGHTS - len(values))]


def _whole_lines(n_floats: int) -> int:
    return -(-n_floats // _LINE) * _LINE


def _address(function: Any) -> int:
    return int(ffi.cast("uintptr_t", function))
