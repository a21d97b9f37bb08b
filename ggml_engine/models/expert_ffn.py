"""The feed-forward of layers with experts: a router chooses some for every token, their results are added by weight.

Shazeer et al. 2017, arXiv:1701.06538; groups: DeepSeek-AI 2024, arXiv:2412.19437. What varies is in `Experts`.
"""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

from ggml_engine.errors import HyperparameterError
from ggml_engine.ggml.ops import Tensor
from ggml_engine.models.architecture import gated_ffn_weights
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.experts import Experts, Gating
from ggml_engine.models.weights import Role, TensorSpec

ExpertActivation: TypeAlias = Literal["swiglu", "geglu", "swiglu_oai"]

_SMALLEST_SUM = 6.103515625e-5  # of weights that are divided by their sum: the smallest normal f16
_OAI_ALPHA, _OAI_LIMIT = 1.702, 7.0  # of gpt-oss


def experts_of(hp: Hyperparameters) -> Experts:
    """The experts of a model that must have some."""
    if hp.experts is None:
        raise HyperparameterError(f"{hp.architecture}.expert_count", "this architecture has experts, the file none")
    return hp.experts


def has_experts(hp: Hyperparameters, il: int) -> bool:
    """Whether a layer's feed-forward has experts."""
    return hp.experts is not None and not (hp.experts.is_dense and hp.experts.is_dense[il])


def expert_weights(
    hp: Hyperparameters,
    il: int,
    *,
    biases: bool = False,
    merged: bool = False,
    selection_bias: bool | None = None,
    shared_gate: bool = False,
) -> list[TensorSpec]:
    """Router, experts and shared experts of a layer.

    `biases` asks for those of router and experts, `merged` for gate and up in one tensor; `selection_bias` (True: must
    be there, False: may) for what is added to choose and not to weigh; `shared_gate` for a gate of the shared experts.
    """
    experts = experts_of(hp)
    prefix, n, n_ff = f"blk.{il}", experts.n_expert, experts.n_ff
    specs = [TensorSpec(f"{prefix}.ffn_gate_inp.weight", (hp.n_embd, n), Role.MATMUL, il)]
    parts = {"gate_up": (hp.n_embd, 2 * n_ff)} if merged else {"gate": (hp.n_embd, n_ff), "up": (hp.n_embd, n_ff)}
    parts["down"] = (n_ff, hp.n_embd)
    for part, (n_in, n_out) in parts.items():
        name = f"{prefix}.ffn_{part}_exps"
        specs.append(TensorSpec(f"{name}.weight", (n_in, n_out, n), Role.EXPERTS, il))
        specs.append(TensorSpec(f"{name}.scale", (n,), Role.MUL, il, required=False))
        if biases:
            specs.append(TensorSpec(f"{name}.bias", (n_out, n), Role.EXPERT_BIASES, il))
    if biases:
        specs.append(TensorSpec(f"{prefix}.ffn_gate_inp.bias", (n,), Role.ADD, il))
    if selection_bias is not None:
        specs.append(TensorSpec(f"{prefix}.exp_probs_b.bias", (n,), Role.ADD, il, required=selection_bias))
    if experts.n_ff_shared:
        n_ff = experts.n_ff_shared
        shapes = {"gate": (hp.n_embd, n_ff), "up": (hp.n_embd, n_ff), "down": (n_ff, hp.n_embd)}
        for part, shape in shapes.items():
            specs.append(TensorSpec(f"{prefix}.ffn_{part}_shexp.weight", shape, Role.MATMUL, il))
            specs.append(TensorSpec(f"{prefix}.ffn_{part}_shexp.scale", (1,), Role.MUL, il, required=False))
    if shared_gate:
        specs.append(TensorSpec(f"{prefix}.ffn_gate_inp_shexp.weight", (hp.n_embd,), Role.MATMUL, il))
    return specs


def dense_or_expert_weights(
    hp: Hyperparameters, il: int, *, dense_biases: bool = False, selection_bias: bool | None = None
) -> list[TensorSpec]:
    """What `dense_or_expert_ffn` needs: `expert_weights` of a layer with experts, `gated_ffn_weights` of a dense one.

    `dense_biases` allows for biases of the latter.
    """
    if has_experts(hp, il):
        return expert_weights(hp, il, selection_bias=selection_bias)
    return gated_ffn_weights(hp, il, biases=dense_biases)


