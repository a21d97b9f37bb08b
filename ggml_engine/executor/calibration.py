"""Measures the forms of attention in a model's own shape, slice by slice, over scratch K and V.

A run is a graph of attention alone: as many pieces of K and V one after the other as do not fit the caches, since in a
model the weights pass through them between two layers. One piece is run first, and says how many a run has. A form that
would take too long at some size is not run there: its time is reckoned from smaller ones. Where runs of one graph
differ by much, or take far longer than was reckoned, something else computes: nothing comes of the measuring then.
Steps of few tokens are those of sequences that decode side by side, each seeing rows of its own; the others are one
prompt's.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import ExecutorError
from ggml_engine.executor.attention_choice import FORMS, ROWS, TOKENS, Times
from ggml_engine.executor.planned_rows import PlannedReading
from ggml_engine.ggml.backends import Backend, Graph, set_data
from ggml_engine.ggml.library import Libraries
from ggml_engine.ggml.ops import GraphBuilder, Tensor
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.ggml.threads import ThreadCounts
from ggml_engine.models.attention import AttentionForm, KvCells, KvRows, attend
from ggml_engine.models.config import Hyperparameters, KvLayer
from ggml_engine.pool.cell_plan import plan_cells
from ggml_engine.pool.kv_pool import GgmlKvPool, bytes_per_cell
from ggml_engine.pool.kv_types import QUANTISED, KvFormat, VLayout
from ggml_engine.pool.read_plan import Comb, ReadGeometry, Stretch, VisibleCells, plan_read_exactly
from ggml_engine.pool.window import Window

SLICE_S: Final = 0.02  # of work between two looks at whether somebody waits
LONGEST_RUN_S: Final = 0.01  # what is not to be interrupted
_RUN_S: Final = 0.003  # enough to be timed
_TOO_LONG_S: Final = 0.03  # for a run that was reckoned to be short: something else computes
_MOST_TOO_LONG: Final = 5  # a quiet machine has one or two
_SPREAD: Final = 1.3  # between the two shortest runs
_MOST_REPEATED: Final = 300  # runs of all graphs together, until each has two that are so close
_KV_BYTES: Final = 32 << 20  # more than a core's share of any cache
_MOST_UNITS: Final = 128
_N_TIMED: Final = 3
_DECODED: Final = 16  # steps of at most so many tokens are taken for sequences that decode side by side
_TENSORS_PER_UNIT: Final = 24
_PLAIN: Final = {AttentionForm.MATMUL_FOLDED: AttentionForm.MATMUL, AttentionForm.FLASH_FOLDED: AttentionForm.FLASH}
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
    threads: ThreadCounts
    shape: AttentionShape
    n_layer: int
    kv_format: KvFormat  # of any layout
    reading: PlannedReading | None = None  # for the compiled kernel, where it is there

    @property
    def name(self) -> dict[str, Any]:
        """All that the times depend on, as numbers and text."""
        layer = self.shape.layer
        return {
            "heads": [self.shape.n_head, layer.n_head, layer.head_k, layer.head_v, layer.v_in_k, self.n_layer],
            "softcap": self.shape.softcap > 0,
            "kv": [self.kv_format.k_type.name, self.kv_format.v_type.name],
            "cpu": self.backend.device.description,
            "threads": [self.threads.decode, self.threads.prefill],
            "kernel": None if self.reading is None else [self.reading.kernel.name, self.reading.tokens_per_tile],
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
        self._n_too_long = self._n_repeated = 0
        self.n_runs = 0
        self.times: Times | None = None  # when all is done

    def step(self) -> bool:
        """Work for a slice; whether there is more to do.

        Raises NativeError where memory or a computation fails, ExecutorError where something else computes meanwhile.
        What is allocated or built has a slice of its own, and a run begins only where it is reckoned to end in time.
        """
        end = self._clock() + SLICE_S
        for seconds in self._work:  # that the next piece is reckoned to take
            if self._clock() + seconds >= end:
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
        self._free_pool()

    def _measure_all(self) -> Generator[float, None, None]:
        """Everything, a run or an allocation between two yields: of the seconds that the next one may take."""
        kinds = self._subject.kv_format
        for layout, forms in FORMS.items():
            if layout == "columns" and kinds.v_type in QUANTISED:
                continue
            yield from self._make_pool(layout)
            for form in forms:
                if form is AttentionForm.CELLS and self._subject.reading is None:
                    continue
                if form.is_folded and self._subject.shape.n_group == 1:  # the same graph
                    self._times[form] = self._times[_PLAIN[form]]
                    continue
                self._times[form] = []
                for n_tokens in TOKENS:
                    row: list[float] = []
                    self._times[form].append(row)
                    for n_rows in ROWS:
                        yield from self._measure(layout, form, n_tokens, n_rows, row)
            self._free_pool()

    def _free_pool(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.free()

    def _make_pool(self, layout: VLayout) -> Generator[float, None, None]:
        subject = self._subject
        kv_format = KvFormat(subject.kv_format.k_type, subject.kv_format.v_type, layout)
        per_cell = bytes_per_cell([subject.shape.layer], kv_format)
        n_layer = max(1, min(subject.n_layer, -(-_KV_BYTES // (per_cell * ROWS[-1]))))
        layers = [subject.shape.layer] * n_layer
        yield math.inf
        self._pool = GgmlKvPool(subject.libraries, layers, [subject.backend] * n_layer, ROWS[-1], kv_format=kv_format)
        self._pool.grow(ROWS[-1])
        yield math.inf
        some = np.random.default_rng(0).standard_normal(1 << 16, np.float32)
        for tensor in (tensor for kept in self._pool.tensors for tensor in kept if tensor is not None):
            if tensor.type in _RANDOM:  # else zeros
                raw = some.astype(_RANDOM[tensor.type]).view(np.uint8)
                set_data(subject.libraries, tensor, np.resize(raw, tensor.span_bytes))
                yield 0.0
        yield math.inf

    def _measure(
        self, layout: VLayout, form: AttentionForm, n_tokens: int, n_rows: int, row: list[float]
    ) -> Generator[float, None, None]:
        """Append the seconds of one layer of such a step."""
        reckoned = self._reckoned(form, n_tokens, n_rows, row)
        if reckoned > LONGEST_RUN_S:
            row.append(reckoned)
            return
        n_units = 1
        seconds = yield from self._timed(layout, form, n_tokens, n_rows, n_units, reckoned)
        assert self._pool is not None
        n_different = len(self._pool.layers) * (ROWS[-1] // n_rows)
        n_units = max(1, min(_MOST_UNITS, n_different, int(_RUN_S / seconds)))
        if n_units > 1:
            seconds = yield from self._timed(layout, form, n_tokens, n_rows, n_units, seconds * n_units)
        row.append(seconds / n_units)

    def _timed(
        self, layout: VLayout, form: AttentionForm, n_tokens: int, n_rows: int, n_units: int, reckoned: float
    ) -> Generator[float, None, float]:
        """The seconds of a graph of so many pieces."""
        yield math.inf
        self._graph = self._built(layout, form, n_tokens, n_rows, n_units)
        yield math.inf
        spent: list[float] = []
        while len(spent) <= _N_TIMED or spent[1] > _SPREAD * spent[0]:
            self._n_repeated += len(spent) > _N_TIMED
            if self._n_repeated > _MOST_REPEATED:
                raise ExecutorError(f"{self._graph.name} took {spent[0]:.2g} s once and {spent[1]:.2g} s at least else")
            spent = sorted([*spent, self._run(self._graph)])
            yield max(reckoned, spent[0])
        self._graph.free()
        self._graph = None
        return max(spent[0], 1e-9)

    def _run(self, graph: Graph) -> float:
        began = self._clock()
        graph.compute()
        seconds = self._clock() - began
        self.n_runs += 1
        self._n_too_long += seconds > _TOO_LONG_S
        if self._n_too_long > _MOST_TOO_LONG:
            raise ExecutorError(f"{graph.name} took {seconds:.2g} s: something else computes")
        return seconds

    def _reckoned(self, form: AttentionForm, n_tokens: int, n_rows: int, row: list[float]) -> float:
        """What as many tokens over fewer rows say, else what fewer tokens do: 0 where neither was measured.

        A form may have another kernel for more tokens, and has none for more rows.
        """
        if row:
            return row[-1] * n_rows / ROWS[len(row) - 1]
        before = self._times[form][:-1]
        return before[-1][0] * n_tokens / TOKENS[len(before) - 1] if before else 0.0

    def _built(self, layout: VLayout, form: AttentionForm, n_tokens: int, n_rows: int, n_units: int) -> Graph:
        subject, shape, pool = self._subject, self._subject.shape, self._pool
        assert pool is not None
        n_layer = len(pool.layers)
        b = GraphBuilder(subject.libraries, n_units * _TENSORS_PER_UNIT + 64, 2 * n_layer)
        inputs: list[tuple[Tensor, npt.NDArray[Any]]] = []

        def given(name: str, kind: TensorType, values: npt.NDArray[Any]) -> Tensor:
            inputs.append((b.input(name, kind, *values.shape[::-1], is_kept=True), values))
            return inputs[-1][0]

        try:
            random = np.random.default_rng(0).standard_normal((n_tokens, shape.n_head, shape.layer.head_k), np.float32)
            q = given("q", TensorType.F32, random)
            first_rows = [i * n_rows for i in range(-(-n_units // n_layer))]
            seen: dict[int, Tensor] = {}  # the plan of the rows from so many on
            repeated: dict[int, Tensor] = {}
            if form is AttentionForm.CELLS:
                for lo in first_rows:
                    seen[lo] = given(f"plan_{lo}", TensorType.I32, self._plan(n_tokens, n_rows, lo))
            else:
                mask = given("mask", TensorType.F16, _mask(n_tokens, n_rows))
            for unit in range(n_units):
                layer, lo = unit % n_layer, first_rows[unit // n_layer]
                if form is AttentionForm.CELLS:
                    rows: KvRows | KvCells = self._cells(b, pool, layer, n_tokens, seen[lo])
                else:
                    k, v = pool.read(b, layer, [Comb(lo, n_rows)])
                    rows = KvRows(k, v, layout == "columns", mask, form.is_flash, repeated)
                b.expand(attend(b, q, rows, form, 1.0, shape.softcap, f"unit.{unit}"))
            name = f"{form.value} attention of {n_tokens} tokens over {n_rows} rows"
            graph = Graph(b, [subject.backend], name, n_threads=subject.threads.of_step(n_tokens))
        except BaseException:
            b.free()
            raise
        for tensor, values in inputs:
            set_data(subject.libraries, tensor, values)
        return graph

    def _cells(self, b: GraphBuilder, pool: GgmlKvPool, layer: int, n_tokens: int, plan: Tensor) -> KvCells:
        reading = self._reading
        (k,), (v,) = pool.read(b, layer, [Comb(0, ROWS[-1])])
        return KvCells(k, v, plan, reading.kernel, reading.n_splits(n_tokens, k.ne[2]), reading.n_threads)

    def _plan(self, n_tokens: int, n_rows: int, lo: int) -> npt.NDArray[np.int32]:
        """What each token sees of the rows from `lo` on, for the compiled kernel."""
        visible = _visible(n_tokens, n_rows, lo)
        read = plan_read_exactly(Window(), visible, n_tokens, ReadGeometry(1, 1, ROWS[-1]))
        plan = plan_cells(read, self._reading.tokens_per_tile)
        return np.resize(plan.numbers, plan.capacity)  # what lies behind a plan is not looked at

    @property
    def _reading(self) -> PlannedReading:
        assert self._subject.reading is not None
        return self._subject.reading


def _visible(n_tokens: int, n_rows: int, lo: int) -> list[VisibleCells]:
    """Sequences that decode side by side, each over rows of its own, or the end of a prompt.

    A prompt of more tokens than rows is several, over the same rows.
    """
    if n_tokens <= _DECODED:
        n, n_each = 1, n_rows // n_tokens
        starts = [lo + i * n_each for i in range(n_tokens)]
    else:
        n, n_each = min(n_tokens, n_rows), n_rows
        starts = [lo] * (n_tokens // n)
    visible = []
    for i, start in enumerate(starts):
        cells = np.arange(start, start + n_each, dtype=np.int32)
        tokens = slice(i * n, (i + 1) * n)
        visible.append(VisibleCells(tokens, n, n_each - n, 0, cells, [Stretch(start, n_each, 0)]))
    return visible


def _mask(n_tokens: int, n_rows: int) -> npt.NDArray[np.float16]:
    """f16 [n_tokens, n_rows]: what each token sees."""
    columns = np.arange(n_rows)
    mask = np.full((n_tokens, n_rows), -np.inf, np.float16)
    for each in _visible(n_tokens, n_rows, 0):
        last = np.arange(each.n_tokens)[:, None] + each.first_query + each.cells[0]
        mask[each.tokens] = np.where((columns >= each.cells[0]) & (columns <= last), 0.0, -np.inf)
    return mask
