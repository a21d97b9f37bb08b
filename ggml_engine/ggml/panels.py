"""Which types of weights are multiplied by panels (native/panel_products.inc), and from how many tokens on.

A panel is as many rows of a weight as a vector has lanes, unpacked once for all tokens of a step. It makes the numbers
of ggml's own product of two rows to the bit, of finite activations; whether it does with the open library is tried out,
once for a type. From two tokens on ggml multiplies Q8_0 and Q5_0 by tiles, which sum in the same order: tests see that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ggml_engine.ggml.tensor_types import TensorType

# enum panel_type
_NUMBERS: Final = {TensorType.Q4_1: 1, TensorType.Q5_1: 2, TensorType.Q8_0: 3, TensorType.Q5_0: 4}

_WITH_LEAST: Final = {_NUMBERS[TensorType.Q4_1], _NUMBERS[TensorType.Q5_1]}

# Unpacking costs what a few tokens' products do; below these ggml's own are as fast or faster. Without VNNI weights of
# Q8_0 are widened to 16 bits: vectors of 256 bits gain nothing over ggml's tiles then.
_FEWEST_TOKENS: Final = {
    "avx2": {TensorType.Q4_1: 2, TensorType.Q5_1: 2, TensorType.Q5_0: 16},
    "avxvnni": {TensorType.Q4_1: 2, TensorType.Q5_1: 2, TensorType.Q5_0: 4, TensorType.Q8_0: 4},
    "avx512bw": {TensorType.Q4_1: 2, TensorType.Q5_1: 2, TensorType.Q5_0: 2, TensorType.Q8_0: 5},
    "avx512": {TensorType.Q4_1: 1, TensorType.Q5_1: 1, TensorType.Q5_0: 2, TensorType.Q8_0: 2},
}


@dataclass(frozen=True, slots=True)
class Panels:
    """Those that suit this processor."""

    name: str
    address: int  # struct panel_kernel
    least_bytes: int  # of 32 activations, as types with a least value are multiplied with
    signed_bytes: int  # as the others are

    @classmethod
    def find(cls) -> Panels | None:
        """None where nothing was built, or nothing for this processor."""
        try:
            from ggml_engine.native import _kernels as native  # noqa: PLC0415  # absent where nothing was built
        except ImportError:
            return None
        found = native.panel_products()
        return None if found is None else cls(*found)

    def number(self, weight: TensorType, n_tokens: int) -> int:
        """Of a type in C, where it is multiplied by panels in a step of so many tokens; else 0."""
        fewest = _FEWEST_TOKENS.get(self.name, {}).get(weight)
        return 0 if fewest is None or n_tokens < fewest else _NUMBERS[weight]

    @staticmethod
    def agree(weight: TensorType, dot: int, pack: int) -> bool:
        """Whether they multiply as ggml's functions at these addresses do: `dot` two rows, `pack` the activations."""
        from ggml_engine.native import _kernels as native  # noqa: PLC0415

        return native.panel_agrees(_NUMBERS[weight], dot, pack)

    @staticmethod
    def spread(number: int) -> int:
        """The form of activations that a type is multiplied with, by one type's number for all of that form."""
        return _NUMBERS[TensorType.Q4_1] if number in _WITH_LEAST else number

    def row_bytes(self, number: int, n_dims: int) -> int:
        """Of a token's activations as the panels of a type read them."""
        return n_dims // 32 * (self.least_bytes if number in _WITH_LEAST else self.signed_bytes)
