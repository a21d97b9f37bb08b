"""What K and V may be stored as, and what goes together.

Owns the rules of type, layout and attention form, and the Hadamard rotation that evens out heads before they are
quantised (as libllama does: K in the largest power of two that divides a head, V in pieces of 64).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import OptionError
from ggml_engine.ggml.tensor_types import TensorType

VLayout = Literal["rows", "columns"]

KV_TYPES = {
    "f32": TensorType.F32,
    "f16": TensorType.F16,
    "bf16": TensorType.BF16,
    "q8_0": TensorType.Q8_0,
    "q4_0": TensorType.Q4_0,
}
QUANTISED = frozenset({TensorType.Q8_0, TensorType.Q4_0})
_ROTATED_PIECE = 64


def kv_type(name: str) -> TensorType:
    """The K/V type of that name. Raises OptionError listing the known ones."""
    if name not in KV_TYPES:
        raise OptionError(f"a K/V type is one of {', '.join(KV_TYPES)}, asked for {name!r}")
    return KV_TYPES[name]


@dataclass(frozen=True, slots=True)
class KvFormat:
    """How cells are stored. Raises OptionError for what cannot be."""

    k_type: TensorType = TensorType.F16
    v_type: TensorType = TensorType.F16
    v_layout: VLayout = "rows"

    def __post_init__(self) -> None:
        if self.v_layout not in {"rows", "columns"}:
            raise OptionError(f"V is laid out in 'rows' or 'columns', asked for {self.v_layout!r}")
        for what, tensor_type in (("K", self.k_type), ("V", self.v_type)):
            if tensor_type not in KV_TYPES.values():
                raise OptionError(f"{what} can be {', '.join(KV_TYPES)}, asked for {tensor_type.name.lower()}")
        if self.v_layout == "columns" and self.v_type in QUANTISED:
            raise OptionError(
                f"V in columns cannot be {self.v_type.name.lower()}: a block of a quantised type holds elements of one "
                f"cell; use v_layout 'rows' with flash attention"
            )

    def check_head(self, what: str, tensor_type: TensorType, n_head_elements: int) -> None:
        """Refuse heads that do not fill whole blocks."""
        if n_head_elements % tensor_type.block_size:
            raise OptionError(
                f"{what} cannot be {tensor_type.name.lower()}: heads of {n_head_elements} elements do not fill blocks "
                f"of {tensor_type.block_size}"
            )

    def check_matmul(self) -> None:
        """Refuse the matmul form where it cannot read V."""
        if self.v_type in QUANTISED:
            raise OptionError(f"the matmul form cannot read V as {self.v_type.name.lower()}: use attention 'flash'")

    def k_rotation(self, n_head_elements: int) -> int | None:
        """Size of the rotation of K and of queries; None for none."""
        if self.k_type not in QUANTISED or n_head_elements % _ROTATED_PIECE:
            return None
        return n_head_elements & -n_head_elements  # the largest power of two that divides it

    def v_rotation(self, n_head_elements: int) -> int | None:
        """Size of the rotation of V; None for none."""
        return _ROTATED_PIECE if self.v_type in QUANTISED and n_head_elements % _ROTATED_PIECE == 0 else None


@cache  # a step with quantised K/V fills it in again, and there are a few sizes at most
def hadamard(n: int) -> npt.NDArray[np.float32]:
    """The orthonormal Hadamard matrix [n, n] in Sylvester's order, read-only; n is a power of two."""
    matrix: npt.NDArray[np.float32] = np.full((1, 1), 1.0, np.float32)
    while matrix.shape[0] < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    scaled: npt.NDArray[np.float32] = matrix * (np.float32(1.0) / np.sqrt(np.float32(n)))
    scaled.setflags(write=False)
    return scaled


def decode(raw: npt.NDArray[np.uint8], tensor_type: TensorType) -> npt.NDArray[np.float32]:
    """Stored bytes of whole rows as f32."""
    if tensor_type == TensorType.F32:
        return raw.view(np.float32)
    if tensor_type == TensorType.F16:
        return raw.view(np.float16).astype(np.float32)
    if tensor_type == TensorType.BF16:
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    return _dequantise(raw.reshape(-1, tensor_type.block_bytes), tensor_type)


def _dequantise(blocks: npt.NDArray[np.uint8], tensor_type: TensorType) -> npt.NDArray[np.float32]:
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    packed: npt.NDArray[Any] = blocks[:, 2:]
    if tensor_type == TensorType.Q8_0:
        return (packed.copy().view(np.int8).astype(np.float32) * scale).ravel()
    nibbles = np.concatenate((packed & 15, packed >> 4), axis=1).astype(np.int8) - 8  # q4_0: low halves first
    return (nibbles.astype(np.float32) * scale).ravel()
