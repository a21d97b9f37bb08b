"""`phi2`: Phi 1, 1.5 and 2.

Attention and feed-forward side by side behind one layer norm, biases everywhere, the output's included, rotation in
halves (NEOX) of a part of every head, queries scaled instead of scores. Li et al. 2023, arXiv:2309.05463; llama.cpp's
src/models/phi2.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggml_engine.ggml.ops import ROPE_NEOX, Tensor
from ggml_engine.models.architecture import (
    Architecture,
    attention_weights,
    embedding_and_output,
    ffn_weights,
    norm,
    with_biases,
)
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import parallel_decoder
from ggml_engine.models.metadata import MetadataReader
from ggml_engine.models.uniform import read_uniform
from ggml_engine.models.weights import TensorSpec


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    return read_uniform(reader, ROPE_NEOX, has_layer_norm=True, has_whole_heads=False)


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = embedding_and_output(hp, tied=False, norm_bias=True, output_bias=True)
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il, bias=True)
        specs += attention_weights(hp, il, biases=True)
        specs += ffn_weights(hp, il, biases=True)
    return with_biases(specs, "output", "attn_output", "ffn_up", "ffn_down")


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    return parallel_decoder(
        g,
        lambda g, x, il: g.self_attention(x, il, scaled_queries=True),
        lambda g, x, il: g.ffn(x, il, "gelu"),
        added_last="residual",
    )


ARCHITECTURE = Architecture("phi2", hyperparameters, tensors, graph)
