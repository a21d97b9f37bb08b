"""`InputMemory`: where an input of a graph is written to.

Where Python can reach the memory, it is an array over that: nothing is made, copied or called for a step. Elsewhere it
is an array of our own, which is then sent to the device.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import GraphError
from ggml_engine.ggml.backends import has_data, host_view, set_data
from ggml_engine.ggml.library import Libraries
from ggml_engine.ggml.ops import Tensor
from ggml_engine.ggml.tensor_types import TensorType

_TYPES: Final[dict[TensorType, type[np.generic]]] = {
    TensorType.F16: np.float16,
    TensorType.F32: np.float32,
    TensorType.I32: np.int32,
    TensorType.I64: np.int64,
}


class InputMemory:
    """An input whose graph has its memory. `is_read` is false where no node reads it, so that it has none.

    `array` has numpy's shape, ggml's reversed, without leading ones.
    """

    __slots__ = ("_is_host", "_libraries", "_tensor", "array", "is_read")

    def __init__(self, libraries: Libraries, tensor: Tensor) -> None:
        self._libraries = libraries
        self._tensor = tensor
        self.is_read = has_data(tensor)
        view = host_view(libraries, tensor) if self.is_read else None
        self._is_host = view is not None
        kind = _TYPES[tensor.type]
        n = tensor.n_elements if self.is_read else 0
        flat: npt.NDArray[Any] = np.empty(n, kind) if view is None else np.frombuffer(view, kind)
        shape = tuple(reversed(tensor.ne))
        n_ones = next((i for i, size in enumerate(shape[:-1]) if size != 1), 3)
        self.array = flat.reshape(shape[n_ones:]) if self.is_read else flat

    def set(self, values: npt.NDArray[Any]) -> None:
        """Write all of it, in any shape of as many elements; nothing where no node reads it."""
        if not self.is_read:
            return
        if values.size != self.array.size:
            raise GraphError(f"{self._tensor!r} is given {values.size} values")
        self.array[...] = values if values.shape == self.array.shape else values.reshape(self.array.shape)
        self.send()

    def send(self) -> None:
        """Let the graph have what was written to `array`."""
        if not self._is_host:
            set_data(self._libraries, self._tensor, self.array)