def expert_ffn(
    g: ModelGraph,
    x: Tensor,
    il: int,
    activation: ExpertActivation = "swiglu",
    *,
    logits: Tensor | None = None,
    weights_first: bool = False,
) -> Tensor:
    """The experts' sum for x f32 [n_embd, tokens]; without shared experts, which are `shared_ffn`.

    `logits` [n_expert, tokens] stand for the router's. `weights_first` multiplies what goes into an expert in place of
    what comes out.
    """
    experts, prefix = experts_of(g.hp), f"blk.{il}"
    if logits is None:
        exact = experts.gating is Gating.SQRT_SOFTPLUS
        logits = g.linear(x, f"{prefix}.ffn_gate_inp", f32_accumulation=exact)
    chosen, weights = _route(g, logits, il, weights_first)
    n_embd, n_tokens = x.ne[0], x.ne[1]
    x = g.b.reshape(x, n_embd, 1, n_tokens)
    if weights_first:
        x = g.b.mul(g.b.repeat_to(x, n_embd, experts.n_used, n_tokens, 1), weights, f"{prefix}.ffn_moe_weighted")
    gate, up = _gate_and_up(g, x, chosen, prefix)
    if activation == "swiglu_oai":
        fed = g.b.swiglu_oai(gate, up, _OAI_ALPHA, _OAI_LIMIT, f"{prefix}.ffn_moe_act")
    else:
        fed = g.gated(activation, gate, up, f"{prefix}.ffn_moe_act")
    y = _product(g, fed, chosen, f"{prefix}.ffn_down_exps")  # [n_embd, used, tokens]
    if not weights_first:
        y = g.b.mul(y, weights, f"{prefix}.ffn_moe_weighted")
    g.b.expand(y)
    return _sum(g, y, experts.n_used, f"{prefix}.ffn_moe_out")


def shared_ffn(g: ModelGraph, x: Tensor, il: int, *, f32_accumulation: bool = False) -> Tensor:
    """What the experts that every token passes make of x, times their gate's sigmoid where they have one."""
    prefix = f"blk.{il}"
    y = g.mlp(x, f"{prefix}.ffn", "swiglu", "_shexp", f32_accumulation=f32_accumulation)
    if f"{prefix}.ffn_gate_inp_shexp.weight" not in g.weights:
        return y
    logit = g.linear(x, f"{prefix}.ffn_gate_inp_shexp")
    gate = g.b.div(g.b.silu(logit), logit, f"{prefix}.ffn_shexp_gate")  # the sigmoid, rounded as libllama does
    return g.b.mul(y, gate, f"{prefix}.ffn_shexp_gated")


def dense_or_expert_ffn(g: ModelGraph, x: Tensor, il: int, *, f32_accumulation: bool = False) -> Tensor:
    """The feed-forward of models whose layers are dense or have experts, with or without shared ones beside them.

    `f32_accumulation` is for the down weights, other than the experts'.
    """
    if not has_experts(g.hp, il):
        return g.ffn(x, il, "swiglu", f32_accumulation=f32_accumulation)
    y = expert_ffn(g, x, il)
    if not experts_of(g.hp).n_ff_shared:
        return y
    return g.b.add(y, shared_ffn(g, x, il, f32_accumulation=f32_accumulation), f"blk.{il}.ffn_with_shared")


