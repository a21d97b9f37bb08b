"""Attention over a whole pool of rows, by a plan of which rows each token sees."""

from __future__ import annotations

import math

from ggml_engine.ggml.cell_kernel import CellKernel, kernel_params
from ggml_engine.ggml.library import ffi
from ggml_engine.ggml.ops.shapes import ShapeOps
from ggml_engine.ggml.ops.tensors import Tensor, require
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.ggml.threads import MAX_THREADS, default_threads

# Floats in parts up to which the last thread adds them up: sooner done than all have waited for each other.
_MOST_MERGED = 1 << 14

_ALL_TASKS = -1  # GGML_N_TASKS_MAX: as many as there are threads


class CellOps(ShapeOps):
    """The compiled kernel as an operation."""

    def cell_attention(
        self,
        kernel: CellKernel,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        plan: Tensor,
        scale: float,
        *,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
        n_splits: int = 1,
        n_threads: int | None = None,
        name: str = "",
    ) -> Tensor:
        """softmax(q k^T scale) v over the rows that `plan` gives each token; nothing else is read, on a CPU only.

        q f32 [d, heads, tokens], k [d, rows, kv heads], v [d_v, rows, kv heads] of any type with rows that can be
        converted, plan i32 (its meaning: pool/cell_plan.py; tokens for which it names rows that there are not come out
        as NaN), sinks f32 [heads] as those of `soft_max`; gives f32 [d_v, heads, tokens]. With `n_splits` the rows are
        worked on in so many parts. At most `n_threads` work at once, without a number as many as by default: each has
        scratch in the result's tensor, for as many queries as a tile should have; larger tiles it takes in pieces.
        """
        what = "cell_attention"
        given = (q, k, v, plan)
        require(q.type == TensorType.F32 and q.nb[0] == 4, what, "q must be f32 with whole rows", *given)
        require(q.ne[0] == k.ne[0] and k.ne[1:] == v.ne[1:], what, "q, k and v do not fit", *given)
        require(q.ne[1] % k.ne[2] == 0 and q.ne[3] == k.ne[3] == 1, what, "heads do not divide into groups", *given)
        require(k.has_contiguous_rows and v.has_contiguous_rows, what, "rows must be contiguous", *given)
        fits = kernel.takes(q.ne[0]) and kernel.takes(v.ne[0])
        require(fits, what, f"heads must be multiples of {kernel.n_lanes}", *given)
        require(plan.type == TensorType.I32 and plan.is_contiguous, what, "the plan must be i32", *given)
        require(n_splits >= 1 and math.isfinite(scale) and math.isfinite(softcap), what, "numbers out of range", *given)
        if sinks is not None:
            usable = sinks.type == TensorType.F32 and sinks.ne[0] == q.ne[1] and sinks.is_contiguous
            require(usable, what, "one f32 sink a head is needed", sinks)
        n_threads = default_threads() if n_threads is None else n_threads
        require(1 <= n_threads <= MAX_THREADS, what, f"{n_threads} threads", *given)
        n_head, n_tokens = q.ne[1:3]
        group = n_head // k.ne[2]
        n_queries = min(kernel.tokens_per_tile(group), n_tokens) * group
        d_v, n_rows = v.ne[0], n_head * n_tokens
        merges = n_splits > 1 and d_v * n_rows * n_splits <= _MOST_MERGED
        params = kernel_params(
            self.libraries, k.type, v.type, k.ne[2], scale, softcap, n_splits, n_threads, n_queries, merges=merges
        )
        self.kept.append(params)
        scratch = kernel.scratch_floats(n_threads, n_queries, q.ne[0], d_v)
        n_floats = scratch if n_splits == 1 else (d_v + 2) * n_rows * n_splits + scratch
        if n_splits == 1 or merges:
            parts = [q, k, v, plan] if sinks is None else [q, k, v, plan, sinks]
            held = self._custom(what, kernel.attend, (d_v * n_rows + n_floats, 1, 1), parts, params, f"{name}.held")
            return self.view(held, (d_v, n_head, n_tokens), (4 * d_v, 4 * d_v * n_head), 0, name)
        held = self._custom(what, kernel.attend, (n_floats, 1, 1), [q, k, v, plan], params, f"{name}.held")
        parts = [held] if sinks is None else [held, sinks]
        return self._custom(what, kernel.merge, (d_v, n_head, n_tokens), parts, params, name)

    def _custom(
        self, what: str, operation: object, ne: tuple[int, int, int], parts: list[Tensor], params: object, name: str
    ) -> Tensor:
        ctx = self._room(what, *parts)
        pointers = ffi.new("struct ggml_tensor *[]", [part.ptr for part in parts])
        ptr = self.base.ggml_custom_4d(
            ctx, int(TensorType.F32), *ne, 1, pointers, len(parts), operation, _ALL_TASKS, params
        )
        return self._named(ptr, name)
