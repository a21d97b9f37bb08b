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
from ggml_engine.models.decoder import parallel_layer, pre_norm_layer, run_layers, self_attention, swiglu_ffn
from ggml_engine.models.metadata import MetadataReader
from ggml_engine.models.uniform import read_uniform
from ggml_engine.models.weights import TensorSpec


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    return read_uniform(reader, ROPE_NEOX, has_layer_norm=True, has_whole_heads=False)


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
        return pre_norm_layer(g, x, il, self_attention, swiglu_ffn)
    return parallel_layer(g, x, il, self_attention, swiglu_ffn, added_last="feed_forward")


ARCHITECTURE = Architecture("stablelm", hyperparameters, tensors, graph)
