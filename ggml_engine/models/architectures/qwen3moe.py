"""`qwen3moe`: Qwen 3 with experts.

As Qwen 3, with experts in every layer whose weights are normalised. Yang et al. 2025, arXiv:2505.09388; llama.cpp's
src/models/qwen3moe.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ggml_engine.ggml.ops import ROPE_NEOX, Tensor
from ggml_engine.models.architecture import Architecture, attention_weights, embedding_and_output, head_norms, norm
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import pre_norm_decoder, self_attention
from ggml_engine.models.expert_ffn import expert_ffn, expert_weights
from ggml_engine.models.experts import Gating, read_expert_length, read_experts
from ggml_engine.models.metadata import MetadataReader
from ggml_engine.models.uniform import read_uniform
from ggml_engine.models.weights import TensorSpec


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    hp = read_uniform(reader, ROPE_NEOX)
    experts = read_experts(
        reader,
        hp.n_layer,
        n_ff=read_expert_length(reader, hp.n_layer, n_ff=hp.n_ff[0]),
        gating=Gating.SOFTMAX,
        normalised=True,
        weight_scale=1.0,
    )
    return replace(hp, experts=experts)


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = embedding_and_output(hp)
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il)
        specs += attention_weights(hp, il, biases=True, output_bias=False)
        specs += head_norms(hp, il)
        specs += norm(hp, "ffn_norm", il)
        specs += expert_weights(hp, il)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    return pre_norm_decoder(g, self_attention, expert_ffn)


ARCHITECTURE = Architecture("qwen3moe", hyperparameters, tensors, graph)
