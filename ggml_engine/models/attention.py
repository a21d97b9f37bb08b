"""The forms of attention: the same sum, computed in the ways that ggml is fast at.

Knows shapes and masks, not sequences: rows of K and V come as they were read, the mask says who sees what.
`flash` never holds the scores; `matmul` does, and wants V transposed ("columns"). `*_folded` lets the query heads
that share a K/V head be rows of one product, so that K and V are read once per group, and kernels that work on several
rows at once have them even for one token. Rows of a group are ordered by head, then by token: so its scores are those
of the heads apart under another shape, and the mask stays as it is.
`cells` is a kernel of our own, which reads the pool's rows where they lie, by a plan and without a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final, Literal, Protocol, TypeAlias, get_args

from ggml_engine.errors import GraphError
from ggml_engine.ggml.cell_kernel import CellKernel
from ggml_engine.ggml.ops import GraphBuilder, Tensor
from ggml_engine.ggml.tensor_types import TensorType

AttentionOption: TypeAlias = Literal["auto", "cells", "flash", "flash_folded", "matmul", "matmul_folded"]
ATTENTION_OPTIONS: Final[tuple[AttentionOption, ...]] = get_args(AttentionOption)


class AttentionForm(str, Enum):
    """How a graph computes attention. A folded form leaves heads apart that share nothing."""

    CELLS = "cells"
    FLASH = "flash"
    FLASH_FOLDED = "flash_folded"
    MATMUL = "matmul"
    MATMUL_FOLDED = "matmul_folded"

    @property
    def is_flash(self) -> bool:
        """Whether it is the fused kernel, which reads V in rows, all of them at once."""
        return self in {AttentionForm.FLASH, AttentionForm.FLASH_FOLDED}

    @property
    def is_matmul(self) -> bool:
        """Whether scores are held, and V is best in columns."""
        return self in {AttentionForm.MATMUL, AttentionForm.MATMUL_FOLDED}

    @property
    def is_folded(self) -> bool:
        """Whether the heads of a group are rows of one product."""
        return self in {AttentionForm.FLASH_FOLDED, AttentionForm.MATMUL_FOLDED}


@dataclass(frozen=True, slots=True)
class KvRows:
    """What a layer's queries read, in one or more pieces, in the order of the mask's rows.

    A piece of k is [head, rows, heads], of v the same ("rows") or [rows, head, heads] ("columns"). Without `join` a
    piece may have a fourth dimension: several spans of so many rows each, one after the other. `join` asks for one sum
    over all rows, so that the result does not depend on how they were cut; flash attention needs it. Reads of the same
    rows share `repeated_masks`, which holds what was made of the mask once.
    """

    k: Sequence[Tensor]
    v: Sequence[Tensor]
    v_is_columns: bool
    mask: Tensor  # f16 [rows, tokens]
    join: bool = False
    repeated_masks: dict[int, Tensor] = field(default_factory=dict)  # f16 [rows, tokens * n] by n


@dataclass(frozen=True, slots=True)
class KvCells:
    """All rows of the pool, and a plan of which of them each token sees, for the compiled kernel.

    k [head, rows, heads], v [head_v, rows, heads].
    """

    k: Tensor
    v: Tensor
    plan: Tensor  # i32 [n], see pool/cell_plan.py
    kernel: CellKernel
    n_splits: int
    n_threads: int  # at most


class KvStore(Protocol):
    """Where a graph leaves and finds K and V; the cache's side of attention."""

    def rotate_k(self, layer: int, x: Tensor) -> Tensor:
        """A query or key [head, heads, tokens] as the store wants it; itself where nothing is rotated."""
        ...

    def rotate_v(self, layer: int, x: Tensor) -> Tensor:
        """Values [head * heads, tokens] as the store wants them, and mixed ones back again."""
        ...

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store k f32 [n_embd_k, tokens] and v f32 [n_embd_v, tokens] in the cells of this step's tokens."""
        ...

    def read(self, layer: int) -> KvRows | KvCells:
        """What the step's queries see in this layer, its own tokens included."""
        ...


