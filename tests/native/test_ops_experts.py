"""Operations of mixtures of experts compute what their docstrings say, against numpy."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from graphs import Bench, close, evaluate, random

from ggml_engine.ggml.ops import Tensor
from ggml_engine.ggml.ops.experts import n_tensors_apart
from ggml_engine.ggml.tensor_types import TensorType

F32, F16, I32, I64 = TensorType.F32, TensorType.F16, TensorType.I32, TensorType.I64
Q4_0, Q8_0 = TensorType.Q4_0, TensorType.Q8_0


def top(a: npt.NDArray[np.float32], k: int) -> npt.NDArray[np.int64]:
    return np.argsort(-a, axis=-1, kind="stable")[..., :k]


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("k", [1, 4, 60])
def test_top_k_gives_the_places_of_the_largest(k: int, n_threads: int) -> None:
    a = random(7, 60)
    found = evaluate(lambda bench: bench.builder.top_k(bench.input(a), k), n_threads=n_threads)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, top(a, k))


def test_top_k_takes_rows_that_lie_apart() -> None:
    a = random(5, 2, 12)
    found = evaluate(lambda bench: bench.builder.top_k(bench.builder.view(bench.input(a), (8, 5), (96,), 56), 3))
    np.testing.assert_array_equal(found, top(a[:, 1, 2:10], 3))


def test_top_k_of_a_row_with_nan_gives_numbers_of_the_row() -> None:
    # what the ids index lies in memory: one that is out of range would be read
    rng = np.random.default_rng(5)
    a = random(64, 300)
    a[rng.random(a.shape) < rng.choice([0.01, 0.3, 1.0], size=(64, 1))] = np.nan
    found = evaluate(lambda bench: bench.builder.top_k(bench.input(a), 300))
    np.testing.assert_array_equal(np.sort(found, axis=-1), np.broadcast_to(np.arange(300), found.shape))


def test_top_k_takes_two_tensors_and_gives_a_view() -> None:
    bench = Bench()
    a = bench.input(random(3, 8))
    before = bench.builder.n_tensors
    chosen = bench.builder.top_k(a, 2, name="chosen")
    assert bench.builder.n_tensors == before + 2
    assert (chosen.name, chosen.type, chosen.ne, chosen.nb[1]) == ("chosen", I32, (2, 3, 1, 1), 32)


def product(
    experts: npt.NDArray[np.float64], x: npt.NDArray[np.float32], ids: npt.NDArray[np.int64]
) -> npt.NDArray[np.float64]:
    """[tokens, used, m] of experts [n_expert, m, k], x [tokens, used or 1, k], ids [tokens, used]."""
    return np.einsum("tumk,tuk->tum", experts[ids], np.broadcast_to(x, (*ids.shape, x.shape[-1])))


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("kind", [F32, F16, Q8_0, Q4_0, TensorType.MXFP4])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("n_tokens", [1, 40])
def test_mul_mat_id_multiplies_by_the_chosen(kind: TensorType, apart: bool, n_tokens: int, n_threads: int) -> None:
    experts, probabilities = random(6, 48, 64), random(n_tokens, 6, seed=3)
    x = random(n_tokens, 3 if apart else 1, 64, seed=1)

    def build(bench: Bench) -> Tensor:
        ids = bench.builder.top_k(bench.input(probabilities), 3)
        return bench.builder.mul_mat_id(bench.input(experts, kind), bench.input(x), ids)

    stored = experts
    if kind in {Q8_0, Q4_0, TensorType.MXFP4}:
        number = gguf.GGMLQuantizationType(int(kind))
        stored = gguf.quants.dequantize(gguf.quants.quantize(experts, number), number)
    expected = product(stored.astype(np.float64), x, top(probabilities, 3))
    # x is rounded to what the type is multiplied by
    close(evaluate(build, n_threads=n_threads).reshape(expected.shape), expected, 3e-6 if kind == F32 else 2e-2)


def test_mul_mat_id_takes_views_of_experts_and_rows() -> None:
    experts, x, ids = random(4, 10, 32), random(5, 2, 3, 32, seed=1), np.array([[3, 0], [1, 1], [0, 2], [2, 3], [3, 3]])

    def build(bench: Bench) -> Tensor:
        weights, rows = bench.input(experts), bench.input(x)
        lower = bench.builder.view(weights, (32, 6, 4), weights.nb[1:3], 4 * weights.nb[1])
        middle = bench.builder.view(rows, (32, 2, 5), rows.nb[2:4], rows.nb[1])
        return bench.builder.mul_mat_id(lower, middle, bench.input(ids, I32))

    close(evaluate(build), product(experts[:, 4:].astype(np.float64), x[:, :, 1], ids), 3e-6)


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("n_tokens", [1, 7, 8, 30])
def test_mul_mat_id_apart_is_the_same_product_in_as_many_tensors_as_it_says(n_tokens: int, apart: bool) -> None:
    raw = np.zeros((6 * 32, TensorType.Q6_K.block_bytes), np.uint8)
    raw[:, :-2] = np.random.default_rng(4).integers(0, 64, (raw.shape[0], raw.shape[1] - 2))
    raw[:, -2:] = np.frombuffer(np.float16(0.001).tobytes(), np.uint8)
    x, probabilities = random(n_tokens, 3 if apart else 1, 256, seed=1), random(n_tokens, 6, seed=3)
    found = []
    for name in ("mul_mat_id", "mul_mat_id_apart"):
        bench = Bench()
        experts = bench.raw_input(raw, TensorType.Q6_K, 256, 32, 6)
        ids, rows = bench.builder.top_k(bench.input(probabilities), 3), bench.input(x)
        before = bench.builder.n_tensors
        y = getattr(bench.builder, name)(experts, rows, ids, "product")
        assert bench.builder.n_tensors - before <= n_tensors_apart(n_tokens)
        found.append(bench.run(y))
    close(found[1], found[0], 1e-5)


def test_add_id_adds_the_rows_of_the_chosen() -> None:
    a, b, probabilities = random(5, 3, 16), random(7, 16, seed=1), random(5, 7, seed=2)

    def build(bench: Bench) -> Tensor:
        ids = bench.builder.top_k(bench.input(probabilities), 3)
        return bench.builder.add_id(bench.input(a), bench.input(b), ids)

    close(evaluate(build, n_threads=2), a + b[top(probabilities, 3)])


def test_get_rows_reads_the_weights_of_the_chosen() -> None:
    probabilities = random(5, 7)

    def build(bench: Bench) -> Tensor:
        p = bench.input(probabilities)
        return bench.builder.get_rows(bench.builder.reshape(p, 1, 7, 5), bench.builder.top_k(p, 3))

    close(evaluate(build), np.take_along_axis(probabilities, top(probabilities, 3), axis=-1)[..., None])


@pytest.mark.parametrize("ids_kind", [I32, I64])
@pytest.mark.parametrize("kind", [F32, F16, Q8_0])
def test_set_rows_writes_batches(kind: TensorType, ids_kind: TensorType) -> None:
    a, rows = random(2, 3, 6, 32), random(2, 3, 2, 32, seed=1)
    ids = np.array([[[5, 0], [1, 2], [3, 4]], [[0, 1], [2, 5], [4, 0]]])

    def build(bench: Bench) -> Tensor:
        return bench.builder.set_rows(bench.input(a, kind), bench.input(rows), bench.input(ids, ids_kind))

    expected = a.copy()
    np.put_along_axis(expected, ids[..., None], rows, axis=2)
    close(evaluate(build), expected, {F32: 0.0, F16: 1e-3, Q8_0: 2e-2}[kind])


def test_set_rows_repeats_ids_over_batches() -> None:
    a, rows, ids = random(4, 6, 8), random(4, 2, 8, seed=1), np.array([[5, 0], [1, 2]])
    found = evaluate(lambda bench: bench.builder.set_rows(bench.input(a), bench.input(rows), bench.input(ids, I32)))
    expected = a.copy()
    np.put_along_axis(expected, np.tile(ids, (2, 1))[..., None], rows, axis=1)
    close(found, expected, 0.0)


def test_groups_that_were_not_chosen_are_masked_out() -> None:
    # the choice of groups of DeepSeek-V3: everything at -inf, then the chosen groups written back
    scores = random(5, 4, 6)
    group_scores = random(5, 4, seed=1)

    def build(bench: Bench) -> Tensor:
        b = bench.builder
        all_groups = bench.input(scores)
        groups = b.top_k(bench.input(group_scores), 2)
        return b.set_rows(b.fill(all_groups, -np.inf), b.get_rows(all_groups, groups), groups)

    expected = np.full_like(scores, -np.inf)
    np.put_along_axis(expected, top(group_scores, 2)[..., None], scores[np.arange(5)[:, None], top(group_scores, 2)], 1)
    np.testing.assert_array_equal(evaluate(build), expected)
