"""What an architecture is: three functions, in the order in which its file writes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ggml_engine.ggml.ops import Tensor
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters, MetadataReader
from ggml_engine.models.weights import Role, TensorSpec


@dataclass(frozen=True, slots=True)
class Architecture:
    """One value of `general.architecture`."""

    name: str
    hyperparameters: Callable[[MetadataReader], Hyperparameters]
    tensors: Callable[[Hyperparameters], Sequence[TensorSpec]]
    graph: Callable[[ModelGraph], Tensor | None]  # logits f32 [n_vocab, outputs]; None when none are wanted


def embedding_and_output(hp: Hyperparameters) -> list[TensorSpec]:
    """Token embedding, final norm and output weight (the embedding's, when the file has none)."""
    table = (hp.n_embd, hp.n_vocab)
    return [
        TensorSpec("token_embd.weight", table, Role.ROWS),
        TensorSpec("output_norm.weight", (hp.n_embd,), Role.MUL, hp.n_layer),
        TensorSpec("output.weight", table, Role.MATMUL, hp.n_layer, tied_to="token_embd.weight"),
    ]


def attention_weights(hp: Hyperparameters, il: int, *, biases: bool) -> list[TensorSpec]:
    """q, k, v and output weights of a layer; `biases` allows for their biases."""
    prefix = f"blk.{il}.attn"
    n_q = hp.n_head[il] * hp.n_embd_head_k
    n_k = hp.n_head_kv[il] * hp.n_embd_head_k
    n_v = hp.n_head_kv[il] * hp.n_embd_head_v
    shapes = {
        "q": (hp.n_embd, n_q),
        "k": (hp.n_embd, n_k),
        "v": (hp.n_embd, n_v),
        "output": (hp.n_head[il] * hp.n_embd_head_v, hp.n_embd),
    }
    specs = [TensorSpec(f"{prefix}_{part}.weight", shape, Role.MATMUL, il) for part, shape in shapes.items()]
    if biases:
        specs += [
            TensorSpec(f"{prefix}_{part}.bias", (shape[1],), Role.ADD, il, required=False)
            for part, shape in shapes.items()
        ]
    return specs


def gated_ffn_weights(hp: Hyperparameters, il: int, *, biases: bool) -> list[TensorSpec]:
    """gate, up and down weights of a layer; `biases` allows for their biases."""
    prefix = f"blk.{il}.ffn"
    n_ff = hp.n_ff[il]
    shapes = {"gate": (hp.n_embd, n_ff), "down": (n_ff, hp.n_embd), "up": (hp.n_embd, n_ff)}
    specs = [TensorSpec(f"{prefix}_{part}.weight", shape, Role.MATMUL, il) for part, shape in shapes.items()]
    if biases:
        specs += [
            TensorSpec(f"{prefix}_{part}.bias", (shape[1],), Role.ADD, il, required=False)
            for part, shape in shapes.items()
        ]
    return specs


def norm_weight(name: str, n: int, il: int) -> TensorSpec:
    """The weight of a norm over `n` elements."""
    return TensorSpec(f"blk.{il}.{name}.weight", (n,), Role.MUL, il)
