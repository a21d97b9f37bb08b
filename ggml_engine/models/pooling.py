"""What is made of the hidden states of a text, and what a file wants: its key `ARCHITECTURE.pooling_type`."""

from __future__ import annotations

from typing import Any, Final, Literal, TypeAlias, get_args

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import HyperparameterError, OptionError, UnsupportedArchitectureError
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.models.metadata import MetadataReader

Pooling: TypeAlias = Literal["none", "mean", "cls", "last"]

POOLINGS: Final[tuple[Pooling, ...]] = get_args(Pooling)  # in the order of the key's numbers
Rows = npt.NDArray[np.float32]
_RANK: Final = 4  # a classifier's score, which is no embedding
_UNSPECIFIED: Final = -1


def choose_pooling(file: GGUFFile, wanted: str) -> Pooling:
    """`wanted`, or for "auto" what the file says, and the mean where it says nothing.

    Raises OptionError for another word, HyperparameterError for a number that means none, and
    UnsupportedArchitectureError for a file that ranks.
    """
    for pooling in POOLINGS:
        if wanted == pooling:
            return pooling
    if wanted != "auto":
        raise OptionError(f"pooling is auto, {', '.join(POOLINGS[:-1])} or {POOLINGS[-1]}, asked for {wanted!r}")
    architecture = file.metadata.get("general.architecture")
    reader = MetadataReader(file, architecture if isinstance(architecture, str) else "")
    number = reader.integer("pooling_type", _UNSPECIFIED, (1 << 32) - 1, _UNSPECIFIED)
    if number in (_UNSPECIFIED, (1 << 32) - 1):  # unspecified, as the u32 that such keys are stored in
        return "mean"
    if number == _RANK:
        raise UnsupportedArchitectureError(
            f"{file.path} holds a model that ranks (pooling_type {_RANK}): say which pooling of hidden states to take"
        )
    if not 0 <= number < len(POOLINGS):
        raise HyperparameterError(reader.key("pooling_type"), f"must be 0 to {_RANK}, is {number}")
    return POOLINGS[number]


def pool(rows: Rows, pooling: Pooling) -> Rows:
    """One embedding f32 [1, width] of the hidden states f32 [tokens, width] of a text; without pooling all of them.

    An average is taken in f64.
    """
    if pooling == "mean":
        mean: npt.NDArray[np.float64] = rows.mean(axis=0, dtype=np.float64, keepdims=True)
        return mean.astype(np.float32)
    return {"none": rows, "cls": rows[:1], "last": rows[-1:]}[pooling]


def unit_rows(rows: npt.NDArray[np.floating[Any]]) -> Rows:
    """Rows of length 1, f32; those of zeros stay."""
    wide = rows.astype(np.float64)
    length = np.sqrt(np.square(wide).sum(axis=1, keepdims=True))
    unit: npt.NDArray[np.float64] = np.divide(wide, length, out=np.zeros_like(wide), where=length > 0)
    return unit.astype(np.float32)
