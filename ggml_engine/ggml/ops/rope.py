"""Rotary position embedding."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ggml_engine.ggml.library import ffi
from ggml_engine.ggml.ops.graph_context import GraphContext
from ggml_engine.ggml.ops.tensors import Tensor, require
from ggml_engine.ggml.tensor_types import TensorType

ROPE_NORMAL = 0
ROPE_NEOX = 2
MAX_ATTENTION_FACTOR = 1000.0  # of a file: scores grow with its square, and an infinite one makes NaN of all


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions are rotated into queries and keys. The YaRN terms are ggml's (Peng et al., arXiv:2309.00071)."""

    n_dims: int
    base: float
    mode: int = ROPE_NORMAL
    scale: float = 1.0
    n_ctx_orig: int = 0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def check(self) -> None:
        """Raise GraphError when ggml would hang, abort or give NaN with these."""
        require(self.mode in {ROPE_NORMAL, ROPE_NEOX}, "rope", f"mode {self.mode}")
        require(math.isfinite(self.base) and self.base > 0, "rope", f"the base must be positive, is {self.base}")
        require(math.isfinite(self.scale) and self.scale > 0, "rope", f"the scale must be positive, is {self.scale}")
        yarn = (self.ext_factor, self.attn_factor, self.beta_fast, self.beta_slow)
        require(all(math.isfinite(value) for value in yarn), "rope", f"the YaRN terms must be finite, are {yarn}")
        least = 1 if self.ext_factor else 0  # YaRN takes its logarithm
        fits = least <= self.n_ctx_orig < 1 << 31
        require(fits, "rope", f"the original context is {self.n_ctx_orig}, {least} or more is needed")
        if self.ext_factor:
            ordered = self.beta_fast > 0 and self.beta_slow > 0 and self.base > 1
            require(ordered, "rope", f"YaRN needs a base above 1 and positive betas, given {self.base} and {yarn}")


class RopeOps(GraphContext):
    """Positions into queries and keys."""

    def rope(self, a: Tensor, positions: Tensor, rope: Rope, factors: Tensor | None = None, name: str = "") -> Tensor:
        """Rotary embedding of `a` [head, heads, tokens] at `positions` i32 [tokens] (Su et al., arXiv:2104.09864).

        The first `rope.n_dims` of each head are rotated, the others copied. Heads may be a view of wider rows.
        """
        require(a.type in {TensorType.F32, TensorType.F16}, "rope", "f32 or f16 is needed", a)
        rope.check()
        require(0 < rope.n_dims <= a.ne[0] and rope.n_dims % 2 == 0, "rope", f"{rope.n_dims} rotated dimensions", a)
        fits = positions.type == TensorType.I32 and positions.ne == (a.ne[2], 1, 1, 1) and positions.is_contiguous
        require(fits, "rope", "one i32 position a token is needed", a, positions)
        require(a.has_contiguous_rows, "rope", "rows must be contiguous", a)
        require(a.ne[0] % 2 == 0, "rope", f"a head of {a.ne[0]} has no pairs", a)  # the rest is copied by pairs
        if factors is not None:
            n_factors = rope.n_dims // 2
            enough = factors.type == TensorType.F32 and factors.ne[0] >= n_factors and factors.has_contiguous_rows
            require(enough, "rope", f"{n_factors} f32 frequency factors are needed", a, factors)
        ctx = self._room("rope", a, positions, factors)
        ptr = self.base.ggml_rope_ext(
            ctx, a.ptr, positions.ptr, ffi.NULL if factors is None else factors.ptr, rope.n_dims, rope.mode,
            rope.n_ctx_orig, rope.base, rope.scale, rope.ext_factor, rope.attn_factor, rope.beta_fast, rope.beta_slow,
        )  # fmt: skip
        return self._named(ptr, name)
