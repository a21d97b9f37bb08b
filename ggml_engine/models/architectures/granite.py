"""`granite`: Granite 3 and 4, dense and text.

As `llama`, with scales of embeddings, attention, residuals and logits, and a flag that turns rotation off; also with
experts and shared experts, which `granitemoe` has. IBM 2024, github.com/ibm-granite/granite-3.0-language-models;
llama.cpp's src/models/granite.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

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
from ggml_engine.models.experts import Experts, Gating, read_experts
from ggml_engine.models.metadata import MetadataReader
from ggml_engine.models.sizes import MAX_SIZE, read_scale
from ggml_engine.models.uniform import read_uniform
from ggml_engine.models.weights import TensorSpec

_SMALLEST_DIVISOR = 1e-30  # its inverse is an f32


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    hp = read_scaled(reader)
    return hp if reader.flag("rope.scaling.finetuned", True) else replace(hp, rope=(None,) * hp.n_layer)


def read_scaled(reader: MetadataReader) -> Hyperparameters:
    """What Granite's architectures have in common: all but the flag of rotation."""
    hp = read_uniform(reader, ROPE_NORMAL)
    n_ff_shared = reader.integer("expert_shared_feed_forward_length", 0, MAX_SIZE, 0)
    attention = reader.number("attention.scale", lambda value: value >= 0, "0 (none) or above", 0.0)
    return replace(
        hp,
        attention_scale=attention or hp.attention_scale,
        embedding_scale=read_scale(reader, "embedding_scale", 1.0),
        residual_scale=read_scale(reader, "residual_scale", 1.0),
        logit_scale=read_inverse_logit_scale(reader),
        experts=read_optional_experts(reader, hp, n_ff_shared),
    )


def read_inverse_logit_scale(reader: MetadataReader, default: float | None = None) -> float:
    """What logits are multiplied with: one over the file's scale, in f32."""
    divisor = reader.number(
        "logit_scale", lambda value: value > _SMALLEST_DIVISOR, f"above {_SMALLEST_DIVISOR:g}", default
    )  # fmt: skip
    return float(np.float32(1.0) / np.float32(divisor))


def read_optional_experts(reader: MetadataReader, hp: Hyperparameters, n_ff_shared: int = 0) -> Experts | None:
    """The experts of a file; None where it has none."""
    if reader.integer("expert_count", 0, 1 << 16, 0) == 0:
        return None
    return read_experts(
        reader,
        hp.n_layer,
        n_ff=hp.n_ff[0],
        n_ff_shared=n_ff_shared,
        gating=Gating.SOFTMAX,
        normalised=True,
        weight_scale=1.0,
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


ARCHITECTURE = Architecture("granite", hyperparameters, tensors, graph)
