"""`gemma4`: Gemma 4, text.

Layers with a sliding window have heads and a rotation of their own; the last layers may read the K and V of the last
ones that keep any; V may be K before its norm. Beside the dense feed-forward there may be experts, with a router that
has a norm and a scale of its own, and every layer may add what a second embedding of the token holds for it, as in
Gemma 3n. llama.cpp's src/models/gemma4.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ggml_engine.errors import HyperparameterError
from ggml_engine.ggml.ops import ROPE_NEOX, Rope, Tensor
from ggml_engine.models.architecture import (
    Architecture,
    embedding_and_output,
    gated_ffn_weights,
    matrix,
    norm,
)
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import run_layers
from ggml_engine.models.expert_ffn import expert_ffn, expert_weights, has_experts
from ggml_engine.models.experts import Experts, Gating, read_experts
from ggml_engine.models.metadata import MetadataReader, inverse_sqrt_f32, positive
from ggml_engine.models.rope import alternating, check_rope, read_rope
from ggml_engine.models.sizes import MAX_SIZE, Sizes, read_needed_window, read_rms_eps, read_sizes, read_softcap
from ggml_engine.models.weights import Role, TensorSpec

_LOGIT_CAP = 30.0


@dataclass(frozen=True, slots=True)
class Gemma4:
    """What is Gemma 4's alone. Tuples have one entry per layer."""

    n_embd_per_layer: int  # of the embedding that a token has for each layer; 0: there is none
    has_fused_qkv: tuple[bool, ...]
    has_merged_experts: tuple[bool, ...]  # gate and up of all experts are one tensor


