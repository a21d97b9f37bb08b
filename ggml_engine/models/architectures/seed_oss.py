"""`seed_oss`: Seed-OSS.

Biases of q, k and v, rotation in halves (NEOX), and a norm before the feed-forward that files call
`post_attention_norm`. ByteDance Seed 2025, github.com/ByteDance-Seed/seed-oss; llama.cpp's src/models/seed-oss.cpp.
"""

from __future__ import annotations

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
from ggml_engine.models.metadata import MetadataReader
from ggml_engine.models.uniform import read_uniform
from ggml_engine.models.weights import TensorSpec

_FFN_NORM = "post_attention_norm"


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    return read_uniform(reader, ROPE_NEOX)


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = embedding_and_output(hp)
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il)
        specs += attention_weights(hp, il, biases=True, output_bias=False)
        specs += norm(hp, _FFN_NORM, il)
        specs += gated_ffn_weights(hp, il)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    return pre_norm_decoder(g, ffn_norm=_FFN_NORM)


ARCHITECTURE = Architecture("seed_oss", hyperparameters, tensors, graph)
