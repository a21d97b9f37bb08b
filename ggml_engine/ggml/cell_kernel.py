"""The compiled attention over cells, where the package was built with one that suits this processor.

Knows the C side's parameters (native/cell_attention.h), not what they are used for. The sources are in
`ggml_engine/native`; without them built, `find_kernel` finds nothing, and ggml's own operations do the work.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from ggml_engine.ggml.library import Libraries, ffi
from ggml_engine.ggml.tensor_types import TensorType

_PARAMS = struct.Struct("@2f7i2P2i")  # struct cell_attention_params
_STORED = {TensorType.F16: 1, TensorType.F32: 2}  # enum cell_rows; other types are converted

# Query heads of all tokens of a tile, at which converting a block of K costs little beside its products, and what
# belongs to the queries still fits the second cache. Whole registers' worth for every kind of vectors.
_QUERIES_PER_TILE = 48


@dataclass(frozen=True, slots=True)
class CellKernel:
    """Two operations for `ggml_custom_4d`: `attend`, and `merge` for what was attended in parts."""

    name: str
    n_lanes: int  # heads are whole multiples of it
    attend: Any
    merge: Any
    scratch_floats: Callable[[int, int, int, int], int]  # of threads, queries at a time, n_embd_head of K and of V

    def takes(self, n_embd_head: int) -> bool:
        """Whether heads of so many elements can be computed."""
        return n_embd_head > 0 and n_embd_head % self.n_lanes == 0

    @staticmethod
    def tokens_per_tile(n_group: int) -> int:
        """How many tokens are best computed together, where so many query heads share a K/V head."""
        return max(1, _QUERIES_PER_TILE // n_group)


@lru_cache(maxsize=1)
def find_kernel() -> CellKernel | None:
    """The kernel for this processor, or None."""
    try:
        from ggml_engine.native import _kernels as native  # noqa: PLC0415  # absent where nothing was built
    except ImportError:
        return None
    sizes = (native.ATTENTION_PARAMS_BYTES, native.TENSOR_BYTES)
    found = native.cell_attention()
    if found is None or sizes != (_PARAMS.size, ffi.sizeof("struct ggml_tensor")):
        return None
    name, n_lanes, attend, merge = found
    attend, merge = (ffi.cast("ggml_custom_op_t", each) for each in (attend, merge))
    return CellKernel(name, n_lanes, attend, merge, native.scratch_floats)


def kernel_params(
    libraries: Libraries,
    k_type: TensorType,
    v_type: TensorType,
    n_head_kv: int,
    scale: float,
    softcap: float,
    n_splits: int,
    n_threads: int,
    n_queries: int,
    *,
    merges: bool = False,
) -> Any:
    """The constants of an operation, as memory that must live as long as its graph.

    `merges`: the parts are added up in the same operation. At most `n_threads` work at once, each on at most
    `n_queries`: tokens times the heads that share a K/V head.
    """
    to_float = [_converter(libraries, each) for each in (k_type, v_type)]
    packed = _PARAMS.pack(
        scale, softcap, n_head_kv, n_splits, _STORED.get(k_type, 0), _STORED.get(v_type, 0), n_threads, n_queries,
        merges, *to_float, 0, 0,
    )  # fmt: skip
    memory = ffi.new("char[]", _PARAMS.size)
    ffi.memmove(memory, packed, _PARAMS.size)
    return memory


def _converter(libraries: Libraries, tensor_type: TensorType) -> int:
    traits = libraries.base.ggml_get_type_traits(int(tensor_type))
    return int(ffi.cast("uintptr_t", traits.to_float))
