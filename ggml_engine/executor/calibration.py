"""Measures the forms of attention in a model's own shape, slice by slice, over scratch K and V.

A run is a graph of attention alone: as many pieces of K and V one after the other as do not fit the caches, since in a
model the weights pass through them between two layers. A form that would take longer than a slice at some size is not
run there: its time is reckoned from a smaller size. Steps of few tokens are those of sequences that decode side by
side, each seeing rows of its own; the others are one prompt's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from ggml_engine.executor.attention_choice import FORMS, ROWS, TOKENS, Times
from ggml_engine.ggml.backends import Backend, Graph, set_data
from ggml_engine.ggml.library import Libraries
from ggml_engine.ggml.ops import GraphBuilder
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.models.attention import AttentionForm, KvRows, attend
from ggml_engine.models.config import Hyperparameters, KvLayer
from ggml_engine.pool.kv_pool import GgmlKvPool, bytes_per_cell
from ggml_engine.pool.kv_types import QUANTISED, KvFormat, VLayout
from ggml_engine.pool.read_plan import Comb

SLICE_S: Final = 0.02  # of work between two looks at whether somebody waits
LONGEST_RUN_S: Final = 0.03  # what is not to be interrupted
_KV_BYTES: Final = 32 << 20  # more than a core's share of any cache
_OPERATIONS: Final = 5e7  # of one run, a few milliseconds: enough to be timed
_MOST_UNITS: Final = 128
_N_TIMED: Final = 3
_DECODED: Final = 16  # steps of at most so many tokens are taken for sequences that decode side by side
_TENSORS_PER_UNIT: Final = 24
_RANDOM: Final = {TensorType.F16: np.float16, TensorType.F32: np.float32}


class AttentionShape(NamedTuple):
    """What one layer's attention looks like."""

    n_head: int
    layer: KvLayer
    softcap: float = 0.0

    @classmethod
    def of(cls, hp: Hyperparameters) -> AttentionShape:
        """That of most layers, windows aside: what they see is the step's business."""
        kept = hp.kv_layers()
        shapes = []
        for il in range(hp.n_layer):
            own = kept[hp.kv_index(il)]
            layer = KvLayer(own.n_embd_k, own.n_embd_v, n_head=own.n_head, v_in_k=own.v_in_k)
            shapes.append(cls(hp.n_head[il], layer, hp.attention_softcap))
        return Counter(shapes).most_common(1)[0][0]

    @property
    def n_group(self) -> int:
        """Query heads that share a K/V head."""
        return self.n_head // self.layer.n_head


@dataclass(frozen=True, slots=True)
class Subject:
    """What is measured: a shape in a model of so many layers, with K and V of these types, on a backend of the CPU."""

    libraries: Libraries
    backend: Backend
    n_threads: int
    shape: AttentionShape
    n_layer: int
    kv_format: KvFormat  # of any layout

    @property
    def name(self) -> dict[str, Any]:
        """All that the times depend on, as numbers and text."""
        layer = self.shape.layer
        return {
            "heads": [self.shape.n_head, layer.n_head, layer.head_k, layer.head_v, layer.v_in_k, self.n_layer],
            "softcap": self.shape.softcap > 0,
            "kv": [self.kv_format.k_type.name, self.kv_format.v_type.name],
            "cpu": self.backend.device.description,
            "threads": self.n_threads,
            "ggml": self.libraries.version,
        }


