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
    head_norms,
    norm,
)
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import sandwich_norm_decoder
from ggml_engine.models.metadata import MetadataReader, inverse_sqrt_f32, positive
from ggml_engine.models.rope import alternating, read_rope
from ggml_engine.models.sizes import read_rms_eps, read_sizes, read_softcap, read_window, read_windowed_layers
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
    windowed = read_windowed_layers(reader, sizes.n_layer, _PATTERN) if window else (False,) * sizes.n_layer
    head = sizes.n_embd // sizes.n_head[0] if sizes.n_layer == _LAYERS_27B else sizes.n_embd_head_k[0]
    return Hyperparameters(
        architecture="gemma3",
        **sizes.keywords(),
        norm_eps=read_rms_eps(reader),
        rope=alternating(windowed, rope_windowed, rope_full),
        window=tuple(window if flag else 0 for flag in windowed),
        attention_scale=inverse_sqrt_f32(head),
        logit_softcap=read_softcap(reader, "final_logit_softcapping"),
        embedding_scale=math.sqrt(sizes.n_embd),
    )


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = embedding_and_output(hp)
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il)
        specs += attention_weights(hp, il, biases=True, output_bias=False)
        specs += head_norms(hp, il)
        specs += norm(hp, "post_attention_norm", il)
        specs += norm(hp, "ffn_norm", il)
        specs += gated_ffn_weights(hp, il)
        specs += norm(hp, "post_ffw_norm", il)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    return sandwich_norm_decoder(
        g,
        lambda g, x, il: g.self_attention(x, il, scaled_queries=True),
        lambda g, x, il: g.ffn(x, il, "geglu"),
    )


ARCHITECTURE = Architecture("gemma3", hyperparameters, tensors, graph)
