"""`gptneox`: GPT-NeoX, Pythia, RedPajama, Dolly.

Layer norms with biases, biases everywhere, rotation in halves (NEOX) of a part of every head, no gate. Attention and
feed-forward are side by side, each behind its own norm, or one after the other, as the file says. Black et al. 2022,
arXiv:2204.06745; llama.cpp's src/models/gptneox.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ggml_engine.errors import HyperparameterError
from ggml_engine.ggml.ops import ROPE_NEOX, Tensor
from ggml_engine.models.architecture import (
    Architecture,
    attention_weights,
    embedding_and_output,
    ffn_weights,
    norm,
    with_biases,
)
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import parallel_layer, pre_norm_decoder, run_layers, self_attention
from ggml_engine.models.metadata import MetadataReader
from ggml_engine.models.uniform import read_uniform
from ggml_engine.models.weights import TensorSpec


@dataclass(frozen=True, slots=True)
class _Own:
    is_parallel: bool  # attention and feed-forward both see the layer's input


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    hp = read_uniform(reader, ROPE_NEOX, has_layer_norm=True, has_whole_heads=False)
    return replace(hp, own=_Own(_read_parallel(reader)))


def _read_parallel(reader: MetadataReader) -> bool:
    if "use_parallel_residual" not in reader:
        raise HyperparameterError(reader.key("use_parallel_residual"), "the file does not have this value")
    return reader.flag("use_parallel_residual", True)


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = embedding_and_output(hp, tied=False, norm_bias=True)
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il, bias=True)
        specs += attention_weights(hp, il, biases=True)
        specs += norm(hp, "ffn_norm", il, bias=True)
        specs += ffn_weights(hp, il, biases=True)
    return with_biases(specs, "attn_qkv", "attn_output", "ffn_up", "ffn_down")


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    own = g.hp.own
    assert isinstance(own, _Own)
    if not own.is_parallel:
        return pre_norm_decoder(g, self_attention, _feed_forward)
    x = run_layers(g, g.embed(), _parallel_layer)
    return None if x is None else g.logits(x)


def _feed_forward(g: ModelGraph, x: Tensor, il: int) -> Tensor:
    return g.ffn(x, il, "gelu")


def _parallel_layer(g: ModelGraph, x: Tensor, il: int) -> Tensor | None:
    return parallel_layer(g, x, il, self_attention, _feed_forward, ffn_norm="ffn_norm", added_last="attention")


ARCHITECTURE = Architecture("gptneox", hyperparameters, tensors, graph)
