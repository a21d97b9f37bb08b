"""`ernie4_5-moe`: ERNIE 4.5 with experts, text.

As `ernie4_5`, with experts in every so many layers after the leading dense ones, an optional bias that moves their
choice, and optional shared ones. Baidu 2025, ERNIE 4.5 Technical Report; llama.cpp's src/models/ernie4-5-moe.cpp, which
takes no dense layers between those with experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ggml_engine.ggml.ops import ROPE_NORMAL, Tensor
from ggml_engine.models.architecture import (
    Architecture,
    attention_weights,
    embedding_and_output,
    norm,
)
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import pre_norm_decoder, self_attention
from ggml_engine.models.expert_ffn import dense_or_expert_ffn, dense_or_expert_weights
from ggml_engine.models.experts import Gating, read_expert_length, read_experts, read_leading_dense
from ggml_engine.models.metadata import MetadataReader
from ggml_engine.models.sizes import MAX_LAYERS, MAX_SIZE
from ggml_engine.models.uniform import read_uniform
from ggml_engine.models.weights import TensorSpec


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    hp = read_uniform(reader, ROPE_NORMAL)
    leading = read_leading_dense(reader, hp.n_layer)
    step = reader.integer("interleave_moe_layer_step", 1, MAX_LAYERS)
    experts = read_experts(
        reader,
        hp.n_layer,
        n_ff=read_expert_length(reader, hp.n_layer),
        n_ff_shared=reader.integer("expert_shared_feed_forward_length", 0, MAX_SIZE, 0),
        gating=Gating.SOFTMAX,
        normalised=True,
        weight_scale=1.0,
        is_dense=tuple(dense or (il + 1) % step != 0 for il, dense in enumerate(leading)),
    )
    return replace(hp, experts=experts)


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = embedding_and_output(hp)
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il)
        specs += attention_weights(hp, il, biases=True)
        specs += norm(hp, "ffn_norm", il)
        specs += dense_or_expert_weights(hp, il, selection_bias=False)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    return pre_norm_decoder(g, self_attention, dense_or_expert_ffn)


ARCHITECTURE = Architecture("ernie4_5-moe", hyperparameters, tensors, graph)
