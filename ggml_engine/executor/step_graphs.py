"""`StepGraphs`: builds the graphs of an executor's steps, each ready to run.

A graph is the model's own over the pool's rows, with inputs for what changes from step to step, and outputs for what
is read of it.
"""

from __future__ import annotations

import numpy as np

from ggml_engine.executor.best_rows import MAX_NODES, BestRows
from ggml_engine.executor.graph_cache import ReadyGraph
from ggml_engine.executor.inputs import GraphInputs, GraphKey
from ggml_engine.executor.planned_rows import PlannedReading
from ggml_engine.ggml.abort import AbortFlag
from ggml_engine.ggml.backends import Graph, host_view
from ggml_engine.ggml.ops import GraphBuilder
from ggml_engine.ggml.ops.experts import n_tensors_apart
from ggml_engine.models.adapted import max_nodes
from ggml_engine.models.attention import AttentionForm
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.joint import JointProducts
from ggml_engine.models.model import Model
from ggml_engine.pool.registry import GgmlCache

_NODES_PER_LAYER = 72  # an upper bound for every architecture here; a graph that needs more is refused, not cut
_NODES_OF_EXPERTS = 64  # router, products and shared experts
_NODES_PER_EXPERT = 2  # of those that a token passes
_PRODUCTS_OF_EXPERTS = 3  # gate, up and down
_NODES_PER_PIECE = 8  # views, products and sums for every span that is read
_NODES_BESIDE = 64


class StepGraphs:
    """Graphs of `model` over `cache`. `join` as in `KvRows`; `reading` is how steps are cut for the compiled kernel.

    Every graph is stopped by `abort`. With `is_deterministic` rows are computed apart where kernels would mix them.
    """

    def __init__(
        self,
        model: Model,
        cache: GgmlCache,
        abort: AbortFlag,
        *,
        join: bool,
        reading: PlannedReading | None,
        is_deterministic: bool,
    ) -> None:
        self._model = model
        self._cache = cache
        self._abort = abort
        self._join = join
        self._reading = reading
        self._is_deterministic = is_deterministic

    def build(self, key: GraphKey) -> ReadyGraph:
        """The graph of this shape. Raises GraphError and NativeError where it cannot be had."""
        model, hp = self._model, self._model.hp
        n_pieces = sum(len(spans) for spans in key.reads)
        n_per_layer = _NODES_PER_LAYER + _NODES_PER_PIECE * n_pieces
        if hp.experts is not None:
            n_per_layer += _NODES_OF_EXPERTS + _NODES_PER_EXPERT * hp.experts.n_used
            if self._is_deterministic:
                n_per_layer += _PRODUCTS_OF_EXPERTS * n_tensors_apart(key.n_tokens)
        n_apart = n_tensors_apart(key.n_tokens) if self._is_deterministic else 0
        max_tensors = hp.n_layer * n_per_layer + _NODES_BESIDE + max_nodes(key.adapters, n_apart) + MAX_NODES
        weights = model.weights_for(key.n_tokens)
        n_outside = len(weights) + 2 * hp.n_layer + sum(2 * len(each.pairs) for each in key.adapters)
        b = GraphBuilder(model.libraries, max_tensors, n_outside)
        try:
            reading = self._reading if key.form is AttentionForm.CELLS else None
            inputs = GraphInputs(b, key, self._cache, hp.n_embd, join=self._join, reading=reading)
            g = ModelGraph(
                b,
                hp,
                weights,
                inputs.tokens,
                inputs.positions,
                inputs.of_positions,
                inputs.outputs,
                key.n_outputs,
                self._cache.capacity,
                inputs,
                key.form,
                inputs.prepared,
                rows_apart=self._is_deterministic,
                ends_at_norm=key.gives_hidden,
                adapted=inputs.adapted,
                joint=self._joint_products(b, key.n_tokens),
            )
            result = model.architecture.graph(g)
            if result is not None:
                b.output(result, "result_hidden" if key.gives_hidden else "result_logits")
            best = BestRows(b, result, key.best) if result is not None and key.best is not None else None
            name = f"{hp.architecture} graph of {key.n_tokens} tokens over rows {key.reads}"
            graph = Graph(b, model.backends, name, self._abort, model.threads.of_step(key.n_tokens))
            # asked once for a graph: each native call gives Python's lock away
            rows = None
            if result is not None and (view := host_view(model.libraries, result)) is not None:
                rows = np.frombuffer(view, np.float32).reshape(-1, result.ne[0])
            return ReadyGraph(graph, inputs, result, rows, best)
        except BaseException:
            b.free()
            raise

    def _joint_products(self, b: GraphBuilder, n_tokens: int) -> JointProducts | None:
        if any(backend.device.kind != "cpu" for backend in self._model.backends):
            return None
        return JointProducts.find(b, n_tokens, self._model.threads.of_step(n_tokens))