class Calibration:
    """Measuring that can be left at any slice; `free` at the end, also of one that was not finished."""

    def __init__(self, subject: Subject, clock: Callable[[], float] = time.perf_counter) -> None:
        self._subject = subject
        self._clock = clock
        self._pool: GgmlKvPool | None = None
        self._graph: Graph | None = None
        self._times: dict[AttentionForm, list[list[float]]] = {}
        self._work = self._measure_all()
        self.n_runs = 0
        self.times: Times | None = None  # when all is done

    def step(self) -> bool:
        """Work for a slice; whether there is more to do. Raises NativeError where memory or a computation fails."""
        end = self._clock() + SLICE_S
        for _ in self._work:
            if self._clock() >= end:
                return True
        self.times = self._times
        self.free()
        return False

    def free(self) -> None:
        """Give the memory back; idempotent."""
        self._work.close()
        graph, self._graph = self._graph, None
        if graph is not None:
            graph.free()
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.free()

    def _measure_all(self) -> Generator[None, None, None]:
        """Everything, a run or an allocation between two yields."""
        kinds = self._subject.kv_format
        for layout, forms in FORMS.items():
            if layout == "columns" and kinds.v_type in QUANTISED:
                continue
            self._pool = self._made_pool(layout)
            yield
            for form in forms[: 2 if self._subject.shape.n_group > 1 else 1]:
                self._times[form] = []
                for n_tokens in TOKENS:
                    row: list[float] = []
                    self._times[form].append(row)
                    for n_rows in ROWS:
                        yield from self._measure(self._pool, layout, form, n_tokens, n_rows, row)
            if self._subject.shape.n_group == 1:
                self._times[forms[1]] = self._times[forms[0]]
            self._pool.free()
            self._pool = None

    def _made_pool(self, layout: VLayout) -> GgmlKvPool:
        subject = self._subject
        kv_format = KvFormat(subject.kv_format.k_type, subject.kv_format.v_type, layout)
        per_cell = bytes_per_cell([subject.shape.layer], kv_format)
        n_layer = max(1, min(subject.n_layer, -(-_KV_BYTES // (per_cell * ROWS[-1]))))
        layers = [subject.shape.layer] * n_layer
        pool = GgmlKvPool(subject.libraries, layers, [subject.backend] * n_layer, ROWS[-1], kv_format=kv_format)
        pool.grow(ROWS[-1])
        some = np.random.default_rng(0).standard_normal(1 << 16, np.float32)
        for tensor in (tensor for kept in pool.tensors for tensor in kept if tensor is not None):
            if tensor.type in _RANDOM:  # else zeros
                raw = some.astype(_RANDOM[tensor.type]).view(np.uint8)
                set_data(subject.libraries, tensor, np.resize(raw, tensor.span_bytes))
        return pool

    def _measure(
        self, pool: GgmlKvPool, layout: VLayout, form: AttentionForm, n_tokens: int, n_rows: int, row: list[float]
    ) -> Generator[None, None, None]:
        """Append the seconds of one layer of such a step."""
        reckoned = self._reckoned(form, n_tokens, n_rows, row)
        if reckoned > LONGEST_RUN_S:
            row.append(reckoned)
            return
        n_units = self._n_units(pool, n_tokens, n_rows)
        self._graph = self._built(pool, layout, form, n_tokens, n_rows, n_units)
        yield
        spent = []
        for _ in range(1 + _N_TIMED):  # the first run finds its memory
            began = self._clock()
            self._graph.compute()
            self.n_runs += 1
            spent.append(self._clock() - began)
            yield
        self._graph.free()
        self._graph = None
        row.append(max(min(spent), 1e-9) / n_units)

    def _reckoned(self, form: AttentionForm, n_tokens: int, n_rows: int, row: list[float]) -> float:
        """From fewer rows, or fewer tokens over as many: 0 where neither was measured."""
        if row:
            return row[-1] * n_rows / ROWS[len(row) - 1]
        before = self._times[form][:-1]
        n_before = TOKENS[len(before) - 1]
        return before[-1][0] * n_tokens / n_before if before else 0.0

    def _n_units(self, pool: GgmlKvPool, n_tokens: int, n_rows: int) -> int:
        shape = self._subject.shape
        per_unit = 2 * n_tokens * n_rows * shape.n_head * (shape.layer.head_k + shape.layer.head_v)
        n_different = len(pool.layers) * (ROWS[-1] // n_rows)
        return max(1, min(_MOST_UNITS, n_different, int(_OPERATIONS / per_unit)))

    def _built(
        self, pool: GgmlKvPool, layout: VLayout, form: AttentionForm, n_tokens: int, n_rows: int, n_units: int
    ) -> Graph:
        subject, shape = self._subject, self._subject.shape
        b = GraphBuilder(subject.libraries, n_units * _TENSORS_PER_UNIT + 64, 2 * len(pool.layers))
        try:
            q = b.input("q", TensorType.F32, shape.layer.head_k, shape.n_head, n_tokens)
            mask = b.input("mask", TensorType.F16, n_rows, n_tokens)
            repeated: dict[int, Any] = {}
            for unit in range(n_units):
                layer = unit % len(pool.layers)
                lo = unit // len(pool.layers) * n_rows
                k, v = pool.read(b, layer, [Comb(lo, n_rows)])
                rows = KvRows(k, v, layout == "columns", mask, form.is_flash, repeated)
                b.expand(attend(b, q, rows, form, 1.0, shape.softcap, f"unit.{unit}"))
            graph = Graph(b, [subject.backend], f"{form.value} attention of {n_tokens} tokens over {n_rows} rows")
        except BaseException:
            b.free()
            raise
        random = np.random.default_rng(0).standard_normal(q.n_elements, np.float32)
        set_data(subject.libraries, q, random)
        set_data(subject.libraries, mask, _mask(n_tokens, n_rows))
        return graph


def _mask(n_tokens: int, n_rows: int) -> Any:
    """f16 [n_tokens, n_rows]: what each token sees."""
    columns = np.arange(n_rows)
    tokens = np.arange(n_tokens)[:, None]
    if n_tokens <= _DECODED:
        seen = columns * n_tokens // n_rows == tokens
    else:
        seen = columns <= np.maximum(tokens + n_rows - n_tokens, tokens * n_rows // n_tokens)
    return np.where(seen, 0.0, -np.inf).astype(np.float16)
