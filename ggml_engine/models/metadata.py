"""Typed access to a file's metadata: what a value may be is said once, and checked where it is read.

Keys and defaults: docs/gguf.md of ggml, and llama.cpp's loader where that page is silent.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ggml_engine.errors import HyperparameterError
from ggml_engine.ggml.gguf import GGUFArray, GGUFFile, GGUFType


class MetadataReader:
    """Typed access to a file's metadata. Keys without a dot-separated prefix get the architecture's."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def key(self, name: str) -> str:
        """The full key of an architecture's own value."""
        return f"{self.architecture}.{name}"

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self.file.metadata

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in [low, high]."""
        key = self.key(name)
        value = self.file.metadata.get(key)
        if value is None:
            if default is None:
                raise HyperparameterError(key, "the file does not have this value")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise HyperparameterError(key, f"an integer is needed, the file has {_shown(value)}")
        if not low <= value <= high:
            raise HyperparameterError(key, f"must be {low} to {high}, is {value}")
        return value

    def number(self, name: str, accept: Callable[[float], bool], rule: str, default: float | None = None) -> float:
        """A number, rounded to f32 as ggml takes it, that is finite and that `accept`s; `rule` says what that asks."""
        key = self.key(name)
        value = self.file.metadata.get(key)
        if value is None:
            if default is None:
                raise HyperparameterError(key, "the file does not have this value")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise HyperparameterError(key, f"a number is needed, the file has {_shown(value)}")
        rounded = to_f32(value)
        if not math.isfinite(rounded) or not accept(rounded):
            raise HyperparameterError(key, f"must be {rule}, is {value}")
        return rounded

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self.file.metadata.get(self.key(name), default)
        if not isinstance(value, str):
            raise HyperparameterError(self.key(name), f"a string is needed, the file has {_shown(value)}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A truth value."""
        value = self.file.metadata.get(self.key(name), default)
        if not isinstance(value, bool):
            raise HyperparameterError(self.key(name), f"true or false is needed, the file has {_shown(value)}")
        return value

    def per_layer(self, name: str, n_layer: int, low: int, high: int, default: tuple[int, ...] | None = None) -> tuple[
        int, ...
    ]:  # fmt: skip
        """One integer per layer: a scalar counts for all, an array must have one for each."""
        value = self.file.metadata.get(self.key(name))
        if not isinstance(value, GGUFArray):
            if value is None and default is not None:
                return default
            return (self.integer(name, low, high),) * n_layer
        numbers = self._array(name, value, n_layer)
        for number in numbers:
            if not low <= number <= high:
                raise HyperparameterError(self.key(name), f"must be {low} to {high} in every layer, has {number}")
        return numbers

    def numbers_per_layer(self, key: str, n_layer: int) -> tuple[float, ...]:
        """One finite f32 per layer of a key that is its full name: as `per_layer`."""
        value = self.file.metadata.get(key)
        if value is None:
            raise HyperparameterError(key, "the file does not have this value")
        if isinstance(value, GGUFArray):
            if value.kind is GGUFType.STRING or len(value) < n_layer:
                shown = "strings" if value.kind is GGUFType.STRING else f"{len(value)} values"
                raise HyperparameterError(key, f"one number for each of {n_layer} layers is needed, there are {shown}")
            numbers = [to_f32(float(number)) for number in value.numpy()[:n_layer]]
        elif isinstance(value, bool) or not isinstance(value, int | float):
            raise HyperparameterError(key, f"a number is needed, the file has {_shown(value)}")
        else:
            numbers = [to_f32(value)] * n_layer
        for number in numbers:
            if not math.isfinite(number):
                raise HyperparameterError(key, f"must be finite in every layer, has {number}")
        return tuple(numbers)

    def flags(self, name: str, n_layer: int) -> tuple[bool, ...] | None:
        """An array of one truth value per layer; None when the value is absent or a scalar."""
        value = self.file.metadata.get(self.key(name))
        if not isinstance(value, GGUFArray):
            return None
        return tuple(number != 0 for number in self._array(name, value, n_layer))

    def _array(self, name: str, value: GGUFArray, n_layer: int) -> tuple[int, ...]:
        key = self.key(name)
        if len(value) < n_layer:
            raise HyperparameterError(key, f"one value for each of {n_layer} layers is needed, there are {len(value)}")
        if value.kind is GGUFType.STRING:
            raise HyperparameterError(key, "integers are needed, the file has strings")
        array = value.numpy()
        if not np.issubdtype(array.dtype, np.integer) and array.dtype != np.bool_:
            raise HyperparameterError(key, f"integers are needed, the file has {array.dtype}")
        return tuple(int(number) for number in array[:n_layer])


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def to_f32(value: float) -> float:
    """The nearest f32: infinite or zero where that has no room."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(value))


def inverse_sqrt_f32(n: int) -> float:
    """1 / sqrt(n) with libllama's two roundings to f32, so that scores come out the same."""
    return float(np.float32(1.0) / np.sqrt(np.float32(n)))


def positive(value: float) -> bool:
    """Whether a number is above zero."""
    return value > 0
