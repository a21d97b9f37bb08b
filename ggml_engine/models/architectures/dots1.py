"""`dots1`: dots.llm1.

Norms of q and k, leading dense layers, then experts that a bias may help to choose, and shared ones beside them. Huo et
al. 2025, arXiv:2506.05767; llama.cpp's src/models/dots1.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ggml_engine.ggml.ops import ROPE_NEOX, Tensor
from ggml_engine.models.architecture import (
    Architecture,
    attention_weights,
    embedding_and_output,
    head_norms,
    norm,
)
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import pre_norm_decoder, self_attention
from ggml_engine.models.expert_ffn import dense_or_expert_ffn, dense_or_expert_weights
from ggml_engine.models.experts import read_expert_length, read_experts, read_gating, read_leading_dense
from ggml_engine.models.metadata import MetadataReader
from ggml_engine.models.sizes import MAX_SIZE
from ggml_engine.models.uniform import read_uniform
from ggml_engine.models.weights import TensorSpec


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    hp = read_uniform(reader, ROPE_NEOX)
    n_ff = read_expert_length(reader, hp.n_layer)
    experts = read_experts(
        reader,
        hp.n_layer,
        n_ff=n_ff,
        n_ff_shared=n_ff * reader.integer("expert_shared_count", 1, MAX_SIZE),
        gating=read_gating(reader, None),
        is_dense=read_leading_dense(reader, hp.n_layer),
    )
    return replace(hp, experts=experts)


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = embedding_and_output(hp, tied=False)
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il)
        specs += attention_weights(hp, il, biases=True, output_bias=False)
        specs += head_norms(hp, il)
        specs += norm(hp, "ffn_norm", il)
        specs += dense_or_expert_weights(hp, il, selection_bias=False)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    return pre_norm_decoder(g, self_attention, dense_or_expert_ffn)


ARCHITECTURE = Architecture("dots1", hyperparameters, tensors, graph)
