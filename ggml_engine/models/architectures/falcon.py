"""`falcon`: Falcon 7B, 40B and 180B.

Attention and feed-forward side by side behind one layer norm, or each behind its own in the larger ones; few heads of K
and V, one in the smallest; rotation in halves (NEOX), no biases but the norms', no gate. Almazrouei et al. 2023,
arXiv:2311.16867; llama.cpp's src/models/falcon.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggml_engine.ggml.ops import ROPE_NEOX, Tensor
from ggml_engine.models.architecture import Architecture, attention_weights, embedding_and_output, ffn_weights, norm
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import parallel_layer, run_layers, self_attention
from ggml_engine.models.metadata import MetadataReader
from ggml_engine.models.uniform import read_uniform
from ggml_engine.models.weights import TensorSpec


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    return read_uniform(reader, ROPE_NEOX, has_layer_norm=True)


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = embedding_and_output(hp, norm_bias=True)
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il, bias=True)
        specs += norm(hp, "attn_norm_2", il, bias=False, required=False)
        specs += attention_weights(hp, il, biases=False)
        specs += ffn_weights(hp, il)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    x = run_layers(g, g.embed(), _layer)
    return None if x is None else g.logits(x)


def _layer(g: ModelGraph, x: Tensor, il: int) -> Tensor | None:
    # where there are two norms, the first is the feed-forward's
    has_two_norms = f"blk.{il}.attn_norm_2.weight" in g.weights
    return parallel_layer(
        g,
        x,
        il,
        self_attention,
        lambda g, x, il: g.ffn(x, il, "gelu"),
        attn_norm="attn_norm_2" if has_two_norms else "attn_norm",
        added_last="residual",
    )


ARCHITECTURE = Architecture("falcon", hyperparameters, tensors, graph)
