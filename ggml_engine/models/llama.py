"""`llama`: Llama 1 to 3, Mistral, SmolLM2, TinyLlama and everything else in their shape (dense).

Pre-norm, grouped queries, rotation in pairs (NORMAL), optional biases, optional Llama-3 frequency factors.
Touvron et al. 2023, arXiv:2302.13971; llama.cpp's src/models/llama.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggml_engine.errors import HyperparameterError, UnsupportedArchitectureError
from ggml_engine.ggml.ops import ROPE_NORMAL, Tensor
from ggml_engine.models.architecture import (
    Architecture,
    attention_weights,
    embedding_and_output,
    gated_ffn_weights,
    norm_weight,
)
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import (
    Hyperparameters,
    MetadataReader,
    inverse_sqrt_f32,
    read_rms_eps,
    read_rope,
    read_sizes,
)
from ggml_engine.models.weights import Role, TensorSpec


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    sizes = read_sizes(reader)
    if sizes.n_rot != sizes.n_embd_head_k:
        reason = f"must equal the head size {sizes.n_embd_head_k}, is {sizes.n_rot}"
        raise HyperparameterError(reader.key("rope.dimension_count"), reason)
    if reader.integer("expert_count", 0, 1 << 16, 0):
        raise UnsupportedArchitectureError("llama with experts (Mixtral) has no graph here yet; dense llama has")
    rope = read_rope(reader, ROPE_NORMAL, sizes)
    return Hyperparameters.of(
        "llama",
        sizes,
        norm_rms_eps=read_rms_eps(reader),
        rope=(rope,) * sizes.n_layer,
        window=(0,) * sizes.n_layer,
        attention_scale=inverse_sqrt_f32(sizes.n_embd_head_k),
    )


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = embedding_and_output(hp)
    for il in range(hp.n_layer):
        specs.append(norm_weight("attn_norm", hp.n_embd, il))
        specs += attention_weights(hp, il, biases=True)
        specs.append(norm_weight("ffn_norm", hp.n_embd, il))
        specs += gated_ffn_weights(hp, il, biases=True)
    factors = (hp.rope[0].n_dims // 2,)
    specs.append(TensorSpec("rope_freqs.weight", factors, Role.ROPE_FACTORS, 0, required=False))
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    hp = g.hp
    factors = g.weights.get("rope_freqs.weight")
    x = g.embed()
    for il in range(hp.n_layer):
        prefix = f"blk.{il}"
        q, k, v = g.qkv(g.norm(x, f"{prefix}.attn_norm"), il)
        q = g.rope(q, hp.rope[il], f"{prefix}.q_rope", factors)
        k = g.rope(k, hp.rope[il], f"{prefix}.k_rope", factors)
        attended = g.attention(il, q, k, v, hp.attention_scale)
        if attended is None:
            return None
        if il == hp.n_layer - 1:
            attended, x = g.only_outputs(attended), g.only_outputs(x)
        x = g.b.add(attended, x, f"{prefix}.attn_residual")
        x = g.b.add(g.swiglu_ffn(g.norm(x, f"{prefix}.ffn_norm"), il), x, f"{prefix}.ffn_residual")
    return g.logits(x)


ARCHITECTURE = Architecture("llama", hyperparameters, tensors, graph)
