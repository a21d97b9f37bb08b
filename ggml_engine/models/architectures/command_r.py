"""`command-r`: Command R and R+, Aya.

Attention and feed-forward side by side behind one layer norm without bias, rotation in pairs (NORMAL), the embedding as
output, scaled logits. R+ has norms of q and k, with weights of each head's own. Cohere 2024, the models' cards;
llama.cpp's src/models/command-r.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

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
from ggml_engine.models.decoder import parallel_decoder, self_attention, swiglu_ffn
from ggml_engine.models.metadata import MetadataReader
from ggml_engine.models.sizes import read_scale
from ggml_engine.models.uniform import read_uniform
from ggml_engine.models.weights import TensorSpec

_LAYERS_WITH_HEAD_NORMS = 64  # models of so many and more have them


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    hp = read_uniform(reader, ROPE_NORMAL, has_layer_norm=True, has_whole_heads=False)
    return replace(hp, logit_scale=read_scale(reader, "logit_scale", 1.0))


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
        self_attention,
        swiglu_ffn,
        added_last="attention",
    )


ARCHITECTURE = Architecture("command-r", hyperparameters, tensors, graph)
