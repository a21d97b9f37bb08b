"""Activations compute what their docstrings say, also on views with contiguous rows, against numpy."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from graphs import Bench, close, evaluate, random
from naive import ggml_gelu, silu

from ggml_engine.ggml.ops import GraphBuilder, Tensor

Values = npt.NDArray[np.float64]


def sigmoid(x: Values) -> Values:
    return 1 / (1 + np.exp(-x))


def gelu_erf(x: Values) -> Values:
    return np.vectorize(lambda value: 0.5 * value * (1 + math.erf(value / math.sqrt(2))))(x)


def relu(x: Values) -> Values:
    return np.maximum(x, 0)


def softplus(x: Values) -> Values:
    return np.log1p(np.exp(x))


# operation: what numpy makes of it, bound; gelu is one f16 step of a table off
UNARY: dict[str, tuple[Callable[[Values], Values], float]] = {
    "tanh": (np.tanh, 2e-6),
    "sigmoid": (sigmoid, 2e-6),
    "silu": (silu, 2e-6),
    "gelu": (ggml_gelu, 1e-3),
    "gelu_erf": (gelu_erf, 2e-6),
    "relu": (relu, 0.0),
    "softplus": (softplus, 2e-6),
    "exp": (np.exp, 2e-6),
    "sqr": (np.square, 2e-6),
    "sqrt": (np.sqrt, 2e-6),
}
GATED: dict[str, tuple[Callable[[Values], Values], float]] = {
    "swiglu": (silu, 2e-6),
    "geglu": (ggml_gelu, 1e-3),
    "geglu_erf": (gelu_erf, 2e-6),
    "reglu": (relu, 2e-6),
}
HALVES = {"swiglu_halves": (silu, 2e-6), "geglu_halves": (ggml_gelu, 1e-3)}
OAI = (1.702, 7.0)


def swiglu_oai(gate: Values, up: Values, alpha: float, limit: float) -> Values:
    gate = np.minimum(gate, limit)
    return gate * sigmoid(alpha * gate) * (np.clip(up, -limit, limit) + 1)


def call(builder: GraphBuilder, operation: str, *arguments: Any) -> Tensor:
    result = getattr(builder, operation)(*arguments, name="result of the test")
    assert result.name == "result of the test"
    return result


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("operation", UNARY)
def test_an_activation_is_its_formula(operation: str, n_threads: int) -> None:
    formula, bound = UNARY[operation]
    a = random(3, 5, 70) * 8
    if operation == "sqrt":
        a = np.abs(a)
    found = evaluate(lambda bench: call(bench.builder, operation, bench.input(a)), n_threads=n_threads)
    close(found, formula(a.astype(np.float64)), bound)


@pytest.mark.parametrize("operation", UNARY)
def test_an_activation_takes_rows_that_lie_apart_and_in_any_order(operation: str) -> None:
    formula, bound = UNARY[operation]
    a = np.abs(random(3, 4, 12)) if operation == "sqrt" else random(3, 4, 12)

    def build(bench: Bench) -> Tensor:
        rows = bench.builder.view(bench.input(a), (7, 4, 3), (48, 4 * 48), 8)
        return call(bench.builder, operation, bench.builder.permute(rows, 0, 2, 1, 3))

    close(evaluate(build), formula(a[:, :, 2:9].transpose(1, 0, 2).astype(np.float64)), bound)


@pytest.mark.parametrize("terms", [(0.8, 0.3, 0.5, -1e-6), (-2.0, 1.5, 0.0, -0.5)])
def test_xielu_is_its_formula_on_both_sides_of_zero(terms: tuple[float, float, float, float]) -> None:
    a = random(4, 33) * 3

    def build(bench: Bench) -> Tensor:
        return bench.builder.xielu(bench.builder.view(bench.input(a), (20, 4), (132,), 4), *terms)

    x = a[:, 1:21].astype(np.float64)
    alpha_n, alpha_p, beta, eps = terms
    below = (np.expm1(np.minimum(x, eps)) - x) * (beta + softplus(np.float64(alpha_n))) + beta * x
    close(evaluate(build), np.where(x > 0, softplus(np.float64(alpha_p)) * x * x + beta * x, below))


@pytest.mark.parametrize("operation", GATED)
def test_a_gate_weighs_the_second(operation: str) -> None:
    formula, bound = GATED[operation]
    gate, up = random(3, 5) * 4, random(3, 5, seed=1)
    found = evaluate(lambda bench: call(bench.builder, operation, bench.input(gate), bench.input(up)))
    close(found, formula(gate.astype(np.float64)) * up, bound)


@pytest.mark.parametrize("operation", [*GATED, "swiglu_oai"])
@pytest.mark.parametrize("n_used", [1, 3])
@pytest.mark.parametrize("n_tokens", [1, 4])
def test_the_gate_and_what_it_weighs_may_be_halves_of_each_row(operation: str, n_used: int, n_tokens: int) -> None:
    both = random(n_tokens, n_used, 16) * 5

    def build(bench: Bench) -> Tensor:
        a = bench.input(both)
        ne, strides = (8, n_used, n_tokens), a.nb[1:3]
        gate, up = (bench.builder.view(a, ne, strides, offset) for offset in (0, 32))
        return call(bench.builder, operation, gate, up, *(OAI if operation == "swiglu_oai" else ()))

    gate, up = both[..., :8].astype(np.float64), both[..., 8:]
    expected = swiglu_oai(gate, up, *OAI) if operation == "swiglu_oai" else GATED[operation][0](gate) * up
    bound = 2e-6 if operation == "swiglu_oai" else GATED[operation][1]
    close(evaluate(build, n_threads=2).reshape(expected.shape), expected, bound)


@pytest.mark.parametrize("limit", [0.0, 1.5, math.inf])
def test_swiglu_oai_cuts_both_at_the_limit(limit: float) -> None:
    gate, up = random(3, 40) * 4, random(3, 40, seed=1) * 4
    found = evaluate(lambda bench: bench.builder.swiglu_oai(bench.input(gate), bench.input(up), 1.702, limit))
    close(found, swiglu_oai(gate.astype(np.float64), up, 1.702, limit))


@pytest.mark.parametrize("operation", HALVES)
def test_the_first_half_of_each_row_weighs_the_second(operation: str) -> None:
    formula, bound = HALVES[operation]
    a = random(2, 3, 20) * 4

    def build(bench: Bench) -> Tensor:
        return call(bench.builder, operation, bench.builder.view(bench.input(a), (16, 3, 2), (80, 240), 8))

    close(evaluate(build), formula(a[..., 2:10].astype(np.float64)) * a[..., 10:18], bound)
