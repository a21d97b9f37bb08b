"""The feed-forward of layers with experts, against its definition in numpy: also what no architecture here has yet."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pytest
from graphs import Bench, close, random

from ggml_engine.models.attention import AttentionForm
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.expert_ffn import ExpertActivation, expert_ffn, shared_ffn
from ggml_engine.models.experts import Experts, Gating

Array = npt.NDArray[Any]
N_EMBD, N_FF, N_EXPERT, N_TOKENS = 32, 24, 8, 11
PLAIN = Experts(n_expert=N_EXPERT, n_used=3, n_ff=N_FF, gating=Gating.SOFTMAX, normalised=False)
WEIGHTS = {
    "ffn_gate_inp.weight": random(N_EXPERT, N_EMBD, seed=1),
    "ffn_gate_exps.weight": random(N_EXPERT, N_FF, N_EMBD, seed=2) / 5,
    "ffn_up_exps.weight": random(N_EXPERT, N_FF, N_EMBD, seed=3) / 5,
    "ffn_down_exps.weight": random(N_EXPERT, N_EMBD, N_FF, seed=4) / 5,
}
BIASES = {
    "ffn_gate_inp.bias": random(N_EXPERT, seed=5),
    "ffn_gate_exps.bias": random(N_EXPERT, N_FF, seed=6),
    "ffn_up_exps.bias": random(N_EXPERT, N_FF, seed=7),
    "ffn_down_exps.bias": random(N_EXPERT, N_EMBD, seed=8),
}
SCALES = {f"ffn_{part}_exps.scale": np.abs(random(N_EXPERT, seed=9)) for part in ("gate", "up", "down")}
SELECTION = {"exp_probs_b.bias": random(N_EXPERT, seed=10)}
X = random(N_TOKENS, N_EMBD, seed=11)


def evaluated(
    weights: Mapping[str, Array], experts: Experts, build: Any, *, n_threads: int = 1, x: Array = X
) -> npt.NDArray[np.float32]:
    """What `build` makes of x in layer 0."""
    bench = Bench(max_tensors=256, n_threads=n_threads)
    hp = cast("Hyperparameters", _Hyperparameters(experts))
    tensors = {f"blk.0.{name}": bench.input(values) for name, values in weights.items()}
    nothing = cast("Any", None)
    g = ModelGraph(
        bench.builder, hp, tensors, nothing, nothing, nothing, None, 1, 512, nothing, AttentionForm.MATMUL
    )  # fmt: skip
    return bench.run(build(g, bench.input(x)))


@dataclass(frozen=True)
class _Hyperparameters:
    """All that a feed-forward asks for."""

    experts: Experts
    architecture: str = "test"


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    powers = np.exp(x - x.max())
    return cast("Array", powers / powers.sum())


def activated(activation: str, gate: Array, up: Array) -> Array:
    if activation == "swiglu_oai":
        gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
        return gate * sigmoid(1.702 * gate) * (up + 1)
    if activation == "geglu":
        return gate * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3))) * up
    return gate * sigmoid(gate) * up


def expected(
    w: Mapping[str, Array], e: Experts, activation: str = "swiglu", *, weights_first: bool = False
) -> Array:  # fmt: skip
    """Token by token, expert by expert."""
    found = []
    for x in X.astype(np.float64):
        logits = w["ffn_gate_inp.weight"] @ x + w.get("ffn_gate_inp.bias", 0.0)
        scores = {
            Gating.SOFTMAX: softmax,
            Gating.SIGMOID: sigmoid,
            Gating.SOFTMAX_OF_CHOSEN: lambda x: x,
            Gating.SQRT_SOFTPLUS: lambda x: np.sqrt(np.log1p(np.exp(x))),
        }[e.gating](logits)
        selection = (logits if weights_first else scores) + w.get("exp_probs_b.bias", 0.0)
        if e.n_groups:
            groups = selection.reshape(e.n_groups, -1)
            best_two = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
            left_out = np.argsort(-best_two)[e.n_groups_used :]
            groups[left_out] = -np.inf
            selection = groups.ravel()
        chosen = np.argsort(-selection)[: e.n_used]
        shares = softmax(scores[chosen]) if e.gating is Gating.SOFTMAX_OF_CHOSEN else scores[chosen]
        if e.normalised:
            shares = shares / shares.sum()
        total = np.zeros(N_EMBD)
        for number, share in zip(chosen, shares * e.weight_scale, strict=True):

            def product(part: str, x: Array, number: int = int(number)) -> Array:
                y = w[f"ffn_{part}_exps.weight"][number] @ x
                y = y * w.get(f"ffn_{part}_exps.scale", np.ones(N_EXPERT))[number]
                return y + w.get(f"ffn_{part}_exps.bias", np.zeros((N_EXPERT, 1)))[number]

            into = x * share if weights_first else x
            y = product("down", activated(activation, product("gate", into), product("up", into)))
            total += y if weights_first else share * y
        found.append(total)
    return np.array(found)


CASES: dict[str, tuple[dict[str, Array], Experts, dict[str, Any]]] = {
    "plain": (WEIGHTS, PLAIN, {}),
    "normalised": (WEIGHTS, replace(PLAIN, normalised=True), {}),
    "one used": (WEIGHTS, replace(PLAIN, n_used=1), {}),
    "one used, normalised": (WEIGHTS, replace(PLAIN, n_used=1, normalised=True), {}),
    "all used": (WEIGHTS, replace(PLAIN, n_used=N_EXPERT), {}),
    "scaled": (WEIGHTS, replace(PLAIN, weight_scale=2.5, normalised=True), {}),
    "sigmoid": (WEIGHTS, replace(PLAIN, gating=Gating.SIGMOID), {}),
    "softmax of the chosen": (WEIGHTS, replace(PLAIN, gating=Gating.SOFTMAX_OF_CHOSEN), {}),
    "root of softplus": (WEIGHTS, replace(PLAIN, gating=Gating.SQRT_SOFTPLUS, normalised=True), {}),
    "selection bias": (WEIGHTS | SELECTION, replace(PLAIN, gating=Gating.SIGMOID, normalised=True), {}),
    "groups": (WEIGHTS, replace(PLAIN, n_groups=4, n_groups_used=2), {}),
    "groups, selection bias": (WEIGHTS | SELECTION, replace(PLAIN, gating=Gating.SIGMOID, n_groups=2, n_groups_used=1), {}),
    "biases": (WEIGHTS | BIASES, replace(PLAIN, gating=Gating.SOFTMAX_OF_CHOSEN), {"activation": "swiglu_oai"}),
    "scales of experts": (WEIGHTS | SCALES, PLAIN, {}),
    "scales and biases of experts": (WEIGHTS | SCALES | BIASES, PLAIN, {}),
    "geglu": (WEIGHTS, PLAIN, {"activation": "geglu"}),
    "weights first": (WEIGHTS, replace(PLAIN, gating=Gating.SIGMOID), {"weights_first": True}),
    "weights first, one used": (WEIGHTS, replace(PLAIN, gating=Gating.SIGMOID, n_used=1), {"weights_first": True}),
}  # fmt: skip


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_experts_are_their_definition(case: str, n_threads: int) -> None:
    weights, experts, how = CASES[case]
    found = evaluated(weights, experts, lambda g, x: expert_ffn(g, x, 0, **how), n_threads=n_threads)
    rounding = 2e-3 if how.get("activation") == "geglu" else 1e-5  # ggml looks gelu up in f16
    close(found, expected(weights, experts, **how), rounding)


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "swiglu_oai"])
@pytest.mark.parametrize("extra", [{}, BIASES], ids=["without biases", "with biases"])
def test_gate_and_up_in_one_tensor_are_the_same_bits(extra: dict[str, Array], activation: ExpertActivation) -> None:
    apart = WEIGHTS | extra
    merged = {name: values for name, values in apart.items() if "_gate_exps" not in name and "_up_exps" not in name}
    for kind in ("weight", "bias"):
        if f"ffn_gate_exps.{kind}" in apart:
            both = [apart[f"ffn_{part}_exps.{kind}"] for part in ("gate", "up")]
            merged[f"ffn_gate_up_exps.{kind}"] = np.concatenate(both, axis=1)

    def build(g: ModelGraph, x: Any) -> Any:
        return expert_ffn(g, x, 0, activation)

    assert evaluated(merged, PLAIN, build).tobytes() == evaluated(apart, PLAIN, build).tobytes()


def test_logits_may_stand_for_the_routers() -> None:
    router = random(N_EXPERT, N_EMBD, seed=13)

    def build(g: ModelGraph, x: Any) -> Any:
        return expert_ffn(g, x, 0, logits=g.b.mul_mat(g.weights["blk.0.router"], x))

    found = evaluated(WEIGHTS | {"router": router}, PLAIN, build)
    close(found, expected(WEIGHTS | {"ffn_gate_inp.weight": router}, PLAIN), 1e-5)


def test_the_sum_of_weights_is_kept_from_zero() -> None:
    """Sigmoids that vanish would be divided by nothing."""
    weights = WEIGHTS | {"ffn_gate_inp.bias": np.full(N_EXPERT, -200.0, np.float32)}
    experts = replace(PLAIN, gating=Gating.SIGMOID, normalised=True)
    assert np.isfinite(evaluated(weights, experts, lambda g, x: expert_ffn(g, x, 0))).all()


@pytest.mark.parametrize("gated", [False, True])
def test_shared_experts_are_a_dense_feed_forward_behind_their_gate(gated: bool) -> None:
    weights = {f"ffn_{part}_shexp.weight": WEIGHTS[f"ffn_{part}_exps.weight"][0] for part in ("gate", "up", "down")}
    if gated:
        weights["ffn_gate_inp_shexp.weight"] = random(N_EMBD, seed=12)
    x = X.astype(np.float64)
    gate, up = (x @ weights[f"ffn_{part}_shexp.weight"].T for part in ("gate", "up"))
    y = activated("swiglu", gate, up) @ weights["ffn_down_shexp.weight"].T
    if gated:
        y = y * sigmoid(x @ weights["ffn_gate_inp_shexp.weight"])[:, None]
    close(evaluated(weights, PLAIN, lambda g, x: shared_ffn(g, x, 0)), y, 1e-5)
