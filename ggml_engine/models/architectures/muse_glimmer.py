"""`muse-glimmer`: Muse Glimmer.

The embeddings are normed, attention is gated before its output weight, norms stand before and after attention and
feed-forward (after with an epsilon of their own). Layers with a window rotate; every fourth sees everything and does
not. llama.cpp's src/models/muse-glimmer.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ggml_engine.ggml.ops import ROPE_NORMAL, Tensor
from ggml_engine.models.architecture import (
    Architecture,
    attention_weights,
    embedding_and_output,
    gated_ffn_weights,
    head_norms,
    matrix,
    norm,
)
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import sandwich_norm_decoder, swiglu_ffn
from ggml_engine.models.metadata import MetadataReader, inverse_sqrt_f32, positive
from ggml_engine.models.rope import alternating, check_rope, read_rope
from ggml_engine.models.sizes import read_needed_window, read_rms_eps, read_sizes, read_softcap, read_windowed_layers
from ggml_engine.models.weights import TensorSpec

_PATTERN = 4  # every fourth layer sees everything
_EPS_AFTER = 1e-8  # of the norms after attention and feed-forward
_LOGIT_CAP = 30.0


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    sizes = read_sizes(reader)
    rope = read_rope(reader, ROPE_NORMAL, sizes)
    base_windowed = reader.number("rope.freq_base_swa", positive, "above 0", rope.base)
    rope_windowed = replace(rope, base=base_windowed, scale=1.0)  # the windowed layers' positions are not scaled
    check_rope(reader, rope_windowed)
    window = read_needed_window(reader)
    windowed = read_windowed_layers(reader, sizes.n_layer, _PATTERN)
    return Hyperparameters(
        architecture="muse-glimmer",
        **sizes.keywords(),
        norm_eps=read_rms_eps(reader),
        rope=alternating(windowed, rope_windowed, None),
        window=tuple(window if flag else 0 for flag in windowed),
        attention_scale=inverse_sqrt_f32(sizes.n_embd_head_k[0]),
        logit_softcap=read_softcap(reader, "final_logit_softcapping", _LOGIT_CAP),
        logit_scale=reader.number("logit_scale", math.isfinite, "finite"),
    )


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = embedding_and_output(hp, tied=False)
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il)
        specs += attention_weights(hp, il, biases=True, output_bias=False)
        specs += head_norms(hp, il)
        specs += matrix("attn_gate", (hp.n_embd, hp.n_head[il] * hp.n_embd_head_v[il]), il)
        specs += norm(hp, "post_attention_norm", il)
        specs += norm(hp, "ffn_norm", il)
        specs += gated_ffn_weights(hp, il)
        specs += norm(hp, "post_ffw_norm", il)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    x = g.rms_norm(g.embed())
    return sandwich_norm_decoder(
        g, _attention, swiglu_ffn, x=x, eps_after=_EPS_AFTER
    )  # fmt: skip


def _attention(g: ModelGraph, x: Tensor, il: int) -> Tensor | None:
    prefix = f"blk.{il}"
    q, k, v = g.rotated_qkv(x, il)
    gate = g.linear(x, f"{prefix}.attn_gate")
    mixed = g.mixed_values(il, q, k, v, g.hp.attention_scale)
    if mixed is None:
        return None
    gated = g.b.mul(mixed, g.b.sigmoid(gate, f"{prefix}.attn_gate_sigmoid"), f"{prefix}.attn_gated")
    return g.linear(gated, f"{prefix}.attn_output")


ARCHITECTURE = Architecture("muse-glimmer", hyperparameters, tensors, graph)
