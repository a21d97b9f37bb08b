"""`HostedModel`: a loaded model of a server; `Loader`: how one is measured and loaded.

What is measured is what a load may come to, so that room can be made before. Neither knows which models a server has,
nor when one is loaded: that is `ModelHost`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

from ggml_engine.errors import EngineError

LOAD_ERRORS: Final = (EngineError, OSError, MemoryError)  # that a loader is known to raise

Result = TypeVar("Result")


@dataclass(eq=False)
class HostedModel:
    """A loaded model: `engine` is an `Engine`, `runtime` the `ServingRuntime` over its runner.

    `facts` holds what others derive from it once, by name. `close` ends it and says whether all was freed.
    `fingerprint` names what its answers depend on beside a request, "" where that is not known.
    """

    name: str
    engine: Any
    runtime: Any
    close: Callable[[float], bool]
    fingerprint: str = ""
    created: int = field(default_factory=lambda: int(time.time()))
    facts: dict[str, Any] = field(default_factory=dict)

    def fact(self, name: str, make: Callable[[], Result]) -> Result:
        """`make()`, called once for this model."""
        if name not in self.facts:
            self.facts[name] = make()
        found: Result = self.facts[name]
        return found


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Bytes that a loaded model may come to: its weights, and the K/V of a full cache."""

    weights: int
    kv: int

    @property
    def total(self) -> int:
        """Both."""
        return self.weights + self.kv

    def __str__(self) -> str:
        return f"{gib(self.total)} ({gib(self.weights)} of weights, {gib(self.kv)} of K/V)"


class Loader(Protocol):
    """How a model is measured and loaded; both are called in worker threads."""

    def measure(self, path: str) -> ModelSize:
        """What it may take. Raises EngineError."""

    def load(self, name: str, path: str, cancel: Callable[[], bool]) -> HostedModel:
        """Load it; `cancel` is asked now and then. Raises EngineError."""


def gib(n_bytes: int) -> str:
    """Bytes for a person."""
    return f"{n_bytes / (1 << 30):.2f} GiB"
