"""The forms of attention: the same sum, computed in the ways that ggml is fast at.

Knows shapes and masks, not sequences: rows of K and V come as they were read, the mask says who sees what.
`flash` never holds the scores; `matmul` does, and wants V transposed ("columns"). `*_folded` lets the query heads
that share a K/V head be rows of one product, so that K and V are read once per group.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from ggml_engine.ggml.ops import GraphBuilder, Tensor
from ggml_engine.ggml.tensor_types import TensorType


class AttentionForm(str, Enum):
    """How a graph computes attention."""

    FLASH = "flash"
    MATMUL = "matmul"


@dataclass(frozen=True, slots=True)
class KvRows:
    """What a layer's queries read: k [head, rows, heads], v the same ("rows") or [rows, head, heads] ("columns")."""

    k: Tensor
    v: Tensor
    v_is_columns: bool
    mask: Tensor  # f16 [rows, tokens]


class KvStore(Protocol):
    """Where a graph leaves and finds K and V; the cache's side of attention."""

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Store k f32 [n_embd_k, tokens] and v f32 [n_embd_v, tokens] in the cells of this step's tokens."""
        ...

    def read(self, layer: int, n_head_kv: int) -> KvRows:
        """What the step's queries see in this layer, its own tokens included."""
        ...


def attend(
    b: GraphBuilder, q: Tensor, rows: KvRows, form: AttentionForm, scale: float, softcap: float, name: str
) -> Tensor:
    """Attention of q f32 [head, heads, tokens] over `rows`: f32 [head_v * heads, tokens].

    `softcap` > 0 bounds the scores by a scaled tanh (Gemma Team 2024, arXiv:2408.00118).
    """
    n_head, n_tokens = q.ne[1], q.ne[2]
    q = b.permute(q, 0, 2, 1, 3, name=f"{name}.q")  # [head, tokens, heads]
    if form is AttentionForm.FLASH:
        return _flash(b, q, rows, scale, softcap, name)
    scores = b.mul_mat(rows.k, q, f"{name}.kq", f32_accumulation=True)  # [rows, tokens, heads]
    if softcap > 0:
        scores = b.scale(b.tanh(b.scale(scores, 1.0 / softcap)), softcap, f"{name}.kq_capped")
    weights = b.soft_max(scores, rows.mask, scale, f"{name}.kq_soft_max")
    v = rows.v if rows.v_is_columns else b.cont(b.permute(rows.v, 1, 0, 2, 3), f"{name}.v_columns")
    mixed = b.mul_mat(v, weights, f"{name}.kqv")  # [head_v, tokens, heads]
    return b.cont_2d(b.permute(mixed, 0, 2, 1, 3), mixed.ne[0] * n_head, n_tokens, f"{name}.kqv_out")


def _flash(b: GraphBuilder, q: Tensor, rows: KvRows, scale: float, softcap: float, name: str) -> Tensor:
    # the kernel reads f16 or quantised rows; libllama casts f32 the same way
    k = b.cast(rows.k, TensorType.F16, f"{name}.k_f16") if rows.k.type == TensorType.F32 else rows.k
    v = b.cast(rows.v, TensorType.F16, f"{name}.v_f16") if rows.v.type == TensorType.F32 else rows.v
    mixed = b.flash_attention(q, k, v, rows.mask, scale, softcap=softcap, name=f"{name}.flash")
    return b.reshape(mixed, mixed.ne[0] * mixed.ne[1], mixed.ne[2], name=f"{name}.kqv_out")
