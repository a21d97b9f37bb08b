"""The compiled attention alone, against numpy in float64: the sum that a plan asks for, and not a row more."""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from compilers import has_compiler
from engines import executor_over, feed, loaded
from graphs import Bench, close, random, stored
from graphs import loaded as values_of
from tiny_models import write_llama
from visible import visible_cells

from ggml_engine import native
from ggml_engine.errors import GraphError, OptionError
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.executor.options import ExecutorOptions
from ggml_engine.ggml.cell_kernel import CellKernel, find_kernel
from ggml_engine.ggml.joint_kernel import find_joint_kernel
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.models.attention import AttentionForm, KvCells, attend
from ggml_engine.pool.cell_plan import plan_cells
from ggml_engine.pool.kv_types import KV_TYPES
from ggml_engine.pool.read_plan import ReadGeometry, plan_read_exactly
from ggml_engine.pool.window import Window

Array = npt.NDArray[Any]
N_ROWS = 512  # of the pool
# f32 sums in another order than numpy's in float64, against the largest expected value; measured: 2e-6.
BOUND = 1e-5
EVERYTHING = Window()
ALL_ONES = 0xFF  # NaN in every type that K and V can have, as an element or as a block's scale


@pytest.fixture(scope="module")
def kernel() -> CellKernel:
    found = find_kernel()
    assert found is not None, "python setup.py build_ext --inplace"
    return found


@dataclass(frozen=True)
class Held:
    """The cells of all positions of a sequence, whose last `n_tokens` are the step's."""

    cells: Sequence[int]
    n_tokens: int


def cells_of(*stretches: tuple[int, int]) -> list[int]:
    """[lo, hi) after [lo, hi)."""
    return [cell for lo, hi in stretches for cell in range(lo, hi)]


ONE = (Held(cells_of((3, 200)), 1),)
SHARED = (  # three sequences on one prefix, one of them with a longer part of it, and one beside them
    Held(cells_of((64, 164), (320, 325)), 1),
    Held(cells_of((64, 164), (400, 470)), 2),
    Held(cells_of((64, 140), (201, 215)), 3),
    Held(cells_of((7, 8)), 1),
)


