"""Joint products, where the package was built with them: several weights times the same few activations at once.

Knows the C side's parameters (native/joint_products.h) and ggml's functions of a tensor type, which do the work row by
row as in ggml's own products, where panels do not (panels.py). Without the extension built, or with a ggml whose CPU
part lies elsewhere, `find_joint_kernel` finds nothing, and every product is an operation of its own.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ggml_engine.ggml.library import Libraries, ffi
from ggml_engine.ggml.panels import Panels
from ggml_engine.ggml.tensor_types import TensorType

MOST_WEIGHTS = 4

_PARAMS = struct.Struct("@f9i4i4i4i4q4q4P4PP")  # struct joint_products_params

# Up to so many each thread packs the activations for itself: of more tokens that costs more than waiting. Row by row
# more are not multiplied: ggml goes by blocks of rows and tokens.
_MOST_TOKENS = 4

_MOST_PACKED = 256  # parameters that are kept: a few for each number of tokens

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

    def __init__(self, libraries: Libraries, address: int, panels: Panels | None = None) -> None:
        self.operation = ffi.cast("ggml_custom_op_t", address)
        self._libraries = libraries
        self._panels = panels
        self._dots: dict[TensorType, _Dot | None] = {}
        self._agree: dict[TensorType, bool] = {}
        self._packed: dict[tuple[Any, ...], tuple[bytes, int]] = {}

    def takes(self, weight: TensorType, n_tokens: int) -> bool:
        """Whether a weight of this type times so many tokens comes out as in ggml's own product, bit for bit."""
        if self._panel(weight, n_tokens):
            return True
        if n_tokens > _MOST_TOKENS or (n_tokens > 1 and weight in _TILED_TYPES):
            return False
        dot = self._dot(weight)
        return dot is not None and (n_tokens == 1 or dot.n_rows == 1)

    def takes_some(self, n_tokens: int) -> bool:
        """Whether there may be types that it takes with so many tokens."""
        return n_tokens <= _MOST_TOKENS or self._panels is not None

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
        key = (tuple(weights), n_dims, n_tokens, n_threads, eps, adds)
        if key not in self._packed:  # a model's layers are alike
            if len(self._packed) >= _MOST_PACKED:
                self._packed.clear()
            self._packed[key] = self._pack(*key)
        packed, n_scratch = self._packed[key]
        memory = ffi.new("char[]", _PARAMS.size)
        ffi.memmove(memory, packed, _PARAMS.size)
        return memory, n_scratch

    def _pack(
        self, weights: Sequence[TensorType], n_dims: int, n_tokens: int, n_threads: int, eps: float | None, adds: bool
    ) -> tuple[bytes, int]:
        dots = [dot for weight in weights if (dot := self._dot(weight)) is not None]
        panels = [self._panel(weight, n_tokens) for weight in weights]
        forms: list[tuple[int, int]] = []  # ggml's kind of activations, and the panels that it is spread for
        of_weight = []
        packs: list[int] = []
        for dot, panel in zip(dots, panels, strict=True):
            form = (dot.kind, self._panels.spread(panel) if self._panels is not None and panel else 0)
            if dot.kind != TensorType.F32 and form not in forms:
                forms.append(form)
                packs.append(dot.pack)
            of_weight.append(forms.index(form) if form in forms else -1)
        packed_bytes = [int(self._libraries.base.ggml_row_size(kind, n_dims)) for kind, _ in forms]
        form_bytes = [
            self._panels.row_bytes(spread, n_dims) if self._panels is not None and spread else n_bytes
            for (_, spread), n_bytes in zip(forms, packed_bytes, strict=True)
        ]
        packed = _PARAMS.pack(
            0.0 if eps is None else eps, len(dots), eps is not None, adds, n_threads, n_tokens > _MOST_TOKENS,
            0, 0, 0, 0, *_filled(of_weight, -1), *_filled(panels, 0), *_filled([spread for _, spread in forms], 0),
            *_filled(form_bytes, 0), *_filled(packed_bytes, 0), *_filled(packs, 0),
            *_filled([dot.function for dot in dots], 0), 0 if self._panels is None else self._panels.address,
        )  # fmt: skip
        return packed, _native().joint_scratch(packed, n_dims, n_tokens)

    def _panel(self, weight: TensorType, n_tokens: int) -> int:
        """The number of the panels that it is multiplied by, 0 for none."""
        number = 0 if self._panels is None else self._panels.number(weight, n_tokens)
        if not number or self._panels is None:
            return 0
        if weight not in self._agree:
            dot = self._dot(weight)
            self._agree[weight] = dot is not None and self._panels.agree(weight, dot.function, dot.pack)
        return number if self._agree[weight] else 0

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
        native = _native()
    except ImportError:
        return None
    found = native.joint_products()
    if found is None or found[:2] != (MOST_WEIGHTS, _PARAMS.size):
        return None
    # by way of the library that was loaded with it: opened by its own name it might come a second time
    if getattr(libraries.registry, "ggml_get_type_traits_cpu", None) is None:
        return None
    return JointKernel(libraries, found[2], Panels.find())


def _native() -> Any:
    from ggml_engine.native import _kernels  # noqa: PLC0415  # absent where nothing was built

    return _kernels


def _filled(values: Sequence[int], rest: int) -> list[int]:
    return [*values, *[rest] * (MOST_WEIGHTS - len(values))]


def _address(function: Any) -> int:
    return int(ffi.cast("uintptr_t", function))
