"""Built graphs by shape, the least recently used dropped first.

A graph keeps its working memory, so the cache is bounded twice: in graphs, and in bytes of working memory (the newest
one always stays). Dropped whole when the pool's tensors change.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ggml_engine.executor.best_rows import BestRows
from ggml_engine.executor.inputs import GraphInputs, GraphKey
from ggml_engine.ggml.backends import Graph
from ggml_engine.ggml.ops import Tensor


@dataclass(frozen=True, slots=True)
class ReadyGraph:
    """A graph with its inputs and its result: logits or hidden states, None where no token wants any.

    `rows` are the result's, as long as the graph is there; None where they lie on a device. `best` is what finds the
    candidates of its rows, where the key asks for any.
    """

    graph: Graph
    inputs: GraphInputs
    result: Tensor | None
    rows: npt.NDArray[np.float32] | None  # [outputs, width]
    best: BestRows | None = None


class GraphCache:
    """Graphs that are ready to run, by key."""

    def __init__(self, build: Callable[[GraphKey], ReadyGraph], max_graphs: int, max_bytes: int) -> None:
        self._build = build
        self._max_graphs = max_graphs
        self._max_bytes = max_bytes
        self._ready: OrderedDict[GraphKey, ReadyGraph] = OrderedDict()
        self._newest: tuple[GraphKey, ReadyGraph] | None = None  # the last one of these
        self._n_bytes: dict[GraphKey, int] = {}
        self.working_bytes = 0  # of all graphs held: any thread may read it, while this one frees them
        self.n_built = 0
        self.n_reused = 0

    def __len__(self) -> int:
        return len(self._ready)

    def get(self, key: GraphKey) -> ReadyGraph:
        """The graph of this shape, built if there is none."""
        if self._newest is not None and self._newest[0] == key:
            self.n_reused += 1
            return self._newest[1]
        self._newest = None
        ready = self._find_or_build(key)
        self._newest = key, ready
        return ready

    def _find_or_build(self, key: GraphKey) -> ReadyGraph:
        ready = self._ready.get(key)
        if ready is not None:
            self._ready.move_to_end(key)
            self.n_reused += 1
            return ready
        self._make_room()
        ready = self._build(key)
        self._ready[key] = ready
        self._n_bytes[key] = n_bytes = ready.graph.working_bytes
        self.working_bytes += n_bytes
        self.n_built += 1
        return ready

    def _make_room(self) -> None:
        while self._ready and (len(self._ready) >= self._max_graphs or self.working_bytes > self._max_bytes):
            self._free(next(iter(self._ready)))

    def _free(self, key: GraphKey) -> None:
        self._ready.pop(key).graph.free()
        self.working_bytes -= self._n_bytes.pop(key)

    def drop(self, is_stale: Callable[[GraphKey], bool]) -> None:
        """Drop the graphs of some keys."""
        self._newest = None
        for key in [key for key in self._ready if is_stale(key)]:
            self._free(key)

    def clear(self) -> None:
        """Drop all graphs."""
        self._newest = None
        for key in list(self._ready):
            self._free(key)
