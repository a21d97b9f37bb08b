"""`deepseek2`: DeepSeek V2 and V3, and models in their shape (GigaChat 3, Kanana 2, GLM 4.7 Flash, Kimi K2).

Multi-head latent attention: per token one short vector for all heads, and one rotated key. Where the file has the
weights apart, queries are taken into the space of that vector, which is then key and value in one (absorption), and the
mixed vector is taken back per head; else keys and values of all heads are made of it and kept. Leading dense layers,
then experts with shared ones. DeepSeek-AI 2024, arXiv:2405.04434 and arXiv:2412.19437; llama.cpp's
src/models/deepseek2.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np

from ggml_engine.errors import HyperparameterError
from ggml_engine.ggml.gguf import GGUFArray
from ggml_engine.ggml.ops import ROPE_NORMAL, Rope, Tensor
from ggml_engine.models.architecture import Architecture, embedding_and_output, gated_ffn_weights, matrix, norm
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import pre_norm_decoder
from ggml_engine.models.expert_ffn import dense_or_expert_ffn, expert_weights, has_experts
from ggml_engine.models.experts import (
    Experts,
    Gating,
    read_expert_length,
    read_experts,
    read_gating,
    read_leading_dense,
)
from ggml_engine.models.metadata import MetadataReader
from ggml_engine.models.rope import read_log_multiplier, read_rope
from ggml_engine.models.sizes import MAX_SIZE, Sizes, read_rms_eps, read_sizes
from ggml_engine.models.temperature import Temperature, read_temperature
from ggml_engine.models.weights import Role, TensorSpec

_MAX_HEAD = 1 << 16
_LITE_LAYERS = (26, 27)
_LITE_48 = (48, 128256)  # layers and tokens of Kanana 2
_SIGMOID_WITHOUT_A_KEY = ((47, 154880), (48, 154880))  # the same of GLM 4.7 Flash


@dataclass(frozen=True, slots=True)
class _Own:
    """Sizes of latent attention, and more. `head_k` and `head_v` are those of the heads, not of what is kept."""

    rank_q: int  # 0: queries are made of the activations
    rank_kv: int
    head_k: int
    head_v: int
    is_absorbed: bool
    has_merged_experts: bool  # gate and up are one tensor
    temperature: Temperature


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    sizes = read_sizes(reader)
    kind = (sizes.n_layer, _vocabulary(reader, sizes))
    is_lite = sizes.n_layer in _LITE_LAYERS or kind == _LITE_48
    rank_q = 0 if is_lite else reader.integer("attention.q_lora_rank", 0, MAX_SIZE)
    rank_kv = reader.integer("attention.kv_lora_rank", 1, MAX_SIZE)
    head_k = reader.integer("attention.key_length_mla", 0, _MAX_HEAD, 0)
    head_v = reader.integer("attention.value_length_mla", 0, _MAX_HEAD, 0)
    is_absorbed = head_k > 0 and head_v > 0
    if not is_absorbed:
        head_k, head_v = sizes.n_embd_head_k[0], sizes.n_embd_head_v[0]
    if sizes.n_rot >= head_k:
        raise HyperparameterError(reader.key("rope.dimension_count"), f"must be below {head_k}, is {sizes.n_rot}")
    _check_kept(reader, sizes, rank_kv if is_absorbed else None)
    is_merged = any(name.endswith(".ffn_gate_up_exps.weight") for name in reader.file.tensors)
    own = _Own(rank_q, rank_kv, head_k, head_v, is_absorbed, is_merged, read_temperature(reader))
    kept = sizes.keywords()
    if is_absorbed:
        kept["n_embd_head_v"] = (rank_kv,) * sizes.n_layer
    multiplier = float(np.float32(read_log_multiplier(reader)) / np.float32(0.1))  # a tenth of it is in files
    rope = read_rope(reader, ROPE_NORMAL, sizes, log_multiplier=multiplier, log_multiplier_over=multiplier or 1.0)
    return Hyperparameters(
        architecture="deepseek2",
        **kept,
        norm_eps=read_rms_eps(reader),
        rope=(rope,) * sizes.n_layer,
        window=(0,) * sizes.n_layer,
        attention_scale=_attention_scale(reader, rope, multiplier, head_k),
        experts=_read_experts(reader, sizes.n_layer, kind),
        v_in_k=is_absorbed,
        own=own,
    )


def _vocabulary(reader: MetadataReader, sizes: Sizes) -> int:
    tokens = reader.file.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, GGUFArray) else sizes.n_vocab


def _check_kept(reader: MetadataReader, sizes: Sizes, rank_kv: int | None) -> None:
    """One vector and one rotated key per token with absorption; else a key and a value of every head."""
    for heads, heads_kv in zip(sizes.n_head, sizes.n_head_kv, strict=True):
        wanted = heads if rank_kv is None else 1
        if heads_kv != wanted:
            raise HyperparameterError(reader.key("attention.head_count_kv"), f"must be {wanted}, is {heads_kv}")
    if rank_kv is not None and sizes.n_embd_head_k[0] != rank_kv + sizes.n_rot:
        reason = f"must be kv_lora_rank {rank_kv} and {sizes.n_rot} rotated, is {sizes.n_embd_head_k[0]}"
        raise HyperparameterError(reader.key("attention.key_length"), reason)


def _read_experts(reader: MetadataReader, n_layer: int, kind: tuple[int, int]) -> Experts | None:
    is_dense = read_leading_dense(reader, n_layer)
    if all(is_dense) and not reader.integer("expert_count", 0, MAX_SIZE, 0):
        return None
    n_ff = read_expert_length(reader, n_layer)
    return read_experts(
        reader,
        n_layer,
        n_ff=n_ff,
        n_ff_shared=n_ff * reader.integer("expert_shared_count", 1, MAX_SIZE),
        gating=read_gating(reader, Gating.SIGMOID if kind in _SIGMOID_WITHOUT_A_KEY else Gating.SOFTMAX),
        is_dense=is_dense,
    )


def _attention_scale(reader: MetadataReader, rope: Rope, multiplier: float, head_k: int) -> float:
    """1 / sqrt(head), by the square of how YaRN grows queries and keys; in f32, as libllama does."""
    one, tenth = np.float32(1.0), np.float32(0.1)
    log_factor = np.float32(math.log(one / np.float32(rope.scale)))
    with np.errstate(over="ignore"):
        attn_factor = np.float32(rope.attn_factor) * (one + tenth * log_factor)
        grown = attn_factor * (one + tenth * np.float32(multiplier) * log_factor)
        scale = float(grown * grown / np.sqrt(np.float32(head_k)))
    if not math.isfinite(scale):
        raise HyperparameterError(reader.key("rope.scaling.attn_factor"), f"{rope.attn_factor} makes scores infinite")
    return scale


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    own = cast("_Own", hp.own)
    specs = embedding_and_output(hp)
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il)
        specs += _attention_weights(hp, own, il)
        specs += norm(hp, "ffn_norm", il)
        if has_experts(hp, il):
            specs += expert_weights(hp, il, merged=own.has_merged_experts, selection_bias=False)
        else:
            specs += gated_ffn_weights(hp, il)
    return specs


def _attention_weights(hp: Hyperparameters, own: _Own, il: int) -> list[TensorSpec]:
    n_head, rank_kv, unrotated = hp.n_head[il], own.rank_kv, own.head_k - hp.n_rot
    if own.rank_q:
        specs = [
            *matrix("attn_q_a", (hp.n_embd, own.rank_q), il),
            *norm(hp, "attn_q_a_norm", il, n=own.rank_q),
            *matrix("attn_q_b", (own.rank_q, n_head * own.head_k), il),
        ]
    else:
        specs = matrix("attn_q", (hp.n_embd, n_head * own.head_k), il)
    specs += matrix("attn_kv_a_mqa", (hp.n_embd, rank_kv + hp.n_rot), il)
    specs += norm(hp, "attn_kv_a_norm", il, n=rank_kv)
    if own.is_absorbed:
        shapes = {"attn_k_b": (unrotated, rank_kv, n_head), "attn_v_b": (rank_kv, own.head_v, n_head)}
        specs += [TensorSpec(f"blk.{il}.{name}.weight", shape, Role.MATMUL, il) for name, shape in shapes.items()]
    else:
        specs += matrix("attn_kv_b", (rank_kv, n_head * (unrotated + own.head_v)), il)
    return specs + matrix("attn_output", (n_head * own.head_v, hp.n_embd), il)


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    return pre_norm_decoder(g, _attention, dense_or_expert_ffn)


def _attention(g: ModelGraph, x: Tensor, il: int) -> Tensor | None:
    own, prefix = cast("_Own", g.hp.own), f"blk.{il}"
    n_rot, unrotated = g.hp.n_rot, own.head_k - g.hp.n_rot
    q = g.heads(_queries(g, x, own, prefix), g.hp.n_head[il])
    q_rotated = g.rope(_part(g, q, unrotated, n_rot), g.hp.rope[il], f"{prefix}.q_rope")
    both = g.linear(x, f"{prefix}.attn_kv_a_mqa")
    kept = g.b.view(both, (own.rank_kv, x.ne[1]), (both.nb[1],), 0)
    k_rotated = g.rope(_part(g, g.heads(both, 1), own.rank_kv, n_rot), g.hp.rope[il], f"{prefix}.k_rope")
    kept = g.norm(kept, f"{prefix}.attn_kv_a_norm")
    if own.is_absorbed:
        # [unrotated, tokens, heads], into the space of what is kept, and back
        q_absorbed = g.b.mul_mat(
            g.weight(f"{prefix}.attn_k_b"), g.b.permute(_part(g, q, 0, unrotated), 0, 2, 1, 3), f"{prefix}.q_absorbed"
        )
        q = g.b.concat(g.b.permute(q_absorbed, 0, 2, 1, 3), q_rotated, 0, f"{prefix}.q")
        v = g.heads(kept, 1)
        k = g.b.concat(v, k_rotated, 0, f"{prefix}.k")
        v_up = g.weight(f"{prefix}.attn_v_b")
    else:
        q = g.b.concat(_part(g, q, 0, unrotated), q_rotated, 0, f"{prefix}.q")
        kv = g.heads(g.linear(kept, f"{prefix}.attn_kv_b"), g.hp.n_head[il])
        v = g.b.cont(_part(g, kv, unrotated, own.head_v), f"{prefix}.v")
        k_repeated = g.b.repeat_to(k_rotated, n_rot, g.hp.n_head[il], x.ne[1], 1)
        k = g.b.concat(_part(g, kv, 0, unrotated), k_repeated, 0, f"{prefix}.k")
        v_up = None
    q = own.temperature.apply(g, q, f"{prefix}.q_tempered")
    mixed = g.mixed_values(il, q, k, v, g.hp.attention_scale, v_up=v_up)
    return None if mixed is None else g.linear(mixed, f"{prefix}.attn_output")


def _queries(g: ModelGraph, x: Tensor, own: _Own, prefix: str) -> Tensor:
    if not own.rank_q:
        return g.linear(x, f"{prefix}.attn_q")
    return g.linear(g.norm(g.linear(x, f"{prefix}.attn_q_a"), f"{prefix}.attn_q_a_norm"), f"{prefix}.attn_q_b")


def _part(g: ModelGraph, x: Tensor, first: int, n: int) -> Tensor:
    """Elements `first` to `first + n` of every head of x [head, heads, tokens]."""
    return g.b.view(x, (n, *x.ne[1:3]), x.nb[1:3], x.type.row_bytes(first))


ARCHITECTURE = Architecture("deepseek2", hyperparameters, tensors, graph)
