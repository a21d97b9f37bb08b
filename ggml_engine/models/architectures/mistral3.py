"""`mistral3`: Mistral Small 3.1 and later, Ministral 3, text.

As `llama`, with YaRN's betas and logarithmic multiplier from the file, and queries that grow with the logarithm of
their position beyond the original context (Nakanishi 2025, arXiv:2501.19399). llama.cpp's src/models/mistral3.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import numpy.typing as npt

from ggml_engine.ggml.ops import ROPE_NORMAL, Rope, Tensor
from ggml_engine.models.architecture import (
    Architecture,
    attention_weights,
    embedding_and_output,
    gated_ffn_weights,
    norm,
    rope_factor_weights,
)
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import pre_norm_decoder
from ggml_engine.models.expert_ffn import dense_or_expert_ffn, expert_weights
from ggml_engine.models.experts import Gating, read_experts
from ggml_engine.models.metadata import MetadataReader, positive
from ggml_engine.models.rope import check_rope, read_original_context
from ggml_engine.models.uniform import read_uniform
from ggml_engine.models.weights import TensorSpec

_MAX_LOG_MULTIPLIER = 1000.0


@dataclass(frozen=True, slots=True)
class _Temperature:
    """Queries at position p are multiplied by `scale` ln(floor(p / n_ctx_orig) + 1) + 1; `scale` 0 is none."""

    scale: float
    n_ctx_orig: int

    def of_positions(self, positions: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        """The factors, rounded to f32 where libllama rounds."""
        contexts = np.floor(positions.astype(np.float32) / np.float32(self.n_ctx_orig)).astype(np.float64)
        return np.asarray(np.log(contexts + 1.0) * self.scale + 1.0, np.float32)


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    log_multiplier = reader.number(
        "rope.scaling.yarn_log_multiplier",
        lambda value: 0 <= value <= _MAX_LOG_MULTIPLIER,
        f"0 (none) to {_MAX_LOG_MULTIPLIER:g}",
        0.0,
    )
    hp = read_uniform(reader, ROPE_NORMAL, log_multiplier=log_multiplier)
    experts = None
    if reader.integer("expert_count", 0, 1 << 16, 0):
        experts = read_experts(
            reader, hp.n_layer, n_ff=hp.n_ff[0], gating=Gating.SOFTMAX, normalised=True, weight_scale=1.0,
        )  # fmt: skip
    scale = reader.number("attention.temperature_scale", lambda value: value >= 0, "0 (none) or above", 0.0)
    return replace(
        hp,
        rope=(_with_betas(reader, cast("Rope", hp.rope[0])),) * hp.n_layer,
        experts=experts,
        own=_Temperature(scale, read_original_context(reader, hp)),
    )


def _with_betas(reader: MetadataReader, rope: Rope) -> Rope:
    fast = reader.number("rope.scaling.yarn_beta_fast", positive, "above 0", rope.beta_fast)
    slow = reader.number("rope.scaling.yarn_beta_slow", positive, "above 0", rope.beta_slow)
    rope = replace(rope, beta_fast=fast, beta_slow=slow)
    check_rope(reader, rope)
    return rope


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = [*embedding_and_output(hp), *rope_factor_weights(hp.n_rot)]
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il)
        specs += attention_weights(hp, il, biases=True)
        specs += norm(hp, "ffn_norm", il)
        specs += gated_ffn_weights(hp, il, biases=True) if hp.experts is None else expert_weights(hp, il)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    temperature = cast("_Temperature", g.hp.own)
    growth = g.of_positions("inp_attn_temperature", temperature.of_positions) if temperature.scale else None
    factors = g.rope_factors()

    def attention(g: ModelGraph, x: Tensor, il: int) -> Tensor | None:
        q, k, v = g.qkv(x, il)
        q = g.rope(q, g.hp.rope[il], f"blk.{il}.q_rope", factors)
        k = g.rope(k, g.hp.rope[il], f"blk.{il}.k_rope", factors)
        if growth is not None:
            q = g.b.mul(q, growth, f"blk.{il}.q_tempered")
        return g.attention(il, q, k, v, g.hp.attention_scale)

    return pre_norm_decoder(g, attention, dense_or_expert_ffn)


ARCHITECTURE = Architecture("mistral3", hyperparameters, tensors, graph)