@dataclass
class Case:
    """A layer's step over a pool in which only what is seen holds numbers."""

    sequences: tuple[Held, ...] = ONE
    head: int = 64
    head_v: int = 64
    n_head: int = 6
    n_head_kv: int = 2
    window: Window = EVERYTHING
    k_type: TensorType = TensorType.F16
    v_type: TensorType = TensorType.F16
    softcap: float = 0.0
    has_sinks: bool = False
    n_splits: int = 1
    n_threads: int = 1
    per_tile: int = 8
    is_interleaved: bool = False
    scale: float = 0.0

    def __post_init__(self) -> None:
        self.scale = self.scale or 1 / math.sqrt(self.head)
        n_tokens = sum(each.n_tokens for each in self.sequences)
        order = np.arange(n_tokens)
        if self.is_interleaved:
            order = np.random.default_rng(1).permutation(n_tokens)
        self.tokens: list[npt.NDArray[np.int64]] = []  # of each sequence, ascending
        first = 0
        for each in self.sequences:
            self.tokens.append(np.sort(order[first : first + each.n_tokens]).astype(np.int64))
            first += each.n_tokens
        self.q = random(n_tokens, self.n_head, self.head, seed=1)
        self.sinks = random(self.n_head, seed=4) + 2 if self.has_sinks else None
        seen = sorted({cell for cells in self.seen().values() for cell in cells})
        self.k, self.k_raw = self._stored(random(N_ROWS, self.n_head_kv, self.head, seed=2), self.k_type, seen)
        self.v, self.v_raw = self._stored(random(N_ROWS, self.n_head_kv, self.head_v, seed=3), self.v_type, seen)

    @staticmethod
    def _stored(values: Array, kind: TensorType, seen: list[int]) -> tuple[Array, Array]:
        """What was stored, as numbers and as bytes, in which every row that nobody sees is not a number."""
        raw = stored(values, kind)
        numbers = values_of(raw.copy(), kind, values.shape).astype(np.float64)
        raw = raw.view(np.uint8).reshape(N_ROWS, -1).copy()
        raw[np.setdiff1d(np.arange(N_ROWS), seen)] = ALL_ONES
        assert not np.isfinite(values_of(raw[-1:].copy(), kind, (1, *values.shape[1:]))).any()
        return numbers, raw

    def keep_k(self, k: Array) -> None:
        """Other keys, f32 [rows, heads, head]."""
        seen = sorted({cell for cells in self.seen().values() for cell in cells})
        self.k, self.k_raw = self._stored(k, self.k_type, seen)

    def seen(self) -> dict[int, list[int]]:
        """By token the cells that it sees."""
        found = {}
        for each, tokens in zip(self.sequences, self.tokens, strict=True):
            for i, token in enumerate(tokens.tolist()):
                position = len(each.cells) - each.n_tokens + i
                found[token] = list(each.cells[max(0, self.window.first_seen(position)) : position + 1])
        return found

    def plan(self) -> Array:
        visible = []
        for each, tokens in zip(self.sequences, self.tokens, strict=True):
            first_query = len(each.cells) - each.n_tokens
            first_seen = max(0, self.window.first_seen(first_query))
            cells = np.array(each.cells[first_seen:], np.int32)
            visible.append(visible_cells(tokens, each.n_tokens, first_query, first_seen, cells))
        n_tokens = self.q.shape[0]
        read = plan_read_exactly(self.window, visible, n_tokens, ReadGeometry(1, 1, N_ROWS))
        plan = plan_cells(read, self.per_tile)
        return np.concatenate((plan.numbers, np.full(plan.capacity - plan.numbers.size, -1, np.int32)))

    def expected(self) -> Array:
        """[tokens, heads, head_v]."""
        out = np.empty((*self.q.shape[:2], self.head_v))
        n_group = self.n_head // self.n_head_kv
        for token, cells in self.seen().items():
            for head in range(self.n_head):
                k, v = (x[cells, head // n_group] for x in (self.k, self.v))
                scores = k @ self.q[token, head].astype(np.float64) * self.scale
                if self.softcap:
                    scores = self.softcap * np.tanh(scores / self.softcap)
                sink = -np.inf if self.sinks is None else float(self.sinks[head])
                top = max(scores.max(), sink)
                powers = np.exp(scores - top)
                out[token, head] = powers / (powers.sum() + np.exp(sink - top)) @ v
        return out

    def found(self, kernel: CellKernel) -> Array:
        bench = Bench(max_tensors=32, n_threads=self.n_threads)
        parts = []
        for raw, kind, head in ((self.k_raw, self.k_type, self.head), (self.v_raw, self.v_type, self.head_v)):
            # as in a pool: a row has all heads
            whole = bench.raw_input(raw, kind, head * self.n_head_kv, N_ROWS)
            strides = (whole.nb[1], kind.row_bytes(head))
            parts.append(bench.builder.view(whole, (head, N_ROWS, self.n_head_kv), strides, 0))
        result = bench.builder.cell_attention(
            kernel,
            bench.input(self.q),
            *parts,
            bench.input(self.plan(), TensorType.I32),
            self.scale,
            softcap=self.softcap,
            sinks=None if self.sinks is None else bench.input(self.sinks),
            n_splits=self.n_splits,
        )
        return bench.run(result).reshape(self.q.shape[0], self.n_head, self.head_v)

    def check(self, kernel: CellKernel, bound: float = BOUND) -> None:
        close(self.found(kernel), self.expected(), bound)


STEPS: dict[str, tuple[Held, ...]] = {
    "one token": ONE,
    "its first token": (Held([5], 1),),
    "rows in pieces": (Held(cells_of((60, 124), (0, 1), (300, 363), (128, 129), (130, 260)), 1),),
    "several tokens": (Held(cells_of((10, 141)), 5),),
    "a whole prompt": (Held(cells_of((10, 80)), 70),),
    "the end of a prompt in pieces": (Held(cells_of((10, 100), (400, 433), (200, 240)), 70),),
    "sequences on one prefix": SHARED,
}


@pytest.mark.parametrize("has_sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("n_splits", [1, 3, 8])
@pytest.mark.parametrize("window", [Window(), Window(17), Window(40, True)], ids=str)
@pytest.mark.parametrize("name", STEPS)
def test_it_is_the_definition_whoever_sees_what(
    kernel: CellKernel, name: str, window: Window, n_splits: int, has_sinks: bool
) -> None:
    for is_interleaved in (False, True):
        Case(STEPS[name], window=window, n_splits=n_splits, has_sinks=has_sinks, is_interleaved=is_interleaved).check(
            kernel
        )


@pytest.mark.parametrize("step", ["several tokens", "sequences on one prefix"])
@pytest.mark.parametrize("n_splits", range(1, 9))
def test_parts_of_the_rows_are_merged_to_the_same_sum(kernel: CellKernel, n_splits: int, step: str) -> None:
    whole = Case(STEPS[step], has_sinks=True)
    parts = Case(STEPS[step], has_sinks=True, n_splits=n_splits)
    close(parts.found(kernel), whole.found(kernel), 1e-6)
    parts.check(kernel)


@pytest.mark.parametrize("head_v", [8, 64, 104, 512])
@pytest.mark.parametrize("head", [8, 16, 24, 40, 64, 80, 96, 128, 192, 256, 576])
def test_heads_of_any_multiple_of_a_vector_are_taken(kernel: CellKernel, head: int, head_v: int) -> None:
    for step in ("one token", "several tokens"):
        Case(STEPS[step], head=head, head_v=head_v).check(kernel)


@pytest.mark.parametrize("n_tokens", [1, 2, 3, 5, 6, 7, 8, 31, 33, 64, 70])
@pytest.mark.parametrize("n_group", [1, 2, 3, 8, 71])
def test_any_number_of_queries_shares_a_row(kernel: CellKernel, n_group: int, n_tokens: int) -> None:
    per_tile = max(1, 32 // n_group)
    step = (Held(cells_of((130, 260), (5, 30)), n_tokens),)
    Case(step, n_head=2 * n_group, n_head_kv=2, per_tile=per_tile, head=16, head_v=32).check(kernel)


@pytest.mark.parametrize("v_type", KV_TYPES)
@pytest.mark.parametrize("k_type", KV_TYPES)
def test_rows_of_every_type_of_the_pool_are_read(kernel: CellKernel, k_type: str, v_type: str) -> None:
    types = {"k_type": KV_TYPES[k_type], "v_type": KV_TYPES[v_type]}
    for step in ("one token", "sequences on one prefix", "the end of a prompt in pieces"):
        Case(STEPS[step], **types, n_splits=2).check(kernel)


@pytest.mark.parametrize("n_threads", [1, 2, 5])
@pytest.mark.parametrize("n_splits", [1, 4])
def test_threads_change_no_bit(kernel: CellKernel, n_threads: int, n_splits: int) -> None:
    alone = Case(SHARED, n_splits=n_splits).found(kernel)
    found = Case(SHARED, n_splits=n_splits, n_threads=n_threads).found(kernel)
    assert found.tobytes() == alone.tobytes()


@pytest.mark.parametrize("softcap", [0.5, 2.0, 50.0])
@pytest.mark.parametrize("step", ["one token", "several tokens", "sequences on one prefix"])
def test_scores_are_capped(kernel: CellKernel, step: str, softcap: float) -> None:
    for scale in (0.0, 30.0):  # also far beyond the cap
        Case(STEPS[step], softcap=softcap, scale=scale, window=Window(50), n_splits=2).check(kernel, 5 * BOUND)


@pytest.mark.parametrize("softcap", [0.0, 30.0])
@pytest.mark.parametrize("step", ["one token", "several tokens"])
def test_scores_of_ten_thousand_overflow_nothing(kernel: CellKernel, step: str, softcap: float) -> None:
    """Numbers that f32 holds exactly, so that only the exponentials are rounded."""
    for signs in ((-1,), (1,), (-1, 1), (0, -1)):
        case = Case(STEPS[step], softcap=softcap, scale=1.0, n_splits=3, has_sinks=softcap > 0)
        case.q[:] = 0
        case.q[:, :, 0] = 10_000
        case.q[:, :, 1] = 1
        k = np.zeros((N_ROWS, case.n_head_kv, case.head), np.float32)
        k[:, :, 0] = np.resize(signs, N_ROWS)[:, None]
        k[:, :, 1] = np.random.default_rng(3).integers(-8, 8, (N_ROWS, case.n_head_kv)) / 4
        case.keep_k(k)
        found = case.found(kernel)
        assert np.isfinite(found).all()
        close(found, case.expected(), 5 * BOUND)


def test_a_sink_above_every_score_takes_the_weight(kernel: CellKernel) -> None:
    for n_splits in (1, 4):
        case = Case(SHARED, has_sinks=True, n_splits=n_splits)
        assert case.sinks is not None
        case.sinks[::2] = 10_000
        case.sinks[1::2] = -10_000
        found = case.found(kernel)
        assert not found[:, ::2].any()
        close(found, case.expected(), BOUND)


@pytest.mark.parametrize("kind", KV_TYPES.values(), ids=KV_TYPES)
def test_few_queries_and_many_give_the_same(kernel: CellKernel, kind: TensorType) -> None:
    """Fewer than six are multiplied row by row, more lie across a vector."""
    step = (Held(cells_of((9, 150), (300, 350)), 4),)
    few = Case(step, per_tile=1, k_type=kind, v_type=kind)  # three queries a tile and head
    many = Case(step, per_tile=4, k_type=kind, v_type=kind)  # twelve
    close(few.found(kernel), many.found(kernel), 2e-6)


def test_another_sequence_of_the_tile_may_hold_what_is_not_a_number(kernel: CellKernel) -> None:
    """The rows that are not shared are given to no query of another sequence: their weight is not 0, they have none."""
    for own in (cells_of((320, 325)), cells_of((400, 470))):
        case = Case(SHARED)
        case.k_raw[own] = case.v_raw[own] = ALL_ONES
        expected, found = case.expected(), case.found(kernel)
        spoiled = [token for token, cells in case.seen().items() if set(cells) & set(own)]
        clean = np.setdiff1d(np.arange(case.q.shape[0]), spoiled)
        assert 0 < clean.size < case.q.shape[0]
        close(found[clean], expected[clean], BOUND)
        assert np.isnan(found[spoiled]).all()


def test_what_cannot_be_computed_is_refused(kernel: CellKernel) -> None:
    def refused(match: str, head: int = 64, **changed: Any) -> None:
        bench = Bench()
        given: dict[str, Any] = {
            "q": bench.zeros(TensorType.F32, head, 4, 3),
            "k": bench.zeros(TensorType.F16, head, 10, 2),
            "v": bench.zeros(TensorType.F16, head, 10, 2),
            "plan": bench.zeros(TensorType.I32, 256),
            "scale": 1.0,
        }
        given.update({name: make(bench) if callable(make) else make for name, make in changed.items()})
        with pytest.raises(GraphError, match=match):
            bench.builder.cell_attention(kernel, **given)

    refused("multiples of 8", head=12)
    refused("f32", q=lambda bench: bench.zeros(TensorType.F16, 64, 4, 3))
    refused("do not fit", k=lambda bench: bench.zeros(TensorType.F16, 32, 10, 2))
    refused("do not fit", v=lambda bench: bench.zeros(TensorType.F16, 64, 9, 2))
    refused("groups", q=lambda bench: bench.zeros(TensorType.F32, 64, 5, 3))
    refused("plan", plan=lambda bench: bench.zeros(TensorType.F32, 256))
    refused("out of range", n_splits=0)
    refused("out of range", scale=math.nan)
    refused("sink", sinks=lambda bench: bench.zeros(TensorType.F32, 3))


# ---- with and without a kernel


def test_the_kernel_is_there_where_a_compiler_and_its_processor_are() -> None:
    """The build is optional, so that nobody notices where it fails: this does, on the machines that tests run on."""
    has_vectors = platform.machine() in {"x86_64", "AMD64"} and " avx2 " in _processor_flags()
    if has_compiler() and has_vectors:
        found = find_kernel()
        assert found is not None
        assert (found.name, found.n_lanes) == ("avx2", 8)


def _processor_flags() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return ""
    return next((f"{line} " for line in cpuinfo.read_text().splitlines() if line.startswith("flags")), "")


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package as it is where nothing was built."""
    for find in (find_kernel, find_joint_kernel):
        find.cache_clear()
    with monkeypatch.context() as patch:
        patch.delattr(native, "_kernels", raising=False)  # or the module is found there
        patch.setitem(sys.modules, "ggml_engine.native._kernels", None)
        yield
    for find in (find_kernel, find_joint_kernel):
        find.cache_clear()


@pytest.mark.usefixtures("no_kernel")
def test_without_a_kernel_auto_is_the_matmul_form(tmp_path: Path) -> None:
    assert find_kernel() is None
    with loaded(write_llama(tmp_path / "model.gguf"), threads=1) as model:
        with executor_over(model, capacity=64) as executor:
            assert executor.form is AttentionForm.MATMUL
            assert executor.cache.pool.format.v_layout == "columns"
            found = feed(executor, executor.open(), list(range(3, 30)))
        with executor_over(model, capacity=64, attention="matmul") as executor:
            assert feed(executor, executor.open(), list(range(3, 30))).tobytes() == found.tobytes()
        with pytest.raises(OptionError, match="compiled kernel"):
            GgmlExecutor(model, ExecutorOptions(attention="cells"))


@pytest.mark.parametrize("name", ["ATTENTION_PARAMS_BYTES", "TENSOR_BYTES"])
def test_a_kernel_that_was_compiled_for_another_layout_is_not_used(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    from ggml_engine.native import _kernels as compiled

    monkeypatch.setattr(compiled, name, getattr(compiled, name) + 8)
    find_kernel.cache_clear()
    assert find_kernel() is None
    monkeypatch.undo()
    find_kernel.cache_clear()
    assert find_kernel() is not None


def test_heads_that_the_kernel_does_not_take_are_computed_in_another_form(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "model.gguf", n_head=2, n_head_kv=1, head_size=12)
    with loaded(path, threads=1) as model:
        with executor_over(model, capacity=64) as executor:
            assert executor.form is AttentionForm.MATMUL
            assert np.isfinite(feed(executor, executor.open(), [5, 6, 7])).all()
        with pytest.raises(OptionError, match=r"'cells'.*heads"):
            GgmlExecutor(model, ExecutorOptions(attention="cells"))


def test_auto_takes_the_kernel_and_v_in_columns_does_not(tmp_path: Path) -> None:
    with loaded(write_llama(tmp_path / "model.gguf"), threads=1) as model:
        for options, form in (
            ({}, AttentionForm.CELLS),
            ({"v_layout": "rows"}, AttentionForm.CELLS),
            ({"k_type": "q8_0", "v_type": "q8_0"}, AttentionForm.CELLS),
            ({"v_layout": "columns"}, AttentionForm.MATMUL),
            ({"deterministic": True}, AttentionForm.MATMUL),
        ):
            if "k_type" in options and model.hp.kv_layers()[0].head_k % 32:
                continue
            with executor_over(model, capacity=64, **options) as executor:
                assert executor.form is form


# ---- as a layer's attention


@pytest.mark.parametrize("n_splits", [1, 4])
@pytest.mark.parametrize("step", ["one token", "sequences on one prefix"])
def test_a_layer_gets_cap_sinks_and_values_taken_up(kernel: CellKernel, step: str, n_splits: int) -> None:
    case = Case(STEPS[step], softcap=3.0, has_sinks=True, n_splits=n_splits)
    up = random(case.n_head, 24, case.head_v, seed=6)
    bench = Bench(max_tensors=64)
    k = bench.raw_input(
        np.ascontiguousarray(case.k_raw.reshape(N_ROWS, 2, -1).swapaxes(0, 1)), case.k_type, 64, N_ROWS, 2
    )
    v = bench.raw_input(
        np.ascontiguousarray(case.v_raw.reshape(N_ROWS, 2, -1).swapaxes(0, 1)), case.v_type, 64, N_ROWS, 2
    )
    rows = KvCells(k, v, bench.input(case.plan(), TensorType.I32), kernel, n_splits, 2)
    sinks = bench.input(case.sinks)
    result = attend(
        bench.builder, bench.input(case.q), rows, AttentionForm.CELLS, case.scale, 3.0, "attn", sinks=sinks,
        v_up=bench.input(up),
    )  # fmt: skip
    expected = np.einsum("thv,hsv->ths", case.expected(), up.astype(np.float64))
    close(bench.run(result).reshape(expected.shape), expected, BOUND)
