"""`smollm3`: SmolLM 3.

As `llama` without biases of its output and feed-forward; every fourth layer does not rotate (Yang et al. 2025,
arXiv:2501.18795). Bakouch et al. 2025, huggingface.co/blog/smollm3; llama.cpp's src/models/smollm3.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ggml_engine.ggml.ops import ROPE_NORMAL, Tensor
from ggml_engine.models.architecture import (
    Architecture,
    attention_weights,
    embedding_and_output,
    gated_ffn_weights,
    norm,
)
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import pre_norm_decoder
from ggml_engine.models.metadata import MetadataReader
from ggml_engine.models.uniform import read_uniform
from ggml_engine.models.weights import TensorSpec

_PATTERN = 4  # the last of so many layers does not rotate


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    hp = read_uniform(reader, ROPE_NORMAL)
    return replace(hp, rope=tuple(None if il % _PATTERN == _PATTERN - 1 else rope for il, rope in enumerate(hp.rope)))


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = embedding_and_output(hp)
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il)
        specs += attention_weights(hp, il, biases=True, output_bias=False)
        specs += norm(hp, "ffn_norm", il)
        specs += gated_ffn_weights(hp, il)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    return pre_norm_decoder(g)


ARCHITECTURE = Architecture("smollm3", hyperparameters, tensors, graph)
