"""`exaone4`: EXAONE 4.

Norms of what is added and none before, norms of query and key heads. The model of 64 layers has sliding windows on
three layers of four, and does not rotate the others. LG AI Research 2025, arXiv:2507.11407; llama.cpp's
src/models/exaone4.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

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
from ggml_engine.models.decoder import sandwich_norm_decoder, swiglu_ffn
from ggml_engine.models.metadata import MetadataReader, inverse_sqrt_f32
from ggml_engine.models.rope import alternating, read_rope
from ggml_engine.models.sizes import (
    check_whole_heads,
    read_needed_window,
    read_rms_eps,
    read_sizes,
    read_windowed_layers,
)
from ggml_engine.models.weights import Role, TensorSpec

_LAYERS_WITH_WINDOWS = 64
_WINDOW = 4096
_PATTERN = 4  # every fourth layer sees everything


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    sizes = read_sizes(reader)
    check_whole_heads(reader, sizes)
    n_layer = sizes.n_layer
    rope = read_rope(reader, ROPE_NEOX, sizes)
    rope_full: Rope | None = rope
    windowed, window = (False,) * n_layer, 0
    if n_layer == _LAYERS_WITH_WINDOWS:
        windowed, window = read_windowed_layers(reader, n_layer, _PATTERN), read_needed_window(reader, _WINDOW)
        rope_full = None
    return Hyperparameters(
        architecture="exaone4",
        **sizes.keywords(),
        norm_eps=read_rms_eps(reader),
        rope=alternating(windowed, rope, rope_full),
        window=tuple(window if flag else 0 for flag in windowed),
        attention_scale=inverse_sqrt_f32(sizes.n_embd_head_k[0]),
    )


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = embedding_and_output(hp)
    specs.append(TensorSpec("rope_freqs.weight", (hp.n_rot // 2,), Role.ROPE_FACTORS, 0, required=False))
    for il in range(hp.n_layer):
        specs += attention_weights(hp, il, biases=True, output_bias=False)
        specs += head_norms(hp, il)
        specs += norm(hp, "post_attention_norm", il)
        specs += gated_ffn_weights(hp, il)
        specs += norm(hp, "post_ffw_norm", il)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    factors = g.rope_factors()
    return sandwich_norm_decoder(
        g,
        lambda g, x, il: g.self_attention(x, il, factors),
        swiglu_ffn,
        norms_before=False,
    )


ARCHITECTURE = Architecture("exaone4", hyperparameters, tensors, graph)
