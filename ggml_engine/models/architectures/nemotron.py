"""`nemotron`: Nemotron 3 and 4, and Minitron.

Pre-norm by layer norms with biases, grouped queries, rotation in halves (NEOX) of a part of every head, a feed-forward
of squared ReLUs without gate, optional biases. Parmar et al. 2024, arXiv:2402.16819; llama.cpp's
src/models/nemotron.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggml_engine.ggml.ops import ROPE_NEOX, Tensor
from ggml_engine.models.architecture import Architecture, attention_weights, embedding_and_output, ffn_weights, norm
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import pre_norm_decoder, self_attention
from ggml_engine.models.metadata import MetadataReader
from ggml_engine.models.uniform import read_uniform
from ggml_engine.models.weights import TensorSpec


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    return read_uniform(reader, ROPE_NEOX, has_layer_norm=True, has_whole_heads=False)


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = embedding_and_output(hp, tied=False, norm_bias=True)
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il, bias=True)
        specs += attention_weights(hp, il, biases=True)
        specs += norm(hp, "ffn_norm", il, bias=True)
        specs += ffn_weights(hp, il, biases=True)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    return pre_norm_decoder(
        g, self_attention, lambda g, x, il: g.ffn(x, il, "relu_squared")
    )  # fmt: skip


ARCHITECTURE = Architecture("nemotron", hyperparameters, tensors, graph)
