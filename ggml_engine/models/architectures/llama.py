"""`llama`: Llama 1 to 3, Mistral, Mixtral, SmolLM2, TinyLlama and everything else in their shape.

Pre-norm, grouped queries, rotation in pairs (NORMAL), optional biases, optional factors of frequencies, optional
experts. Touvron et al. 2023, arXiv:2302.13971; Jiang et al. 2024, arXiv:2401.04088; llama.cpp's src/models/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggml_engine.ggml.ops import ROPE_NORMAL, Tensor
from ggml_engine.models.architecture import (
    Architecture,
    attention_weights,
    embedding_and_output,
    norm,
    rope_factor_weights,
)
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import pre_norm_decoder
from ggml_engine.models.expert_ffn import dense_or_expert_ffn, dense_or_expert_weights
from ggml_engine.models.experts import Gating, read_experts
from ggml_engine.models.metadata import MetadataReader, inverse_sqrt_f32
from ggml_engine.models.rope import read_long_context, read_rope
from ggml_engine.models.sizes import check_whole_rotation, read_rms_eps, read_sizes
from ggml_engine.models.weights import TensorSpec


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    sizes = read_sizes(reader)
    check_whole_rotation(reader, sizes)
    experts = None
    if reader.integer("expert_count", 0, 1 << 16, 0):
        experts = read_experts(
            reader, sizes.n_layer, n_ff=sizes.n_ff[0], gating=Gating.SOFTMAX, normalised=True, weight_scale=1.0,
        )  # fmt: skip
    return Hyperparameters(
        architecture="llama",
        **sizes.keywords(),
        norm_eps=read_rms_eps(reader),
        rope=(read_rope(reader, ROPE_NORMAL, sizes),) * sizes.n_layer,
        n_ctx_long=read_long_context(reader, sizes),
        window=(0,) * sizes.n_layer,
        attention_scale=inverse_sqrt_f32(sizes.n_embd_head_k[0]),
        experts=experts,
    )


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = [*embedding_and_output(hp), *rope_factor_weights(hp.n_rot)]
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il)
        specs += attention_weights(hp, il, biases=True)
        specs += norm(hp, "ffn_norm", il)
        specs += dense_or_expert_weights(hp, il, dense_biases=True)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    factors = g.rope_factors()
    return pre_norm_decoder(g, lambda g, x, il: g.self_attention(x, il, factors), dense_or_expert_ffn)


ARCHITECTURE = Architecture("llama", hyperparameters, tensors, graph)
