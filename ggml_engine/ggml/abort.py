"""A flag that lets a running graph stop, asked by native code.

ggml's CPU backend asks a callback after every node. A callback in Python would take the interpreter's lock each time,
and wait for it while another thread runs Python: so the callback is a function of ggml's own, over memory of ours.
"""

from __future__ import annotations

from typing import Any

from ggml_engine.ggml.library import Libraries, ffi

__all__ = ["AbortFlag"]


class AbortFlag:
    """Down at first. `set` and `clear` may come from any thread, while a graph runs, too.

    `callback` and `data` are what a backend is given; who gives them keeps the flag alive.
    """

    # `ggml_is_empty` fits the callback, `bool (*)(void *)`: it takes a pointer, reads nothing but the four dimensions
    # of the tensor there, returns a real bool (C's strlen over a string would return a size_t), and lies in the library
    # that is open anyway, on every platform. So the flag is a tensor without data: of one element when it is down, of
    # none when it is up. That is one aligned store of 8 bytes, of which all but the first are zero either way.

    def __init__(self, libraries: Libraries) -> None:
        self._tensor = ffi.new("struct ggml_tensor *", {"ne": [1, 1, 1, 1]})
        self.callback: Any = ffi.cast("ggml_abort_callback", ffi.addressof(libraries.base, "ggml_is_empty"))
        self.data: Any = ffi.cast("void *", self._tensor)

    def set(self) -> None:
        """Let the graph that runs end after its node, and graphs that begin after their first."""
        self._tensor.ne[0] = 0

    def clear(self) -> None:
        """Let graphs run to their end again."""
        self._tensor.ne[0] = 1

    @property
    def is_set(self) -> bool:
        """Whether it is up."""
        return bool(self._tensor.ne[0] == 0)
