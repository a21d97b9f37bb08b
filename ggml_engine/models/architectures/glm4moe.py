"""`glm4moe`: GLM 4.5, 4.6 and 4.7, text; Solar Open.

Leading dense layers, then experts that a bias helps to choose and shared ones beside them, rotation of a part of each
head, norms of q and k in the largest. Layers that predict further tokens are left out. Zeng et al. 2025,
arXiv:2508.06471; llama.cpp's src/models/glm4-moe.cpp, which accumulates some products in f32 for this model's sake.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ggml_engine.errors import HyperparameterError
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
from ggml_engine.models.decoder import pre_norm_decoder
from ggml_engine.models.expert_ffn import dense_or_expert_ffn, dense_or_expert_weights
from ggml_engine.models.experts import Gating, read_expert_length, read_experts, read_gating, read_leading_dense
from ggml_engine.models.metadata import MetadataReader, inverse_sqrt_f32
from ggml_engine.models.rope import read_rope
from ggml_engine.models.sizes import MAX_SIZE, read_rms_eps, read_sizes
from ggml_engine.models.weights import TensorSpec


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    sizes = read_sizes(reader)
    head, head_v = sizes.n_embd_head_k[0], sizes.n_embd_head_v[0]
    if head_v != head:
        raise HyperparameterError(reader.key("attention.value_length"), f"must be key_length {head}, is {head_v}")
    _check_sections(reader)
    n_ff = read_expert_length(reader, sizes.n_layer, n_ff=sizes.n_ff[0])
    experts = read_experts(
        reader,
        sizes.n_layer,
        n_ff=n_ff,
        n_ff_shared=n_ff * reader.integer("expert_shared_count", 1, MAX_SIZE),
        gating=read_gating(reader, Gating.SIGMOID),
        is_dense=read_leading_dense(reader, sizes.n_layer),
    )
    return Hyperparameters(
        architecture="glm4moe",
        **sizes.keywords(),
        norm_eps=read_rms_eps(reader),
        rope=(read_rope(reader, ROPE_NEOX, sizes),) * sizes.n_layer,
        window=(0,) * sizes.n_layer,
        attention_scale=inverse_sqrt_f32(head),
        experts=experts,
    )


def _check_sections(reader: MetadataReader) -> None:
    """Models that see rotate by time, height, width and one more number; in text the first three are the position."""
    if "rope.dimension_sections" not in reader:
        return
    sections = reader.per_layer("rope.dimension_sections", 4, 0, MAX_SIZE)
    if sections[0] and sections[1] and sections[3]:
        raise HyperparameterError(reader.key("rope.dimension_sections"), f"the last must be 0 for text, is {sections}")


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = embedding_and_output(hp)
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il)
        specs += attention_weights(hp, il, biases=True, output_bias=False)
        specs += head_norms(hp, il, required=False)
        specs += norm(hp, "post_attention_norm", il)
        specs += dense_or_expert_weights(hp, il, selection_bias=True)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    return pre_norm_decoder(
        g,
        lambda g, x, il: g.self_attention(x, il, f32_accumulation=True),
        partial(dense_or_expert_ffn, f32_accumulation=True),
        ffn_norm="post_attention_norm",
    )


ARCHITECTURE = Architecture("glm4moe", hyperparameters, tensors, graph)
