"""`gemma`: Gemma 1.

Pre-norm, gated by GELU, embeddings that are scaled and tied to the output; the queries are scaled, not the scores.
Gemma Team 2024, arXiv:2403.08295; llama.cpp's src/models/gemma.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

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
from ggml_engine.models.decoder import pre_norm_decoder
from ggml_engine.models.metadata import MetadataReader, inverse_sqrt_f32
from ggml_engine.models.rope import read_rope
from ggml_engine.models.sizes import read_rms_eps, read_sizes
from ggml_engine.models.weights import TensorSpec


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    sizes = read_sizes(reader)
    return Hyperparameters(
        architecture="gemma",
        **sizes.keywords(),
        norm_eps=read_rms_eps(reader),
        rope=(read_rope(reader, ROPE_NEOX, sizes),) * sizes.n_layer,
        window=(0,) * sizes.n_layer,
        attention_scale=inverse_sqrt_f32(sizes.n_embd_head_v[0]),
        embedding_scale=math.sqrt(sizes.n_embd),
    )


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = embedding_and_output(hp)
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il)
        specs += attention_weights(hp, il, biases=True, output_bias=False)
        specs += norm(hp, "ffn_norm", il)
        specs += gated_ffn_weights(hp, il)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    return pre_norm_decoder(
        g,
        lambda g, x, il: g.self_attention(x, il, scaled_queries=True),
        lambda g, x, il: g.ffn(x, il, "geglu"),
    )


ARCHITECTURE = Architecture("gemma", hyperparameters, tensors, graph)
