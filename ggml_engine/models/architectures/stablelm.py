"""`stablelm`: StableLM 2 and 3B.

Layer norms, rotation in halves (NEOX) of a part of every head, a gate. The largest has norms of q and k, with weights
of each head's own, and no norm before the feed-forward, which then sees what attention does. Bellagente et al. 2024,
arXiv:2402.17834; llama.cpp's src/models/stablelm.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggml_engine.ggml.ops import ROPE_NEOX, Tensor
from ggml_engine.models.architecture import (
    Architecture,
    attention_weights,
    embedding_and_output,
    gated_ffn_weights,
    head_norms,
    norm,
)
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import parallel_layer, pre_norm_layer, run_layers
from ggml_engine.models.metadata import MetadataReader, inverse_sqrt_f32
from ggml_engine.models.rope import read_rope
from ggml_engine.models.sizes import read_layer_norm_eps, read_sizes
from ggml_engine.models.weights import TensorSpec


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    sizes = read_sizes(reader)
    return Hyperparameters(
        architecture="stablelm",
        **sizes.keywords(),
        norm_eps=read_layer_norm_eps(reader),
        has_layer_norm=True,
        rope=(read_rope(reader, ROPE_NEOX, sizes),) * sizes.n_layer,
        window=(0,) * sizes.n_layer,
        attention_scale=inverse_sqrt_f32(sizes.n_embd_head_k[0]),
    )


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = embedding_and_output(hp, tied=False, norm_bias=True)
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il, bias=True)
        specs += attention_weights(hp, il, biases=True, output_bias=False)
        specs += head_norms(hp, il, required=False, own_weights=True)
        specs += norm(hp, "ffn_norm", il, bias=False, required=False)
        specs += gated_ffn_weights(hp, il)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    x = run_layers(g, g.embed(), _layer)
    return None if x is None else g.logits(x)


def _layer(g: ModelGraph, x: Tensor, il: int) -> Tensor | None:
    if f"blk.{il}.ffn_norm.weight" in g.weights:
        return pre_norm_layer(g, x, il, _attention, _feed_forward)
    return parallel_layer(g, x, il, _attention, _feed_forward, added_last="feed_forward")


def _attention(g: ModelGraph, x: Tensor, il: int) -> Tensor | None:
    return g.self_attention(x, il)


def _feed_forward(g: ModelGraph, x: Tensor, il: int) -> Tensor:
    return g.ffn(x, il, "swiglu")


ARCHITECTURE = Architecture("stablelm", hyperparameters, tensors, graph)