def _route(g: ModelGraph, logits: Tensor, il: int, weights_first: bool) -> tuple[Tensor, Tensor]:
    """Which experts, i32 [used, tokens], and their weights, f32 [1, used, tokens]."""
    experts, prefix = experts_of(g.hp), f"blk.{il}"
    n_tokens = logits.ne[1]
    if experts.gating is Gating.SOFTMAX:
        probabilities = g.b.soft_max(logits, name=f"{prefix}.ffn_moe_probs")
    elif experts.gating is Gating.SIGMOID:
        probabilities = g.b.sigmoid(logits, f"{prefix}.ffn_moe_probs")
    elif experts.gating is Gating.SQRT_SOFTPLUS:
        probabilities = g.b.sqrt(g.b.softplus(logits), f"{prefix}.ffn_moe_probs")
    else:
        probabilities = logits
    selection = logits if weights_first else probabilities
    if (bias := g.weights.get(f"{prefix}.exp_probs_b.bias")) is not None:
        selection = g.b.add(selection, bias, f"{prefix}.ffn_moe_selection")
    if experts.n_groups:
        selection = _only_best_groups(g, selection, experts)
    chosen = g.b.top_k(selection, experts.n_used, f"{prefix}.ffn_moe_topk")
    weights = g.b.get_rows(g.b.reshape(probabilities, 1, experts.n_expert, n_tokens), chosen)
    if experts.gating is Gating.SOFTMAX_OF_CHOSEN:
        weights = g.b.soft_max(g.b.reshape(weights, experts.n_used, n_tokens))
    if experts.normalised:
        weights = g.b.reshape(weights, experts.n_used, n_tokens)
        total = g.b.clamp(g.b.sum_rows(weights), _SMALLEST_SUM, math.inf)
        weights = g.b.div(weights, total)
    weights = g.b.reshape(weights, 1, experts.n_used, n_tokens)
    if experts.weight_scale != 1.0:
        weights = g.b.scale(weights, experts.weight_scale)
    g.b.expand(weights)
    return chosen, weights


def _only_best_groups(g: ModelGraph, selection: Tensor, experts: Experts) -> Tensor:
    """The selection with those experts at -inf whose group is not among the best; a group counts its best two."""
    n_groups, n_tokens = experts.n_groups, selection.ne[1]
    size = experts.n_expert // n_groups
    grouped = g.b.reshape(selection, size, n_groups, n_tokens)
    best = g.b.get_rows(g.b.reshape(grouped, 1, size, n_groups, n_tokens), g.b.top_k(grouped, 2))
    scores = g.b.reshape(g.b.sum_rows(g.b.reshape(best, 2, n_groups, n_tokens)), n_groups, n_tokens)
    groups = g.b.top_k(scores, experts.n_groups_used)
    kept = g.b.get_rows(grouped, groups)
    masked = g.b.set_rows(g.b.fill(grouped, -math.inf), kept, groups)
    return g.b.reshape(masked, experts.n_expert, n_tokens)


def _gate_and_up(g: ModelGraph, x: Tensor, chosen: Tensor, prefix: str) -> tuple[Tensor, Tensor]:
    merged = f"{prefix}.ffn_gate_up_exps"
    if f"{merged}.weight" not in g.weights:
        up = _product(g, x, chosen, f"{prefix}.ffn_up_exps")
        return _product(g, x, chosen, f"{prefix}.ffn_gate_exps"), up
    both = _product(g, x, chosen, merged)
    shape = (both.ne[0] // 2, both.ne[1], both.ne[2])
    halves = [g.b.view(both, shape, both.nb[1:3], i * shape[0] * both.nb[0]) for i in range(2)]
    return halves[0], halves[1]


def _product(g: ModelGraph, x: Tensor, chosen: Tensor, weight: str) -> Tensor:
    """Every chosen expert's weight times x, with its scale, what adapters change, and its bias, where there are any."""
    product = g.b.mul_mat_id_apart if g.rows_apart else g.b.mul_mat_id
    y = product(g.weight(weight), x, chosen, f"{weight}.out")
    if (scale := g.weights.get(f"{weight}.scale")) is not None:
        n_expert, n_tokens = scale.ne[0], chosen.ne[1]
        scales = g.b.repeat_to(g.b.reshape(scale, 1, n_expert, 1), 1, n_expert, n_tokens, 1)
        y = g.b.mul(y, g.b.get_rows(scales, chosen), f"{weight}.scaled")
    if g.adapted is not None:
        y = g.adapted.add_to_experts(y, f"{weight}.weight", x, lambda a, x: product(a, x, chosen))
    if (bias := g.weights.get(f"{weight}.bias")) is not None:
        y = g.b.add_id(y, bias, chosen, f"{weight}.biased")
    return y


def _sum(g: ModelGraph, y: Tensor, n_used: int, name: str) -> Tensor:
    """[n_embd, used, tokens] added up in the order of the experts' ranks."""
    parts = [g.b.view(y, (y.ne[0], y.ne[2]), (y.nb[2],), i * y.nb[1]) for i in range(n_used)]
    for part in parts:  # the views before the sums
        g.b.expand(part)
    total = parts[0]
    for part in parts[1:]:
        total = g.b.add(total, part)
        g.b.expand(total)
    return g.b.cont(total, name) if n_used == 1 else total
