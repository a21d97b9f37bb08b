"""`hunyuan-dense`: Hunyuan, dense and text.

Norms of q and k after rotation in halves (NEOX), whose base may be stretched for long contexts (bloc97 2023,
"NTK-aware scaled RoPE"). Tencent 2025, github.com/Tencent-Hunyuan; llama.cpp's src/models/hunyuan-vl.cpp, which
`hunyuan-dense` shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from ggml_engine.errors import HyperparameterError
from ggml_engine.ggml.ops import ROPE_NEOX, Rope, Tensor
from ggml_engine.models.architecture import (
    Architecture,
    attention_weights,
    embedding_and_output,
    gated_ffn_weights,
    head_norms,
    norm,
)
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import pre_norm_decoder, swiglu_ffn
from ggml_engine.models.metadata import MetadataReader, to_f32
from ggml_engine.models.rope import check_rope
from ggml_engine.models.uniform import read_uniform
from ggml_engine.models.weights import TensorSpec


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    hp = read_uniform(reader, ROPE_NEOX)
    alpha = reader.number("rope.scaling.alpha", lambda value: value >= 0, "0 (none) or above", 0.0)
    if not alpha:
        return hp
    return replace(hp, rope=(_stretched(reader, cast("Rope", hp.rope[0]), alpha),) * hp.n_layer)


def _stretched(reader: MetadataReader, rope: Rope, alpha: float) -> Rope:
    """The base times alpha ^ (n / (n - 2)), for n rotated dimensions."""
    if rope.n_dims == 2:
        raise HyperparameterError(reader.key("rope.scaling.alpha"), "stretches no rotation of 2 dimensions")
    growth = to_f32(alpha ** to_f32(rope.n_dims / (rope.n_dims - 2)))
    rope = replace(rope, base=to_f32(rope.base * growth))
    check_rope(reader, rope)
    return rope


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = embedding_and_output(hp)
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il)
        specs += attention_weights(hp, il, biases=True, output_bias=False)
        specs += head_norms(hp, il)
        specs += norm(hp, "ffn_norm", il)
        specs += gated_ffn_weights(hp, il)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    return pre_norm_decoder(g, _attention, swiglu_ffn)


def _attention(g: ModelGraph, x: Tensor, il: int) -> Tensor | None:
    prefix, rope = f"blk.{il}", g.hp.rope[il]
    q, k, v = g.qkv(x, il)
    q = g.norm(g.rope(q, rope, f"{prefix}.q_rope"), f"{prefix}.attn_q_norm")
    k = g.norm(g.rope(k, rope, f"{prefix}.k_rope"), f"{prefix}.attn_k_norm")
    return g.attention(il, q, k, v, g.hp.attention_scale)


ARCHITECTURE = Architecture("hunyuan-dense", hyperparameters, tensors, graph)
