"""`apertus`: Apertus.

Norms of query and key heads, and a feed-forward without a gate, whose activation xIELU has slopes of its own in every
layer. Project Apertus 2025, arXiv:2509.14233; Huang and Schlag 2024, arXiv:2411.13010; llama.cpp's
src/models/apertus.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ggml_engine.ggml.ops import ROPE_NEOX, Tensor
from ggml_engine.models.architecture import (
    Architecture,
    attention_weights,
    embedding_and_output,
    ffn_weights,
    head_norms,
    norm,
    rope_factor_weights,
)
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import pre_norm_decoder
from ggml_engine.models.metadata import MetadataReader, inverse_sqrt_f32
from ggml_engine.models.rope import read_long_context, read_rope
from ggml_engine.models.sizes import check_whole_heads, read_rms_eps, read_sizes
from ggml_engine.models.weights import TensorSpec


@dataclass(frozen=True, slots=True)
class Xielu:
    """The terms of a layer's activation, as `GraphBuilder.xielu` takes them."""

    alpha_n: float
    alpha_p: float
    beta: float
    eps: float


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check; `own` is one `Xielu` for each layer."""
    sizes = read_sizes(reader)
    check_whole_heads(reader, sizes)
    terms = (reader.numbers_per_layer(f"xielu.{name}", sizes.n_layer) for name in ("alpha_n", "alpha_p", "beta", "eps"))
    return Hyperparameters(
        architecture="apertus",
        **sizes.keywords(),
        norm_eps=read_rms_eps(reader),
        rope=(read_rope(reader, ROPE_NEOX, sizes),) * sizes.n_layer,
        n_ctx_long=read_long_context(reader, sizes),
        window=(0,) * sizes.n_layer,
        attention_scale=inverse_sqrt_f32(sizes.n_embd_head_k[0]),
        own=tuple(Xielu(*layer) for layer in zip(*terms, strict=True)),
    )


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have. Biases of the heads' norms are left alone, as libllama does."""
    specs = [*embedding_and_output(hp, tied=False), *rope_factor_weights(hp.n_rot)]
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il)
        specs += attention_weights(hp, il, biases=True)
        specs += head_norms(hp, il)
        specs += norm(hp, "ffn_norm", il)
        specs += ffn_weights(hp, il)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    factors = g.rope_factors()
    return pre_norm_decoder(g, lambda g, x, il: g.self_attention(x, il, factors), _feed_forward)


def _feed_forward(g: ModelGraph, x: Tensor, il: int) -> Tensor:
    prefix, xielu = f"blk.{il}", _xielu(g.hp)[il]
    up = g.linear(x, f"{prefix}.ffn_up")
    active = g.b.xielu(up, xielu.alpha_n, xielu.alpha_p, xielu.beta, xielu.eps, f"{prefix}.ffn_xielu")
    return g.linear(active, f"{prefix}.ffn_down")


def _xielu(hp: Hyperparameters) -> tuple[Xielu, ...]:
    assert isinstance(hp.own, tuple)
    return hp.own


ARCHITECTURE = Architecture("apertus", hyperparameters, tensors, graph)
