"""`olmo2`: OLMo 2 and OLMo 3.

Norms of what is added and none before, queries and keys normed over all heads at once; OLMo 3 has sliding windows on
three layers of four, whose rotation is not scaled. OLMo Team 2024, arXiv:2501.00656; llama.cpp's src/models/olmo2.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ggml_engine.ggml.ops import ROPE_NEOX, Tensor
from ggml_engine.models.architecture import (
    Architecture,
    attention_weights,
    embedding_and_output,
    gated_ffn_weights,
    norm,
)
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import sandwich_norm_decoder, self_attention, swiglu_ffn
from ggml_engine.models.metadata import MetadataReader, inverse_sqrt_f32
from ggml_engine.models.rope import alternating, read_rope
from ggml_engine.models.sizes import check_whole_heads, read_rms_eps, read_sizes, read_window, read_windowed_layers
from ggml_engine.models.weights import TensorSpec

_PATTERN = 4  # every fourth layer sees everything


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    sizes = read_sizes(reader)
    check_whole_heads(reader, sizes)
    rope_full = read_rope(reader, ROPE_NEOX, sizes)
    rope_windowed = replace(rope_full, scale=1.0, ext_factor=0.0, attn_factor=1.0)
    window = read_window(reader)
    windowed = read_windowed_layers(reader, sizes.n_layer, _PATTERN) if window else (False,) * sizes.n_layer
    return Hyperparameters(
        architecture="olmo2",
        **sizes.keywords(),
        norm_eps=read_rms_eps(reader),
        rope=alternating(windowed, rope_windowed, rope_full),
        window=tuple(window if flag else 0 for flag in windowed),
        attention_scale=inverse_sqrt_f32(sizes.n_embd_head_k[0]),
    )


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = embedding_and_output(hp, tied=False)
    for il in range(hp.n_layer):
        specs += attention_weights(hp, il, biases=True, output_bias=False)
        specs += norm(hp, "attn_q_norm", il, n=hp.n_head[il] * hp.n_embd_head_k[il])
        specs += norm(hp, "attn_k_norm", il, n=hp.n_head_kv[il] * hp.n_embd_head_k[il])
        specs += norm(hp, "post_attention_norm", il)
        specs += gated_ffn_weights(hp, il)
        specs += norm(hp, "post_ffw_norm", il)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    return sandwich_norm_decoder(g, self_attention, swiglu_ffn, norms_before=False)


ARCHITECTURE = Architecture("olmo2", hyperparameters, tensors, graph)
