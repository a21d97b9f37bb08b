"""The tensor types that a GGUF may store, and how many bytes they take.

An allow-list: the numbers of `enum ggml_type` in ggml 0.25.3 (ggml.h) that its CPU backend can multiply by, and the
plain integer and f64 types, which parse but which no weight may have. Block sizes are those of ggml-common.h. Left out
are the types that ggml removed and those that only computing makes (Q8_1, Q8_K); `describe_refusal` says which.

Knows no file and no library. A type that is not here is never handed to ggml.
"""

from __future__ import annotations

from enum import IntEnum
from math import prod
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence


class TensorType(IntEnum):
    """A storable tensor type; the value is ggml's number for it."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42

    __hash__ = int.__hash__  # Enum's own is a Python function, and types are looked up for every graph node

    @property
    def block_size(self) -> int:
        """Elements per block; a row (ne0) is a whole number of blocks."""
        return _BLOCKS[self][0]

    @property
    def block_bytes(self) -> int:
        """Bytes per block."""
        return _BLOCKS[self][1]

    @property
    def can_multiply(self) -> bool:
        """Whether a weight of this type may be the first operand of ggml's matrix product on the CPU."""
        return self not in _STORAGE_ONLY

    def row_bytes(self, n_elements: int) -> int:
        """Bytes of one row of `n_elements`; ValueError if that is not a whole number of blocks."""
        n_blocks, rest = divmod(n_elements, self.block_size)
        if rest:
            raise ValueError(f"{n_elements} elements are not a whole number of {self.name} blocks of {self.block_size}")
        return n_blocks * self.block_bytes

    def tensor_bytes(self, shape: Sequence[int]) -> int:
        """Bytes of a contiguous tensor of `shape` (ne0 first); ValueError if its rows do not fill whole blocks."""
        return self.row_bytes(shape[0]) * prod(shape[1:])


# type: (elements per block, bytes per block)
_BLOCKS: Final[dict[TensorType, tuple[int, int]]] = {
    TensorType.F32: (1, 4),
    TensorType.F16: (1, 2),
    TensorType.BF16: (1, 2),
    TensorType.F64: (1, 8),
    TensorType.I8: (1, 1),
    TensorType.I16: (1, 2),
    TensorType.I32: (1, 4),
    TensorType.I64: (1, 8),
    # One f16 scale per block, a second f16 (the minimum) in the _1 types, packed elements.
    TensorType.Q1_0: (128, 18),
    TensorType.Q2_0: (64, 18),
    TensorType.Q4_0: (32, 18),
    TensorType.Q4_1: (32, 20),
    TensorType.Q5_0: (32, 22),
    TensorType.Q5_1: (32, 24),
    TensorType.Q8_0: (32, 34),
    TensorType.IQ4_NL: (32, 18),
    # Micro-scaled floats: one-byte scales.
    TensorType.MXFP4: (32, 17),
    TensorType.NVFP4: (64, 36),
    # Super-blocks of 256 elements with scales per sub-block.
    TensorType.Q2_K: (256, 84),
    TensorType.Q3_K: (256, 110),
    TensorType.Q4_K: (256, 144),
    TensorType.Q5_K: (256, 176),
    TensorType.Q6_K: (256, 210),
    TensorType.IQ1_S: (256, 50),
    TensorType.IQ1_M: (256, 56),
    TensorType.IQ2_XXS: (256, 66),
    TensorType.IQ2_XS: (256, 74),
    TensorType.IQ2_S: (256, 82),
    TensorType.IQ3_XXS: (256, 98),
    TensorType.IQ3_S: (256, 110),
    TensorType.IQ4_XS: (256, 136),
    TensorType.TQ1_0: (256, 54),
    TensorType.TQ2_0: (256, 66),
}

_STORAGE_ONLY: Final = frozenset(
    {TensorType.I8, TensorType.I16, TensorType.I32, TensorType.I64, TensorType.F64},
)

_REMOVED: Final = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}
_NEVER_STORED: Final = {9: "Q8_1", 15: "Q8_K"}

TYPES_BY_NUMBER: Final[dict[int, TensorType]] = {int(member): member for member in TensorType}


def describe_refusal(number: int) -> str:
    """Why `number` is not a storable type, as the end of a sentence about it."""
    if number in _REMOVED:
        return f"type {number} ({_REMOVED[number]}) was removed from ggml; the file must be converted again"
    if number in _NEVER_STORED:
        return f"type {number} ({_NEVER_STORED[number]}) exists only while ggml computes, no file may store it"
    return f"type {number} is not one of the {len(TYPES_BY_NUMBER)} known tensor types"
