"""`arcee`: Arcee's foundation models.

As `llama` with a feed-forward of two matrices and squared relu (So et al. 2021, arXiv:2109.08668) between them.
Atkins et al. 2025, arcee.ai/blog/deep-dive-afm-4-5b; llama.cpp's src/models/arcee.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggml_engine.ggml.ops import ROPE_NORMAL, Tensor
from ggml_engine.models.architecture import (
    Architecture,
    attention_weights,
    embedding_and_output,
    ffn_weights,
    norm,
    rope_factor_weights,
)
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import pre_norm_decoder
from ggml_engine.models.metadata import MetadataReader
from ggml_engine.models.uniform import read_uniform
from ggml_engine.models.weights import TensorSpec


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    return read_uniform(reader, ROPE_NORMAL)


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = [*embedding_and_output(hp), *rope_factor_weights(hp.n_rot)]
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il)
        specs += attention_weights(hp, il, biases=True, output_bias=False)
        specs += norm(hp, "ffn_norm", il)
        specs += ffn_weights(hp, il)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    factors = g.rope_factors()
    return pre_norm_decoder(
        g,
        lambda g, x, il: g.self_attention(x, il, factors),
        lambda g, x, il: g.ffn(x, il, "relu_squared"),
    )


ARCHITECTURE = Architecture("arcee", hyperparameters, tensors, graph)
