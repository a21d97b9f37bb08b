"""`llama4`: Llama 4 Scout and Maverick, text.

Three layers of four see the chunk of positions that a query is in, and rotate; the fourth sees everything, does not
rotate, and its queries grow with their position (`models/temperature.py`). RMS norms without weights follow the
rotation, but in Maverick. Layers may have experts: what goes into a chosen one is weighted, a shared one is beside it.
Meta 2025, https://ai.meta.com/blog/llama-4-multimodal-intelligence/; llama.cpp's src/models/llama4.cpp.
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
)
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import pre_norm_decoder
from ggml_engine.models.expert_ffn import (
    dense_or_expert_weights,
    expert_ffn,
    experts_of,
    has_experts,
    shared_ffn,
)
from ggml_engine.models.experts import Gating, read_expert_length, read_experts
from ggml_engine.models.metadata import MetadataReader, positive, to_f32
from ggml_engine.models.rope import alternating, check_rope
from ggml_engine.models.sizes import MAX_LAYERS, read_needed_window, read_windowed_layers
from ggml_engine.models.temperature import Temperature
from ggml_engine.models.uniform import read_uniform
from ggml_engine.models.weights import Role, TensorSpec

_PATTERN = 4  # every fourth layer does not rotate; it also sees everything, if the file does not say otherwise
_CHUNK = 8192  # whatever the file says
_TEMPERATURE = Temperature(to_f32(0.1), length=_CHUNK, offset=1.0)
_MAVERICK = 128  # experts


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    hp = read_uniform(reader, ROPE_NORMAL)
    read_needed_window(reader, _CHUNK)
    windowed = read_windowed_layers(reader, hp.n_layer, _PATTERN)
    full = cast("Rope", hp.rope[0])
    chunked = replace(full, base=reader.number("rope.freq_base_swa", positive, "above 0", full.base))
    check_rope(reader, chunked)
    rotations = alternating(windowed, chunked, full)
    n_ff = read_expert_length(reader, hp.n_layer)
    step = reader.integer("interleave_moe_layer_step", 0, MAX_LAYERS)
    experts = read_experts(
        reader,
        hp.n_layer,
        n_ff=n_ff,
        n_ff_shared=n_ff,
        gating=Gating.SIGMOID,
        normalised=False,
        weight_scale=1.0,
        is_dense=tuple(step == 0 or (il + 1) % step != 0 for il in range(hp.n_layer)),
    )
    return replace(
        hp,
        rope=tuple(None if (il + 1) % _PATTERN == 0 else rope for il, rope in enumerate(rotations)),
        window=tuple(_CHUNK if in_chunks else 0 for in_chunks in windowed),
        has_chunks=True,
        experts=experts,
    )


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    factors = TensorSpec("rope_freqs.weight", (hp.n_rot // 2,), Role.ROPE_FACTORS, 0, required=False)
    specs = [*embedding_and_output(hp), factors]
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il)
        specs += attention_weights(hp, il, biases=True, output_bias=False)
        specs += norm(hp, "ffn_norm", il)
        specs += dense_or_expert_weights(hp, il)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    factors = g.rope_factors()
    has_norms = experts_of(g.hp).n_expert != _MAVERICK

    def attention(g: ModelGraph, x: Tensor, il: int) -> Tensor | None:
        q, k, v = g.qkv(x, il)
        if g.hp.rope[il] is None:
            q = _TEMPERATURE.apply(g, q, f"blk.{il}.q_tempered")
        else:
            q, k = (g.rope(part, g.hp.rope[il], f"blk.{il}.rope", factors) for part in (q, k))
            if has_norms:
                q, k = g.rms_norm(q), g.rms_norm(k)
        return g.attention(il, q, k, v, g.hp.attention_scale)

    return pre_norm_decoder(g, attention, _feed_forward)


def _feed_forward(g: ModelGraph, x: Tensor, il: int) -> Tensor:
    if not has_experts(g.hp, il):
        return g.ffn(x, il, "swiglu")
    chosen = expert_ffn(g, x, il, weights_first=True)
    return g.b.add(chosen, shared_ffn(g, x, il), f"blk.{il}.ffn_with_shared")


ARCHITECTURE = Architecture("llama4", hyperparameters, tensors, graph)
