"""`qwen2moe`: Qwen 1.5 and 2 with experts.

As Qwen 2, with experts whose weights are not normalised and shared ones behind a gate of their own. Yang et al. 2024,
arXiv:2407.10671; llama.cpp's src/models/qwen2moe.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ggml_engine.ggml.ops import ROPE_NEOX, Tensor
from ggml_engine.models.architecture import Architecture, attention_weights, embedding_and_output, norm
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import pre_norm_decoder, self_attention
from ggml_engine.models.expert_ffn import dense_or_expert_ffn, expert_weights
from ggml_engine.models.experts import Gating, read_expert_length, read_experts
from ggml_engine.models.metadata import MetadataReader
from ggml_engine.models.sizes import MAX_SIZE
from ggml_engine.models.uniform import read_uniform
from ggml_engine.models.weights import TensorSpec


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    hp = read_uniform(reader, ROPE_NEOX)
    experts = read_experts(
        reader,
        hp.n_layer,
        n_ff=read_expert_length(reader, hp.n_layer, n_ff=hp.n_ff[0]),
        n_ff_shared=reader.integer("expert_shared_feed_forward_length", 0, MAX_SIZE, 0) or hp.n_ff[0],
        gating=Gating.SOFTMAX,
        normalised=False,
        weight_scale=1.0,
    )
    return replace(hp, experts=experts)


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = embedding_and_output(hp, tied=False)
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il)
        specs += attention_weights(hp, il, biases=True, output_bias=False)
        specs += norm(hp, "ffn_norm", il)
        specs += expert_weights(hp, il, shared_gate=True)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    return pre_norm_decoder(g, self_attention, dense_or_expert_ffn)


ARCHITECTURE = Architecture("qwen2moe", hyperparameters, tensors, graph)