def attend(
    b: GraphBuilder,
    q: Tensor,
    rows: KvRows | KvCells,
    form: AttentionForm,
    scale: float,
    softcap: float,
    name: str,
    *,
    sinks: Tensor | None = None,
    v_up: Tensor | None = None,
) -> Tensor:
    """Attention of q f32 [head, heads, tokens] over `rows`: f32 [head_v * heads, tokens].

    `softcap` > 0 bounds the scores by a scaled tanh (Gemma Team 2024, arXiv:2408.00118). `sinks` f32 [heads] are scores
    that take weight and have no value (Xiao et al., arXiv:2309.17453). `v_up` [head_v, size, heads] multiplies each
    head's values after they are mixed, so that heads have `size` elements (DeepSeek-AI, arXiv:2405.04434).
    """
    n_head, n_tokens = q.ne[1], q.ne[2]
    if isinstance(rows, KvCells):
        mixed = b.cell_attention(
            rows.kernel, q, rows.k, rows.v, rows.plan, scale, softcap=softcap, sinks=sinks, n_splits=rows.n_splits,
            n_threads=rows.n_threads, name=f"{name}.cells",
        )  # fmt: skip
        return _all_heads(b, mixed, v_up, name)
    n_head_kv = rows.k[0].ne[2]
    folds = form.is_folded and n_head > n_head_kv
    if form.is_flash:
        rows = _joined(b, rows)
        if folds and sinks is None:  # the kernel takes one sink for all rows of a product
            mixed = _flash_folded(b, q, rows, scale, softcap, name)
        else:
            mixed = _flash(b, q, rows, scale, softcap, name, sinks)  # [head_v, heads, tokens]
        return _all_heads(b, mixed, v_up, name)
    if rows.join:
        rows = _joined(b, rows)
    queries = _fold(b, q, n_head_kv, name) if folds else _by_head(b, q, name)
    scores = b.concat_all([_score(b, k, queries, name) for k in rows.k], 0)
    n_rows = scores.ne[0]
    if folds:
        scores = b.reshape(scores, n_rows, n_tokens, n_head)
    if softcap > 0:
        scores = b.scale(b.tanh(b.scale(scores, 1.0 / softcap)), softcap, f"{name}.kq_capped")
    weights = b.soft_max(scores, rows.mask, scale, f"{name}.kq_soft_max", sinks=sinks)  # [rows, tokens, heads]
    if folds:
        weights = b.reshape(weights, n_rows, queries.ne[1], n_head_kv)
    mixed = _mix(b, rows, weights, name)
    if folds:
        mixed = b.reshape(mixed, mixed.ne[0], n_tokens, n_head)
    if v_up is not None:
        mixed = b.mul_mat(v_up, mixed, f"{name}.v_up")  # [head_v, tokens, heads]
    return b.cont_2d(b.permute(mixed, 0, 2, 1, 3), mixed.ne[0] * n_head, n_tokens, f"{name}.kqv_out")


def _all_heads(b: GraphBuilder, mixed: Tensor, v_up: Tensor | None, name: str) -> Tensor:
    """[head_v, heads, tokens] as [size * heads, tokens]."""
    if v_up is not None:
        mixed = b.mul_mat(v_up, b.permute(mixed, 0, 2, 1, 3), f"{name}.v_up")
        mixed = b.cont(b.permute(mixed, 0, 2, 1, 3))
    return b.reshape(mixed, mixed.ne[0] * mixed.ne[1], mixed.ne[2], name=f"{name}.kqv_out")


def _by_head(b: GraphBuilder, q: Tensor, name: str) -> Tensor:
    """[head, heads, tokens] as [head, tokens, heads]."""
    return b.permute(q, 0, 2, 1, 3, name=f"{name}.q")