# ---- hyperparameters


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check; `own` is a `Gemma4`."""
    sizes = read_sizes(reader)
    n_layer = sizes.n_layer
    windowed = reader.flags("attention.sliding_window_pattern", n_layer)
    if windowed is None:
        raise HyperparameterError(reader.key("attention.sliding_window_pattern"), "one flag for each layer is needed")
    rope_full = read_rope(reader, ROPE_NEOX, sizes)
    head_full = _checked_head(reader, "", sizes.n_embd_head_k[0], sizes.n_embd_head_v[0])
    head_windowed = _checked_head(
        reader,
        "_swa",
        reader.integer("attention.key_length_swa", 1, 1 << 16),
        reader.integer("attention.value_length_swa", 1, 1 << 16),
    )
    heads = tuple(head_windowed if flag else head_full for flag in windowed)
    window = read_needed_window(reader)
    sizes = replace(sizes, n_embd_head_k=heads, n_embd_head_v=heads)
    return Hyperparameters(
        architecture="gemma4",
        **sizes.keywords(),
        norm_eps=read_rms_eps(reader),
        rope=alternating(windowed, _windowed_rope(reader, rope_full, head_windowed), rope_full),
        window=tuple(window if flag else 0 for flag in windowed),
        attention_scale=1.0,
        logit_softcap=read_softcap(reader, "final_logit_softcapping", _LOGIT_CAP),
        embedding_scale=math.sqrt(sizes.n_embd),
        experts=_read_experts(reader, n_layer),
        kv_source=_read_kv_source(reader, sizes, windowed),
        own=Gemma4(
            n_embd_per_layer=reader.integer("embedding_length_per_layer_input", 0, MAX_SIZE),
            has_fused_qkv=_have(reader, n_layer, "attn_qkv"),
            has_merged_experts=_have(reader, n_layer, "ffn_gate_up_exps"),
        ),
    )


def _have(reader: MetadataReader, n_layer: int, name: str) -> tuple[bool, ...]:
    """Which layers have a weight of this name."""
    return tuple(f"blk.{il}.{name}.weight" in reader.file.tensors for il in range(n_layer))


def _checked_head(reader: MetadataReader, suffix: str, head_k: int, head_v: int) -> int:
    """The size of K's and of V's heads. Raises HyperparameterError unless it is one, and even, as rotation needs."""
    if head_k != head_v:
        reason = f"must be key_length{suffix} {head_k}, is {head_v}"
        raise HyperparameterError(reader.key(f"attention.value_length{suffix}"), reason)
    if head_k % 2:
        raise HyperparameterError(reader.key(f"attention.key_length{suffix}"), f"must be even, is {head_k}")
    return head_k


def _windowed_rope(reader: MetadataReader, full: Rope, head: int) -> Rope:
    """The rotation of layers with a window: another base, another part of the head, positions that are not scaled."""
    name = "rope.dimension_count_swa"
    n_rot = reader.integer(name, 2, head, full.n_dims)
    if n_rot % 2 or n_rot > head:
        raise HyperparameterError(reader.key(name), f"must be even and at most the head size {head}, is {n_rot}")
    base = reader.number("rope.freq_base_swa", positive, "above 0", 10000.0)
    rope = replace(full, n_dims=n_rot, base=base, scale=1.0)
    check_rope(reader, rope)
    return rope


def _read_kv_source(reader: MetadataReader, sizes: Sizes, windowed: Sequence[bool]) -> tuple[int, ...]:
    """Whose K and V a layer reads: the last layers, those of the last two that keep any, the windowed one first."""
    name = "attention.shared_kv_layers"
    n_all = reader.integer("block_count", 1, 1 << 16)
    n_shared = reader.integer(name, 0, max(0, n_all - 2), 0)
    n_keeping = n_all - n_shared
    sources = list(range(sizes.n_layer))
    for il in range(n_keeping, sizes.n_layer):
        source = n_keeping - (2 if windowed[il] else 1)
        for what, of_layer in (("another window", windowed), ("other K/V heads", sizes.n_head_kv)):
            if of_layer[source] != of_layer[il]:
                reason = f"is {n_shared}: layer {il} would read K and V of layer {source}, which has {what}"
                raise HyperparameterError(reader.key(name), reason)
        sources[il] = source
    return tuple(sources) if n_keeping < sizes.n_layer else ()


def _read_experts(reader: MetadataReader, n_layer: int) -> Experts | None:
    if not reader.integer("expert_count", 0, 1 << 16, 0):
        return None
    n_ff = reader.per_layer("expert_feed_forward_length", n_layer, 1, MAX_SIZE)[0]
    is_dense = tuple(not routed for routed in _have(reader, n_layer, "ffn_gate_inp"))
    return read_experts(
        reader, n_layer, n_ff=n_ff, gating=Gating.SOFTMAX, normalised=True, weight_scale=1.0, is_dense=is_dense
    )  # fmt: skip


def _own(hp: Hyperparameters) -> Gemma4:
    assert isinstance(hp.own, Gemma4)
    return hp.own


# ---- tensors


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    n_per_layer = _own(hp).n_embd_per_layer
    specs = embedding_and_output(hp)
    full = [il for il in range(hp.n_layer) if not hp.window[il]]
    if full:
        n_factors = hp.n_embd_head_k[full[0]] // 2
        specs.append(TensorSpec("rope_freqs.weight", (n_factors,), Role.ROPE_FACTORS, full[0]))
    if n_per_layer:
        n_together = n_per_layer * hp.n_layer
        specs += [
            TensorSpec("per_layer_token_embd.weight", (n_together, hp.n_vocab), Role.ROWS),
            TensorSpec("per_layer_model_proj.weight", (hp.n_embd, n_together), Role.MATMUL, 0),
            TensorSpec("per_layer_proj_norm.weight", (n_per_layer,), Role.MUL, 0),
        ]
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il)
        specs += _attention_weights(hp, il)
        specs += norm(hp, "post_attention_norm", il)
        specs += norm(hp, "ffn_norm", il)
        specs += gated_ffn_weights(hp, il)
        specs += norm(hp, "post_ffw_norm", il)
        specs += _expert_weights(hp, il)
        if n_per_layer:
            specs += matrix("inp_gate", (hp.n_embd, n_per_layer), il)
            specs += matrix("proj", (n_per_layer, hp.n_embd), il)
            specs += norm(hp, "post_norm", il)
        specs.append(TensorSpec(f"blk.{il}.layer_output_scale.weight", (1,), Role.MUL, il, required=False))
    return specs


def _attention_weights(hp: Hyperparameters, il: int) -> list[TensorSpec]:
    head, keeps = hp.n_embd_head_k[il], hp.owns_kv(il)
    n_q, n_kv = hp.n_head[il] * head, hp.n_head_kv[il] * head
    if _own(hp).has_fused_qkv[il]:
        specs = matrix("attn_qkv", (hp.n_embd, n_q + 2 * n_kv), il)
    else:
        specs = matrix("attn_q", (hp.n_embd, n_q), il)
        specs += matrix("attn_k", (hp.n_embd, n_kv), il, required=keeps)
        specs += matrix("attn_v", (hp.n_embd, n_kv), il, required=False)
    return [
        *specs,
        TensorSpec(f"blk.{il}.attn_q_norm.weight", (head,), Role.MUL, il),
        TensorSpec(f"blk.{il}.attn_k_norm.weight", (head,), Role.MUL, il, required=keeps),
        *matrix("attn_output", (n_q, hp.n_embd), il),
    ]


def _expert_weights(hp: Hyperparameters, il: int) -> list[TensorSpec]:
    if not has_experts(hp, il):
        return []
    return [
        *expert_weights(hp, il, merged=_own(hp).has_merged_experts[il]),
        TensorSpec(f"blk.{il}.ffn_gate_inp.scale", (hp.n_embd,), Role.MUL, il),
        *norm(hp, "pre_ffw_norm_2", il),
        *norm(hp, "post_ffw_norm_1", il),
        *norm(hp, "post_ffw_norm_2", il),
    ]


# ---- graph


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    x = g.embed(g.hp.embedding_scale)
    per_layer = _per_layer_inputs(g, x) if _own(g.hp).n_embd_per_layer else None
    x_after = run_layers(g, x, lambda g, x, il: _layer(g, x, il, per_layer))
    return None if x_after is None else g.logits(x_after)


def _per_layer_inputs(g: ModelGraph, x: Tensor) -> Tensor:
    """What every layer adds, f32 [n_embd_per_layer, tokens, layers]: of the token and of its embedding.

    Where a prepared input stands the token is number 0, which is what such a position has in libllama, too.
    """
    n, n_layer, n_tokens = _own(g.hp).n_embd_per_layer, g.hp.n_layer, x.ne[1]
    of_token = g.b.get_rows(g.weight("per_layer_token_embd"), g.tokens)
    of_token = g.b.scale(g.b.reshape(of_token, n, n_layer, n_tokens), math.sqrt(n), "inp_per_layer_of_token")
    of_embedding = g.b.scale(g.linear(x, "per_layer_model_proj"), inverse_sqrt_f32(g.hp.n_embd))
    of_embedding = g.norm(g.b.reshape(of_embedding, n, n_layer, n_tokens), "per_layer_proj_norm")
    both = g.b.scale(g.b.add(of_embedding, of_token), inverse_sqrt_f32(2), "inp_per_layer")
    return g.b.cont(g.b.permute(both, 0, 2, 1, 3))


def _layer(g: ModelGraph, x: Tensor, il: int, per_layer: Tensor | None) -> Tensor | None:
    prefix = f"blk.{il}"
    attended = _attention(g, g.norm(x, f"{prefix}.attn_norm"), il)
    if attended is None:
        return None
    attended, x = g.at_last_layer(il, attended, x)
    x = g.b.add(g.norm(attended, f"{prefix}.post_attention_norm"), x, f"{prefix}.attn_residual")
    fed = g.ffn(g.norm(x, f"{prefix}.ffn_norm"), il, "geglu")
    if has_experts(g.hp, il):
        fed = g.b.add(g.norm(fed, f"{prefix}.post_ffw_norm_1"), _experts(g, x, il), f"{prefix}.ffn_with_experts")
    x = g.b.add(g.norm(fed, f"{prefix}.post_ffw_norm"), x, f"{prefix}.ffn_residual")
    if per_layer is not None:
        x = _with_per_layer_input(g, x, il, per_layer)
    scale = g.weights.get(f"{prefix}.layer_output_scale.weight")
    return x if scale is None else g.b.mul(x, scale, f"{prefix}.scaled")


def _attention(g: ModelGraph, x: Tensor, il: int) -> Tensor | None:
    """None once a step that wants no logits has left its last K and V behind."""
    hp, prefix, rope = g.hp, f"blk.{il}", g.hp.rope[il]
    factors = None if hp.window[il] else g.weight("rope_freqs")
    q, k, v = _qkv(g, x, il)
    q = g.rope(g.norm(q, f"{prefix}.attn_q_norm"), rope, f"{prefix}.q_rope", factors)
    if k is not None and v is not None:
        v = g.rms_norm(v)
        k = g.rope(g.norm(k, f"{prefix}.attn_k_norm"), rope, f"{prefix}.k_rope", factors)
    attended = g.attention(il, q, k, v, hp.attention_scale)
    return None if g.n_outputs == 0 and il == hp.kv_owners()[-1] else attended


def _qkv(g: ModelGraph, x: Tensor, il: int) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Query, key and value, [head, heads, tokens] each; key and value None where the layer reads another's."""
    hp, prefix = g.hp, f"blk.{il}"
    if _own(hp).has_fused_qkv[il]:
        q, k, v = g.split_qkv(g.linear(x, f"{prefix}.attn_qkv"), il)
        return (q, k, v) if hp.owns_kv(il) else (q, None, None)
    q = g.heads(g.linear(x, f"{prefix}.attn_q"), hp.n_head[il])
    if not hp.owns_kv(il):
        return q, None, None
    k = g.heads(g.linear(x, f"{prefix}.attn_k"), hp.n_head_kv[il])
    if f"{prefix}.attn_v.weight" not in g.weights:
        return q, k, k
    return q, k, g.heads(g.linear(x, f"{prefix}.attn_v"), hp.n_head_kv[il])


