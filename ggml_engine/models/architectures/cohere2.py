"""`cohere2`: Command R7B and A.

As `command-r`, with sliding windows on three layers of four; the fourth sees everything and does not rotate. Yang et
al. 2025, arXiv:2501.18795 (the layers); Cohere 2025, arXiv:2504.00698; llama.cpp's src/models/cohere2.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggml_engine.ggml.ops import ROPE_NORMAL, Tensor
from ggml_engine.models.architecture import (
    Architecture,
    attention_weights,
    embedding_and_output,
    gated_ffn_weights,
    norm,
)
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import parallel_decoder, self_attention, swiglu_ffn
from ggml_engine.models.metadata import MetadataReader, inverse_sqrt_f32
from ggml_engine.models.rope import alternating, read_rope
from ggml_engine.models.sizes import (
    read_layer_norm_eps,
    read_needed_window,
    read_scale,
    read_sizes,
    read_windowed_layers,
)
from ggml_engine.models.weights import TensorSpec

_PATTERN = 4  # every fourth layer sees everything


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    sizes = read_sizes(reader)
    window = read_needed_window(reader)
    windowed = read_windowed_layers(reader, sizes.n_layer, _PATTERN)
    return Hyperparameters(
        architecture="cohere2",
        **sizes.keywords(),
        norm_eps=read_layer_norm_eps(reader),
        has_layer_norm=True,
        rope=alternating(windowed, read_rope(reader, ROPE_NORMAL, sizes), None),
        window=tuple(window if flag else 0 for flag in windowed),
        attention_scale=inverse_sqrt_f32(sizes.n_embd_head_k[0]),
        logit_scale=read_scale(reader, "logit_scale"),
    )


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = embedding_and_output(hp)
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il)
        specs += attention_weights(hp, il, biases=True, output_bias=False)
        specs += gated_ffn_weights(hp, il)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    return parallel_decoder(
        g,
        self_attention,
        swiglu_ffn,
        added_last="attention",
    )


ARCHITECTURE = Architecture("cohere2", hyperparameters, tensors, graph)
