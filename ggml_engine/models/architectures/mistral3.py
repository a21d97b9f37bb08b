"""`mistral3`: Mistral Small 3.1 and later, Ministral 3, text.

As `llama`, with YaRN's betas and logarithmic multiplier from the file, and queries that grow with the logarithm of
their position beyond the original context (`models/temperature.py`). llama.cpp's src/models/mistral3.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from ggml_engine.ggml.ops import ROPE_NORMAL, Rope, Tensor
from ggml_engine.models.architecture import (
    Architecture,
    attention_weights,
    embedding_and_output,
    norm,
    rope_factor_weights,
)
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import pre_norm_decoder
from ggml_engine.models.expert_ffn import dense_or_expert_ffn, dense_or_expert_weights
from ggml_engine.models.experts import Gating, read_experts
from ggml_engine.models.metadata import MetadataReader, positive
from ggml_engine.models.rope import check_rope, read_log_multiplier, read_original_context
from ggml_engine.models.temperature import Temperature, read_temperature
from ggml_engine.models.uniform import read_uniform
from ggml_engine.models.weights import TensorSpec


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    hp = read_uniform(reader, ROPE_NORMAL, log_multiplier=read_log_multiplier(reader))
    experts = None
    if reader.integer("expert_count", 0, 1 << 16, 0):
        experts = read_experts(
            reader, hp.n_layer, n_ff=hp.n_ff[0], gating=Gating.SOFTMAX, normalised=True, weight_scale=1.0,
        )  # fmt: skip
    return replace(
        hp,
        rope=(_with_betas(reader, cast("Rope", hp.rope[0])),) * hp.n_layer,
        experts=experts,
        own=read_temperature(reader, length=read_original_context(reader, hp)),
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
        specs += dense_or_expert_weights(hp, il, dense_biases=True)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    temperature = cast("Temperature", g.hp.own)
    factors = g.rope_factors()

    def attention(g: ModelGraph, x: Tensor, il: int) -> Tensor | None:
        q, k, v = g.rotated_qkv(x, il, factors)
        q = temperature.apply(g, q, f"blk.{il}.q_tempered")
        return g.attention(il, q, k, v, g.hp.attention_scale)

    return pre_norm_decoder(g, attention, dense_or_expert_ffn)


ARCHITECTURE = Architecture("mistral3", hyperparameters, tensors, graph)