def _experts(g: ModelGraph, x: Tensor, il: int) -> Tensor:
    """The experts' sum, normed; experts and router norm x each in their own way."""
    prefix = f"blk.{il}"
    routed = g.b.scale(g.rms_norm(x), inverse_sqrt_f32(g.hp.n_embd))
    routed = g.b.mul(routed, g.weights[f"{prefix}.ffn_gate_inp.scale"], f"{prefix}.ffn_moe_routed")
    logits = g.product(routed, f"{prefix}.ffn_gate_inp", f"{prefix}.ffn_moe_logits")
    fed = expert_ffn(g, g.norm(x, f"{prefix}.pre_ffw_norm_2"), il, "geglu", logits=logits)
    return g.norm(fed, f"{prefix}.post_ffw_norm_2")


def _with_per_layer_input(g: ModelGraph, x: Tensor, il: int, per_layer: Tensor) -> Tensor:
    """x plus what the layer makes of its part of `per_layer`, gated by x."""
    prefix = f"blk.{il}"
    (part,) = g.at_last_layer(il, g.b.view(per_layer, per_layer.ne[:2], (per_layer.nb[1],), il * per_layer.nb[2]))
    gate = g.b.gelu(g.linear(x, f"{prefix}.inp_gate"), f"{prefix}.per_layer_gate")
    added = g.linear(g.b.mul(gate, part, f"{prefix}.per_layer_gated"), f"{prefix}.proj")
    return g.b.add(x, g.norm(added, f"{prefix}.post_norm"), f"{prefix}.per_layer_residual")


ARCHITECTURE = Architecture("gemma4", hyperparameters, tensors, graph)