def _fold(b: GraphBuilder, q: Tensor, n_head_kv: int, name: str) -> Tensor:
    """[head, heads, tokens] as [head, tokens * group, kv heads]; a copy where there are several tokens."""
    by_head = _by_head(b, q, name)
    if not by_head.is_contiguous:
        by_head = b.cont(by_head)
    return b.reshape(by_head, q.ne[0], q.n_elements // (q.ne[0] * n_head_kv), n_head_kv, name=f"{name}.q_folded")


def _score(b: GraphBuilder, k: Tensor, q: Tensor, name: str) -> Tensor:
    """Products of the queries with one piece: [rows, tokens, heads]."""
    n_spans = k.ne[3]
    if n_spans == 1:
        return b.mul_mat(k, q, f"{name}.kq", f32_accumulation=True)
    scores = b.mul_mat(k, b.repeat(q, n_spans), f"{name}.kq", f32_accumulation=True)
    in_row = b.cont(b.permute(scores, 0, 2, 3, 1))  # [rows of a span, spans, tokens, heads]
    return b.reshape(in_row, k.ne[1] * n_spans, *q.ne[1:3])


def _mix(b: GraphBuilder, rows: KvRows, weights: Tensor, name: str) -> Tensor:
    """Values by weights. Pieces are summed one after the other, each read where it lies."""
    total = None
    first = 0
    for v in rows.v:
        columns = v if rows.v_is_columns else b.cont(b.permute(v, 1, 0, 2, 3), f"{name}.v_columns")
        n_rows, n_spans = columns.ne[0], columns.ne[3]
        part = weights
        if n_rows < weights.ne[0]:
            shape: tuple[int, ...] = (n_rows, *weights.ne[1:3])
            strides: tuple[int, ...] = weights.nb[1:3]
            if n_spans > 1:
                shape, strides = (*shape, n_spans), (*strides, n_rows * weights.nb[0])
            part = b.view(weights, shape, strides, first * weights.nb[0])
        mixed = b.mul_mat(columns, part, f"{name}.kqv")
        if n_spans > 1:
            by_span = b.cont(b.permute(mixed, 1, 2, 3, 0))  # [spans, head_v, tokens, heads]
            mixed = b.reshape(b.sum_rows(by_span), *mixed.ne[:3])
        total = mixed if total is None else b.add(total, mixed)
        first += n_rows * n_spans
    if total is None:
        raise GraphError(f"{name}: nothing to attend to")
    return total


def _flash(
    b: GraphBuilder, q: Tensor, rows: KvRows, scale: float, softcap: float, name: str, sinks: Tensor | None
) -> Tensor:
    k, v = _flash_rows(b, rows)
    q = _by_head(b, q, name)
    return b.flash_attention(q, k, v, rows.mask, scale, softcap=softcap, sinks=sinks, name=f"{name}.flash")


def _flash_folded(b: GraphBuilder, q: Tensor, rows: KvRows, scale: float, softcap: float, name: str) -> Tensor:
    n_tokens, n_head_kv = q.ne[2], rows.k[0].ne[2]
    n_group = q.ne[1] // n_head_kv
    k, v = _flash_rows(b, rows)
    mask = rows.repeated_masks.get(n_group)
    if mask is None:
        mask = rows.repeated_masks[n_group] = b.concat_all([rows.mask] * n_group, 1)
    queries = _fold(b, q, n_head_kv, name)
    mixed = b.flash_attention(queries, k, v, mask, scale, softcap=softcap, name=f"{name}.flash")
    by_group = b.reshape(mixed, mixed.ne[0], n_head_kv, n_tokens, n_group)
    return b.reshape(b.cont(b.permute(by_group, 0, 2, 3, 1)), mixed.ne[0], q.ne[1], n_tokens)


def _flash_rows(b: GraphBuilder, rows: KvRows) -> tuple[Tensor, Tensor]:
    """The kernel reads f16 or quantised rows; libllama casts f32 the same way."""
    k, v = (b.cast(x, TensorType.F16) if x.type == TensorType.F32 else x for x in (rows.k[0], rows.v[0]))
    return k, v


def _joined(b: GraphBuilder, rows: KvRows) -> KvRows:
    if len(rows.k) == 1:
        return rows
    k = b.concat_all(rows.k, 1)
    v = b.concat_all(rows.v, 0 if rows.v_is_columns else 1)
    return replace(rows, k=[k], v=[v])
