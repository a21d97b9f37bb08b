"""`qwen3`: Qwen 3, dense.

Norms of q and k before rotation in halves (NEOX), heads whose size is the file's own. A reranker's output head is
loaded and not run. Yang et al. 2025, arXiv:2505.09388; llama.cpp's src/models/qwen3.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

from ggml_engine.ggml.gguf import GGUFArray
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
from ggml_engine.models.decoder import pre_norm_decoder
from ggml_engine.models.metadata import MetadataReader
from ggml_engine.models.uniform import read_uniform
from ggml_engine.models.weights import Role, TensorSpec


@dataclass(frozen=True, slots=True)
class _Own:
    n_labels: int  # of a reranker


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    labels = reader.file.metadata.get(reader.key("classifier.output_labels"))
    n_labels = len(labels) if isinstance(labels, GGUFArray) and len(labels) else 1
    return replace(read_uniform(reader, ROPE_NEOX), own=_Own(n_labels))


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = embedding_and_output(hp)
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il)
        specs += attention_weights(hp, il, biases=True, output_bias=False)
        specs += head_norms(hp, il)
        specs += norm(hp, "ffn_norm", il)
        specs += gated_ffn_weights(hp, il)
    labels = (hp.n_embd, cast("_Own", hp.own).n_labels)
    specs.append(TensorSpec("cls.output.weight", labels, Role.MATMUL, hp.n_layer, required=False))
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    return pre_norm_decoder(g)


ARCHITECTURE = Architecture("qwen3", hyperparameters, tensors, graph)
