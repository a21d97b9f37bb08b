"""`gemma3`: Gemma 3, text.

Sliding windows on five layers of six, two rope bases, norms of q and k and after attention and feed-forward, scaled and
tied embeddings. Gemma Team 2025, arXiv:2503.19786; llama.cpp's src/models/gemma3.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ggml_engine.ggml.ops import ROPE_NEOX, Tensor
from ggml_engine.models.architecture import (
    Architecture,
    attention_weights,
    embedding_and_output,
    gated_ffn_weights,
    norm_weight,
)
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import (
    Hyperparameters,
    MetadataReader,
    inverse_sqrt_f32,
    positive,
    read_rms_eps,
    read_rope,
    read_sizes,
    read_window,
)
from ggml_engine.models.weights import TensorSpec

_PATTERN = 6  # every sixth layer sees everything
_LAYERS_27B = 62  # the only size that scales by embedding over heads


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    sizes = read_sizes(reader)
    rope_full = read_rope(reader, ROPE_NEOX, sizes)
    # the scaling of long contexts is for the layers that see far
    base_windowed = reader.number("rope.freq_base_swa", positive, "above 0", 10000.0)
    rope_windowed = replace(rope_full, base=base_windowed, scale=1.0)
    window = read_window(reader)
    windowed = _windowed_layers(reader, sizes.n_layer) if window else (False,) * sizes.n_layer
    head = sizes.n_embd // sizes.n_head[0] if sizes.n_layer == _LAYERS_27B else sizes.n_embd_head_k
    return Hyperparameters.of(
        "gemma3",
        sizes,
        norm_rms_eps=read_rms_eps(reader),
        rope=tuple(rope_windowed if flag else rope_full for flag in windowed),
        window=tuple(window if flag else 0 for flag in windowed),
        attention_scale=inverse_sqrt_f32(head),
        logit_softcap=reader.number(
            "final_logit_softcapping", lambda cap: cap == 0 or cap > 1e-3, "0 (none) or above 0.001", 0.0
        ),
    )


def _windowed_layers(reader: MetadataReader, n_layer: int) -> tuple[bool, ...]:
    flags = reader.flags("attention.sliding_window_pattern", n_layer)
    if flags is not None:
        return flags
    pattern = reader.integer("attention.sliding_window_pattern", 0, 1 << 16, _PATTERN)
    return tuple(pattern == 0 or il % pattern < pattern - 1 for il in range(n_layer))


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = embedding_and_output(hp)
    for il in range(hp.n_layer):
        specs.append(norm_weight("attn_norm", hp.n_embd, il))
        specs += attention_weights(hp, il, biases=False)
        specs.append(norm_weight("attn_q_norm", hp.n_embd_head_k, il))
        specs.append(norm_weight("attn_k_norm", hp.n_embd_head_k, il))
        specs.append(norm_weight("post_attention_norm", hp.n_embd, il))
        specs.append(norm_weight("ffn_norm", hp.n_embd, il))
        specs += gated_ffn_weights(hp, il, biases=False)
        specs.append(norm_weight("post_ffw_norm", hp.n_embd, il))
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    hp = g.hp
    x = g.embed(math.sqrt(hp.n_embd))
    for il in range(hp.n_layer):
        prefix = f"blk.{il}"
        q, k, v = g.qkv(g.norm(x, f"{prefix}.attn_norm"), il)
        q = g.rope(g.norm(q, f"{prefix}.attn_q_norm"), hp.rope[il], f"{prefix}.q_rope")
        k = g.rope(g.norm(k, f"{prefix}.attn_k_norm"), hp.rope[il], f"{prefix}.k_rope")
        q = g.b.scale(q, hp.attention_scale, f"{prefix}.q_scaled")
        attended = g.attention(il, q, k, v, 1.0)
        if attended is None:
            return None
        if il == hp.n_layer - 1:
            attended, x = g.only_outputs(attended), g.only_outputs(x)
        attended = g.norm(attended, f"{prefix}.post_attention_norm")
        x = g.b.add(attended, x, f"{prefix}.attn_residual")
        fed = g.geglu_ffn(g.norm(x, f"{prefix}.ffn_norm"), il)
        x = g.b.add(g.norm(fed, f"{prefix}.post_ffw_norm"), x, f"{prefix}.ffn_residual")
    logits = g.logits(x)
    return g.softcap(logits, hp.logit_softcap) if hp.logit_softcap else logits


ARCHITECTURE = Architecture("gemma3", hyperparameters, tensors, graph)
