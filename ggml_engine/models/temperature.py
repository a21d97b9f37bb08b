"""Attention temperature: queries grow with the logarithm of their position (Nakanishi 2025, arXiv:2501.19399).

So that scores of long contexts do not flatten out. llama.cpp's src/llama-graph.cpp is the reference of the roundings.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ggml_engine.ggml.ops import Tensor
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.metadata import MetadataReader


@dataclass(frozen=True, slots=True)
class Temperature:
    """Queries at position p are multiplied by `scale` ln(floor((p + offset) / length) + 1) + 1; `scale` 0 is none."""

    scale: float
    length: int
    offset: float = 0.0

    def of_positions(self, positions: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """The factors, rounded to f32 where libllama rounds."""
        shifted = positions.astype(np.float32) + np.float32(self.offset)
        lengths = np.floor(shifted / np.float32(self.length)).astype(np.float64)
        return np.asarray(np.log(lengths + 1.0) * self.scale + 1.0, np.float32)

    def apply(self, g: ModelGraph, q: Tensor, name: str) -> Tensor:
        """The queries [head, heads, tokens] by their factors; q where there is no temperature."""
        if not self.scale:
            return q
        return g.b.mul(q, g.of_positions("inp_attn_temperature", self.of_positions), name)


def read_temperature(reader: MetadataReader, *, length: int | None = None) -> Temperature:
    """What the file says; `length` stands for the file's."""
    scale = reader.number("attention.temperature_scale", lambda value: value >= 0, "0 (none) or above", 0.0)
    if length is None:
        # without a temperature no length is needed
        length = reader.integer("attention.temperature_length", 1, 2**31 - 1, None if scale else 1)
    return Temperature(scale, length)
