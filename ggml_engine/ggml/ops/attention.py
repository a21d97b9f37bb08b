"""Attention: softmax and the fused kernel."""

from __future__ import annotations

import math

from ggml_engine.ggml.library import ffi
from ggml_engine.ggml.ops.graph_context import GraphContext
from ggml_engine.ggml.ops.tensors import MATMUL_TYPES, Tensor, require
from ggml_engine.ggml.tensor_types import TensorType


def _batches_repeat(mask: Tensor, a: Tensor) -> bool:
    return a.ne[2] % mask.ne[2] == 0 and a.ne[3] % mask.ne[3] == 0


def _require_sinks(operation: str, sinks: Tensor, n_head: int) -> None:
    fits = sinks.type == TensorType.F32 and sinks.ne == (n_head, 1, 1, 1) and sinks.is_contiguous
    require(fits, operation, f"{n_head} f32 sinks are needed, one a head", sinks)


class AttentionOps(GraphContext):
    """Scores to weights, and the whole in one kernel."""

    def soft_max(
        self,
        a: Tensor,
        mask: Tensor | None = None,
        scale: float = 1.0,
        name: str = "",
        *,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """softmax(a * scale + mask) per row of `a` f32 [columns, rows, heads].

        The mask, f32 or f16, has a's columns, at least its rows, and is repeated over heads. Each of `sinks`, f32
        [heads], counts in the sums of its head as one more score would, and has no column in the result.
        """
        given = (a,) if mask is None else (a, mask)
        require(a.type == TensorType.F32 and a.is_contiguous, "soft_max", "f32 and contiguous", *given)
        if mask is not None:
            require(mask.type in {TensorType.F32, TensorType.F16}, "soft_max", "the mask must be f32 or f16", *given)
            fits = mask.ne[0] == a.ne[0] and mask.ne[1] >= a.ne[1] and _batches_repeat(mask, a)
            require(fits and mask.is_contiguous, "soft_max", "the mask does not fit", *given)
        if sinks is not None:
            _require_sinks("soft_max", sinks, a.ne[2])
        require(math.isfinite(scale), "soft_max", f"the scale must be finite, is {scale}")
        ctx = self._room("soft_max", a, mask, sinks)
        ptr = self.base.ggml_soft_max_ext(ctx, a.ptr, ffi.NULL if mask is None else mask.ptr, scale, 0.0)
        result = self._named(ptr, name)
        if sinks is not None:
            self.base.ggml_soft_max_add_sinks(ptr, sinks.ptr)
        return result

    def flash_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor,
        scale: float,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        name: str = "",
    ) -> Tensor:
        """softmax(q k^T scale + mask) v without the scores in memory (Dao 2023, arXiv:2307.08691).

        q f32 [d, tokens, heads], k [d, rows, kv heads], v [d_v, rows, kv heads], mask f16 [rows, tokens], sinks as
        those of `soft_max`; gives f32 [d_v, heads, tokens].
        """
        require(q.type == TensorType.F32, "flash_attention", "q must be f32", q, k, v, mask)
        kv_fits = {k.type, v.type} <= MATMUL_TYPES
        require(kv_fits, "flash_attention", "k or v has an unusable type", q, k, v, mask)
        require(q.ne[0] == k.ne[0], "flash_attention", "head sizes differ", q, k, v, mask)
        require(k.ne[1:] == v.ne[1:], "flash_attention", "k and v differ in rows or heads", q, k, v, mask)
        grouped = q.ne[2] % k.ne[2] == 0 and q.ne[3] == k.ne[3]
        require(grouped, "flash_attention", "query heads do not divide into groups", q, k, v, mask)
        fits = mask.ne[0] == k.ne[1] and mask.ne[1] >= q.ne[1] and _batches_repeat(mask, q)
        fits = fits and mask.type == TensorType.F16 and mask.is_contiguous
        require(fits, "flash_attention", "an f16 mask [rows, tokens] is needed", q, k, v, mask)
        rows = q.has_contiguous_rows and k.has_contiguous_rows and v.has_contiguous_rows
        require(rows, "flash_attention", "rows must be contiguous", q, k, v, mask)
        require(math.isfinite(scale) and math.isfinite(softcap), "flash_attention", f"scale {scale}, cap {softcap}")
        if sinks is not None:
            _require_sinks("flash_attention", sinks, q.ne[2])
        ctx = self._room("flash_attention", q, k, v, mask, sinks)
        ptr = self.base.ggml_flash_attn_ext(ctx, q.ptr, k.ptr, v.ptr, mask.ptr, scale, 0.0, softcap)
        result = self._named(ptr, name)
        self.base.ggml_prec_set_acc(ptr, self.base.GGML_PREC_F32)
        if sinks is not None:
            self.base.ggml_flash_attn_ext_add_sinks(ptr, sinks.ptr)
        return result
