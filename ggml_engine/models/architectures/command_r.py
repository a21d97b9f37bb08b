"""`command-r`: Command R and R+, Aya.

Attention and feed-forward side by side behind one layer norm without bias, rotation in pairs (NORMAL), the embedding as
output, scaled logits. R+ has norms of q and k, with weights of each head's own. Cohere 2024, the models' cards;
llama.cpp's src/models/command-r.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggml_engine.ggml.ops import ROPE_NORMAL, Tensor
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
from ggml_engine.models.decoder import parallel_decoder
from ggml_engine.models.metadata import MetadataReader, inverse_sqrt_f32
from ggml_engine.models.rope import read_rope
from ggml_engine.models.sizes import read_layer_norm_eps, read_scale, read_sizes
from ggml_engine.models.weights import TensorSpec

_LAYERS_WITH_HEAD_NORMS = 64  # models of so many and more have them


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    sizes = read_sizes(reader)
    return Hyperparameters(
        architecture="command-r",
        **sizes.keywords(),
        norm_eps=read_layer_norm_eps(reader),
        has_layer_norm=True,
        rope=(read_rope(reader, ROPE_NORMAL, sizes),) * sizes.n_layer,
        window=(0,) * sizes.n_layer,
        attention_scale=inverse_sqrt_f32(sizes.n_embd_head_k[0]),
        logit_scale=read_scale(reader, "logit_scale", 1.0),
    )


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = embedding_and_output(hp)
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il)
        if hp.n_layer >= _LAYERS_WITH_HEAD_NORMS:
            specs += head_norms(hp, il, own_weights=True)
        specs += attention_weights(hp, il, biases=True, output_bias=False)
        specs += gated_ffn_weights(hp, il)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    return parallel_decoder(
        g,
        lambda g, x, il: g.self_attention(x, il),
        lambda g, x, il: g.ffn(x, il, "swiglu"),
        added_last="attention",
    )


ARCHITECTURE = Architecture("command-r", hyperparameters, tensors, graph)
