"""`gpt-oss`: OpenAI's open weights.

Windows on every second layer, scores without a value that take attention away ("sinks"), biases everywhere, experts
weighed by a softmax over the chosen ones, with a clamped activation. OpenAI 2025, arXiv:2508.10925; llama.cpp's
src/models/openai-moe.cpp, which computes the last layer's experts also for tokens whose logits nobody wants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ggml_engine.ggml.ops import ROPE_NEOX, Tensor
from ggml_engine.models.architecture import Architecture, attention_weights, embedding_and_output, norm
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import pre_norm_decoder
from ggml_engine.models.expert_ffn import expert_ffn, expert_weights
from ggml_engine.models.experts import Gating, read_expert_length, read_experts
from ggml_engine.models.metadata import MetadataReader, positive
from ggml_engine.models.rope import alternating, check_rope
from ggml_engine.models.sizes import read_needed_window, read_windowed_layers
from ggml_engine.models.uniform import read_uniform
from ggml_engine.models.weights import Role, TensorSpec

_PATTERN = 2  # every second layer sees everything


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    hp = read_uniform(reader, ROPE_NEOX)
    window = read_needed_window(reader)
    windowed = read_windowed_layers(reader, hp.n_layer, _PATTERN)
    rope = hp.rope[0]
    if rope is not None and "rope.freq_base_swa" in reader:
        with_window = replace(rope, base=reader.number("rope.freq_base_swa", positive, "above 0"))
        check_rope(reader, with_window)
        hp = replace(hp, rope=alternating(windowed, with_window, rope))
    experts = read_experts(
        reader,
        hp.n_layer,
        n_ff=read_expert_length(reader, hp.n_layer),
        gating=Gating.SOFTMAX_OF_CHOSEN,
        normalised=False,
        weight_scale=1.0,
    )
    return replace(hp, window=tuple(window if flag else 0 for flag in windowed), experts=experts)


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = embedding_and_output(hp, tied=False)
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il)
        specs += attention_weights(hp, il, biases=True)
        specs.append(TensorSpec(f"blk.{il}.attn_sinks.weight", (hp.n_head[il],), Role.SINKS, il))
        specs += norm(hp, "post_attention_norm", il)
        specs += expert_weights(hp, il, biases=True)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    return pre_norm_decoder(
        g,
        _attention,
        lambda g, x, il: expert_ffn(g, x, il, "swiglu_oai"),
        ffn_norm="post_attention_norm",
    )


def _attention(g: ModelGraph, x: Tensor, il: int) -> Tensor | None:
    q, k, v = g.rotated_qkv(x, il)
    return g.attention(il, q, k, v, g.hp.attention_scale, sinks=g.weight(f"blk.{il}.attn_sinks"))


ARCHITECTURE = Architecture("gpt-oss", hyperparameters, tensors, graph)
