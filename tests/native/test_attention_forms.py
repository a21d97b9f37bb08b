"""Every form of attention is the same sum: numpy's, over all that a layer can ask for; and the folded ones do fold."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
from graphs import Bench, close, random, stored

from ggml_engine.ggml.library import ffi
from ggml_engine.ggml.ops import Tensor
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.models.attention import AttentionForm, KvRows, attend

Array = npt.NDArray[Any]
HEAD = 32
FORMS = list(AttentionForm)
# Against float64 over the same rounded K and V. Products of f16 round their second factor to f16 as well, flash
# attention its sums too.
BOUNDS = {TensorType.F32: 2e-6, TensorType.F16: 2e-3}
FLASH_BOUND = 5e-3


class Case:
    """What a layer's queries are and what they see. Pieces of K and V are (teeth, rows) each."""

    def __init__(
        self,
        *,
        n_tokens: int = 5,
        n_head: int = 6,
        n_head_kv: int = 2,
        head_v: int = HEAD,
        pieces: tuple[tuple[int, int], ...] = ((1, 64),),
        kind: TensorType = TensorType.F32,
        softcap: float = 0.0,
        sinks: bool = False,
        v_up: bool = False,
        scattered: bool = False,
        join: bool = False,
    ) -> None:
        self.kind, self.pieces, self.softcap, self.join, self.scattered = kind, pieces, softcap, join, scattered
        self.n_rows = sum(teeth * rows for teeth, rows in pieces)
        self.q = random(n_tokens, n_head, HEAD, seed=1)
        self.k = self._rounded(random(n_head_kv, self.n_rows, HEAD, seed=2))
        self.v = self._rounded(random(n_head_kv, self.n_rows, head_v, seed=3))
        seen = np.random.default_rng(4).random((n_tokens, self.n_rows)) < 0.7
        seen[:, 0] = True
        self.mask = np.where(seen, 0.0, -np.inf).astype(np.float16)
        self.sinks = random(n_head, seed=5) + 2 if sinks else None
        self.v_up = random(n_head, 24, head_v, seed=6) if v_up else None
        self.scale = 1 / math.sqrt(HEAD)

    def _rounded(self, x: Array) -> Array:
        return x.astype(np.float16).astype(np.float32) if self.kind == TensorType.F16 else x

    def expected(self) -> Array:
        """[tokens, heads * head_v] in float64."""
        n_tokens, n_head, _ = self.q.shape
        n_group = n_head // self.k.shape[0]
        heads = []
        for head in range(n_head):
            k, v = (x[head // n_group].astype(np.float64) for x in (self.k, self.v))
            scores = self.q[:, head].astype(np.float64) @ k.T * self.scale
            if self.softcap:
                scores = self.softcap * np.tanh(scores / self.softcap)
            scores = scores + self.mask
            top = scores.max(axis=1, keepdims=True)
            powers = np.exp(scores - top)
            total = powers.sum(axis=1, keepdims=True)
            if self.sinks is not None:
                total = total + np.exp(self.sinks[head] - top)
            mixed = powers / total @ v
            heads.append(mixed if self.v_up is None else mixed @ self.v_up[head].T.astype(np.float64))
        return np.stack(heads, axis=1).reshape(n_tokens, -1)

    def _pieces(self, bench: Bench, x: Array, axes: tuple[int, ...]) -> list[Tensor]:
        """x [heads, rows, elements] in pieces [teeth, heads, rows, elements], `axes` transposing the last two."""
        found = []
        first = 0
        for teeth, rows in self.pieces:
            part = x[:, first : first + teeth * rows].reshape(x.shape[0], teeth, rows, -1).transpose(1, 0, 2, 3)
            part = np.ascontiguousarray(part.transpose(axes))
            found.append(bench.raw_input(stored(part, self.kind), self.kind, *reversed(part.shape)))
            first += teeth * rows
        return found

    def rows(self, bench: Bench, *, columns: bool) -> KvRows:
        k = self._pieces(bench, self.k, (0, 1, 2, 3))
        v = self._pieces(bench, self.v, (0, 1, 3, 2) if columns else (0, 1, 2, 3))
        mask = bench.input(self.mask, TensorType.F16)
        return KvRows(k, v, columns, mask, self.join)

    def queries(self, bench: Bench) -> Tensor:
        # flash attention caps scores that are scaled, the matmul form those that are not: architectures with a cap scale
        # the queries, and so does this
        q = self.q * np.float32(self.scale) if self.softcap else self.q
        if not self.scattered:
            return bench.input(q)
        n_tokens, n_head, head = q.shape  # a part of a wider tensor, as q of a fused weight is
        both = np.concatenate((q.reshape(n_tokens, -1), random(n_tokens, 7, seed=8)), axis=1)
        whole = bench.input(both)
        return bench.builder.view(whole, (head, n_head, n_tokens), (4 * head, whole.nb[1]), 0)

    def attend(self, bench: Bench, form: AttentionForm, *, columns: bool) -> Tensor:
        return attend(
            bench.builder,
            self.queries(bench),
            self.rows(bench, columns=columns),
            form,
            1.0 if self.softcap else self.scale,
            self.softcap,
            "attn",
            sinks=None if self.sinks is None else bench.input(self.sinks),
            v_up=None if self.v_up is None else bench.input(self.v_up),
        )

    def found(self, form: AttentionForm, *, columns: bool) -> Array:
        bench = Bench(max_tensors=128)
        return bench.run(self.attend(bench, form, columns=columns)).reshape(self.q.shape[0], -1)


CASES: dict[str, dict[str, Any]] = {
    "one token": {"n_tokens": 1},
    "several tokens": {},
    "many tokens": {"n_tokens": 70},
    "one head for all": {"n_head": 4, "n_head_kv": 1},
    "no groups": {"n_head_kv": 6},
    "wider values": {"head_v": 48},
    "narrower values, one token": {"head_v": 16, "n_tokens": 1},
    "pieces": {"pieces": ((1, 32), (1, 64), (1, 16))},
    "pieces, one token": {"pieces": ((1, 32), (1, 64), (1, 16)), "n_tokens": 1},
    "joined pieces": {"pieces": ((1, 32), (1, 64)), "join": True},
    "sinks": {"sinks": True},
    "sinks, one token": {"sinks": True, "n_tokens": 1},
    "capped scores": {"softcap": 2.0},
    "values taken up": {"v_up": True},
    "values taken up, one token": {"v_up": True, "n_tokens": 1},
    "queries of a fused weight": {"scattered": True},
    "queries of a fused weight, one token": {"scattered": True, "n_tokens": 1},
}
COMBS: dict[str, dict[str, Any]] = {
    "teeth": {"pieces": ((4, 16),)},
    "teeth, one token": {"pieces": ((4, 16),), "n_tokens": 1},
    "teeth beside pieces": {"pieces": ((1, 32), (3, 16), (1, 16)), "sinks": True, "softcap": 2.0},
}


def bound(form: AttentionForm, kind: TensorType) -> float:
    return FLASH_BOUND if form.is_flash else BOUNDS[kind]


def ways(form: AttentionForm) -> list[bool]:
    return [False] if form.is_flash else [False, True]


@pytest.mark.parametrize("kind", [TensorType.F32, TensorType.F16], ids=["f32", "f16"])
@pytest.mark.parametrize("form", FORMS, ids=[form.value for form in FORMS])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_every_form_is_the_definition(options: dict[str, Any], form: AttentionForm, kind: TensorType) -> None:
    case = Case(**options, kind=kind)
    for columns in ways(form):
        close(case.found(form, columns=columns), case.expected(), bound(form, kind))


@pytest.mark.parametrize("form", [AttentionForm.MATMUL, AttentionForm.MATMUL_FOLDED], ids=["apart", "folded"])
@pytest.mark.parametrize("options", COMBS.values(), ids=COMBS)
def test_combs_are_multiplied_at_every_tooth(options: dict[str, Any], form: AttentionForm) -> None:
    case = Case(**options)
    for columns in ways(form):
        close(case.found(form, columns=columns), case.expected(), BOUNDS[TensorType.F32])


@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_folding_changes_nothing_but_the_last_digits(options: dict[str, Any]) -> None:
    case = Case(**options, kind=TensorType.F16)
    apart = case.found(AttentionForm.MATMUL, columns=True)
    close(case.found(AttentionForm.MATMUL_FOLDED, columns=True), apart, 1e-6)


def sources(bench: Bench, name: str) -> list[list[tuple[int, ...]]]:
    """For every node in the graph whose name ends so, the shapes of what it is made of."""
    base = bench.libraries.base
    nodes = [base.ggml_graph_node(bench.builder.cgraph, i) for i in range(n_nodes(bench))]
    named = [node for node in nodes if ffi.string(node.name).decode().endswith(name)]
    return [[tuple(ffi.unpack(src.ne, 3)) for src in node.src if src != ffi.NULL] for node in named]


def n_nodes(bench: Bench) -> int:
    return int(bench.libraries.base.ggml_graph_n_nodes(bench.builder.cgraph))


@pytest.mark.parametrize("n_tokens", [1, 5])
def test_folded_products_read_a_kv_head_once(n_tokens: int) -> None:
    case = Case(n_tokens=n_tokens)
    bench = Bench(max_tensors=128)
    with patch.object(bench.builder, "cont", wraps=bench.builder.cont) as copies:
        bench.builder.expand(case.attend(bench, AttentionForm.MATMUL_FOLDED, columns=True))
    assert sources(bench, ".kq") == [[(HEAD, 64, 2), (HEAD, 3 * n_tokens, 2)]]
    assert sources(bench, ".kqv") == [[(64, HEAD, 2), (64, 3 * n_tokens, 2)]]
    assert sources(bench, ".kq_soft_max") == [[(64, n_tokens, 6), (64, n_tokens, 1)]], "the mask is not repeated"
    assert copies.call_count == (0 if n_tokens == 1 else 1), "one token's queries need no copy"


def test_folded_flash_attention_repeats_the_mask_once_for_all_layers() -> None:
    case = Case()
    bench = Bench(max_tensors=128)
    rows = case.rows(bench, columns=False)
    with patch.object(bench.builder, "concat", wraps=bench.builder.concat) as copies:
        for layer in range(3):
            mixed = attend(bench.builder, bench.input(case.q), rows, AttentionForm.FLASH_FOLDED, 1.0, 0.0, f"{layer}")
            bench.builder.expand(mixed)
    assert sources(bench, ".flash") == [[(HEAD, 15, 2), (HEAD, 64, 2), (HEAD, 64, 2), (64, 15, 1)]] * 3
    assert copies.call_count == 2


@pytest.mark.parametrize("form", [AttentionForm.FLASH_FOLDED, AttentionForm.MATMUL_FOLDED], ids=["flash", "matmul"])
def test_heads_that_share_nothing_stay_apart(form: AttentionForm) -> None:
    case = Case(n_head_kv=6)
    counted = []
    for each in (form, AttentionForm(form.value.removesuffix("_folded"))):
        bench = Bench(max_tensors=128)
        bench.builder.expand(case.attend(bench, each, columns=not form.is_flash))
        counted.append(n_nodes(bench))
    assert counted[0] == counted[1]
