"""Every graph operation computes what its docstring says, against numpy: the guards let through what ggml can do."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from graphs import Bench, close, evaluate, random
from naive import ggml_gelu, rotate, silu, softmax

from ggml_engine.ggml import backends
from ggml_engine.ggml.backends import Backend, Graph
from ggml_engine.ggml.ops import ROPE_NEOX, ROPE_NORMAL, Rope, Tensor
from ggml_engine.ggml.tensor_types import TensorType

F32, F16, BF16, Q8_0 = TensorType.F32, TensorType.F16, TensorType.BF16, TensorType.Q8_0

# one rounding of a result to the type
EPSILON = {F32: 1e-6, F16: 1e-3, BF16: 8e-3, Q8_0: 2e-2}


ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide}


@pytest.mark.parametrize("operation", ARITHMETIC)
@pytest.mark.parametrize("shape", [(2, 3, 4, 8), (1, 1, 4, 8), (8,), (4, 1), (2, 1, 1, 8), (3, 1, 2)])
def test_arithmetic_repeats_the_second(shape: tuple[int, ...], operation: str) -> None:
    a, b = random(2, 3, 4, 8), random(*shape)
    times = [large // small for large, small in zip(a.shape[-b.ndim :], b.shape, strict=True)]
    repeated = np.tile(b, times)  # also rows shorter than a's, where numpy's broadcasting stops
    found = evaluate(lambda bench: getattr(bench.builder, operation)(bench.input(a), bench.input(b)))
    close(found, ARITHMETIC[operation](a, repeated))


@pytest.mark.parametrize(("low", "high"), [(-0.5, 1.0), (-np.inf, 0.25), (0.0, np.inf), (-np.inf, np.inf), (0.5, 0.5)])
def test_clamp_bounds_rows_that_lie_apart_and_leaves_its_operand(low: float, high: float) -> None:
    a = random(2, 3, 12)
    bench = Bench()
    whole = bench.input(a)
    bounded = bench.builder.clamp(bench.builder.view(whole, (6, 3, 2), (48, 144), 8), low, high)
    found, kept = bench.run_all(bounded, bench.builder.scale(whole, 1.0))
    close(found, np.clip(a[..., 2:8], low, high), 0.0)
    close(kept, a, 0.0)


@pytest.mark.parametrize("value", [-np.inf, 0.0, 2.5])
def test_fill_takes_the_shape_and_leaves_its_operand(value: float) -> None:
    a = random(2, 3, 8)
    bench = Bench(n_threads=2)
    x = bench.input(a)
    found, kept = bench.run_all(bench.builder.fill(x, value), bench.builder.scale(x, 1.0))
    np.testing.assert_array_equal(found, np.full_like(a, value))
    close(kept, a, 0.0)


@pytest.mark.parametrize("eps", [0.0, 1e-5, 1e-1])
def test_layer_norm_centres_and_divides_each_row(eps: float) -> None:
    a = random(3, 4, 16) + 2

    def build(bench: Bench) -> Tensor:
        return bench.builder.layer_norm(bench.builder.permute(bench.input(a), 0, 2, 1, 3), eps)

    x = a.transpose(1, 0, 2).astype(np.float64)
    close(evaluate(build), (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps))


@pytest.mark.parametrize("kind", [F16, BF16])
@pytest.mark.parametrize("second", [F32, None])
@pytest.mark.parametrize("operation", ARITHMETIC)
def test_arithmetic_takes_half_floats(operation: str, kind: TensorType, second: TensorType | None) -> None:
    a, b = random(3, 8), random(3, 8, seed=1)
    b += np.sign(b)  # nothing is divided by almost nothing
    found = evaluate(
        lambda bench: getattr(bench.builder, operation)(bench.input(a, kind), bench.input(b, second or kind))
    )
    close(found, ARITHMETIC[operation](a, b), 3 * EPSILON[kind])


def test_scale_tanh_and_silu() -> None:
    a = random(3, 5, 7) * 4
    close(evaluate(lambda bench: bench.builder.scale(bench.input(a), -2.5)), a * -2.5)
    close(evaluate(lambda bench: bench.builder.tanh(bench.input(a))), np.tanh(a))
    close(evaluate(lambda bench: bench.builder.silu(bench.input(a))), silu(a.astype(np.float64)))


def test_swiglu_and_geglu_gate_the_second() -> None:
    gate, up = random(3, 5) * 4, random(3, 5, seed=1)
    close(
        evaluate(lambda bench: bench.builder.swiglu(bench.input(gate), bench.input(up))),
        silu(gate.astype(np.float64)) * up,
    )
    # one f16 step of the table, where the float32 of the argument lies between two entries
    close(
        evaluate(lambda bench: bench.builder.geglu(bench.input(gate), bench.input(up))),
        ggml_gelu(gate.astype(np.float64)) * up,
        1e-3,
    )


def test_repeat_copies_along_dimension_3() -> None:
    a = random(3, 4, 8)
    close(evaluate(lambda bench: bench.builder.repeat(bench.input(a), 5)), np.broadcast_to(a, (5, 3, 4, 8)))


@pytest.mark.parametrize("times", [(1, 1, 1, 1), (2, 1, 3, 1), (1, 4, 1, 2), (3, 2, 2, 2)])
def test_repeat_to_copies_along_every_dimension(times: tuple[int, int, int, int]) -> None:
    a = random(2, 3, 4, 5)

    def build(bench: Bench) -> Tensor:
        rows = bench.builder.view(bench.input(a), (3, 4, 3, 2), (20, 80, 240), 4)
        return bench.builder.repeat_to(rows, *(n * k for n, k in zip(rows.ne, times, strict=True)))

    close(evaluate(build), np.tile(a[..., 1:4], times[::-1]), 0.0)


def test_transpose_swaps_the_first_two() -> None:
    a = random(2, 3, 4)
    close(evaluate(lambda bench: bench.builder.cont(bench.builder.transpose(bench.input(a)))), a.transpose(0, 2, 1))


def test_argmax_and_largest_find_the_largest_of_each_row() -> None:
    a = random(5, 300)
    found = evaluate(lambda bench: bench.builder.argmax(bench.input(a)), n_threads=2)
    np.testing.assert_array_equal(found, a.argmax(-1))
    for k in (1, 7, 300):
        found = evaluate(lambda bench, k=k: bench.builder.largest(bench.input(a), k), n_threads=2)
        np.testing.assert_array_equal(np.sort(found, -1), np.sort(np.argsort(-a, -1)[:, :k], -1))


def test_argmax_and_largest_of_rows_with_nan_give_numbers_of_the_row() -> None:
    # what they index lies in memory: one that is out of range would be read
    rng = np.random.default_rng(5)
    a = random(64, 300)
    a[rng.random(a.shape) < rng.choice([0.01, 0.3, 1.0], size=(64, 1))] = np.nan
    for found in (
        evaluate(lambda bench: bench.builder.argmax(bench.input(a))),
        evaluate(lambda bench: bench.builder.largest(bench.input(a), 50)),
    ):
        assert found.min() >= 0
        assert found.max() < 300


def test_step_tells_what_is_above_zero() -> None:
    a = np.array([[-1.0, -0.0, 0.0, 1e-30, 2.0, np.nan, np.inf, -np.inf]], np.float32)
    close(
        evaluate(lambda bench: bench.builder.step(bench.input(a))), np.array([0, 0, 0, 1, 1, 0, 1, 0], np.float32), 0.0
    )


def test_sum_rows_sums_each_row() -> None:
    a = random(2, 3, 4, 9)
    close(evaluate(lambda bench: bench.builder.sum_rows(bench.input(a))), a.sum(-1, dtype=np.float64, keepdims=True))


def test_a_view_of_four_dimensions_reads_at_its_strides() -> None:
    a = random(40, 8)

    def build(bench: Bench) -> Tensor:
        x = bench.input(a)
        return bench.builder.cont(bench.builder.view(x, (4, 3, 2, 4), (x.nb[1], 16, 10 * x.nb[1]), 2 * x.nb[1]))

    expected = np.stack([a[2 + 10 * i : 5 + 10 * i].reshape(3, 2, 4).transpose(1, 0, 2) for i in range(4)])
    close(evaluate(build), expected)


@pytest.mark.parametrize("eps", [0.0, 1e-6, 1e-1])
def test_rms_norm_divides_each_row(eps: float) -> None:
    a = random(2, 3, 16)
    expected = a / np.sqrt((a.astype(np.float64) ** 2).mean(-1, keepdims=True) + eps)
    close(evaluate(lambda bench: bench.builder.rms_norm(bench.input(a), eps)), expected)


def test_rms_norm_takes_strided_rows() -> None:
    a = random(3, 4, 8)

    def build(bench: Bench) -> Tensor:
        return bench.builder.rms_norm(bench.builder.permute(bench.input(a), 0, 2, 1, 3), 1e-6)

    turned = a.transpose(1, 0, 2).astype(np.float64)
    close(evaluate(build), turned / np.sqrt((turned**2).mean(-1, keepdims=True) + 1e-6))


@pytest.mark.parametrize("n_threads", [1, 2])
@pytest.mark.parametrize("kind", [F32, F16, BF16])
@pytest.mark.parametrize(
    "batches", [((), ()), ((2,), (2,)), ((1,), (4,)), ((2,), (6,)), ((3, 1), (3, 2)), ((1, 1), (2, 3))]
)
def test_mul_mat_repeats_batches(
    kind: TensorType, batches: tuple[tuple[int, ...], tuple[int, ...]], n_threads: int
) -> None:
    a, b = random(*batches[0], 6, 32), random(*batches[1], 5, 32, seed=1)
    repeated = a
    for axis, (few, many) in enumerate(zip(*batches, strict=True)):
        repeated = np.repeat(repeated, many // few, axis=axis)  # each head of a serves a group of b's, in order
    expected = np.einsum("...mk,...nk->...nm", repeated.astype(np.float64), b)
    found = evaluate(lambda bench: bench.builder.mul_mat(bench.input(a, kind), bench.input(b)), n_threads=n_threads)
    close(found, expected, {F32: 2e-6, F16: 2e-3, BF16: 2e-2}[kind])


@pytest.mark.parametrize("kind", [F32, F16, BF16])
def test_mul_mat_takes_the_first_type_on_both_sides_and_permuted_rows(kind: TensorType) -> None:
    a, b = random(3, 6, 32), random(5, 3, 32, seed=1)

    def build(bench: Bench) -> Tensor:
        second = bench.builder.permute(bench.input(b, kind), 0, 2, 1, 3)
        return bench.builder.mul_mat(bench.input(a, kind), second, f32_accumulation=True)

    expected = np.einsum("hmk,nhk->hnm", a.astype(np.float64), b)
    close(evaluate(build), expected, {F32: 2e-6, F16: 2e-3, BF16: 2e-2}[kind])


def test_reshape_keeps_the_order() -> None:
    a = random(4, 6)
    close(evaluate(lambda bench: bench.builder.reshape(bench.input(a), 24)), a.reshape(24))
    close(evaluate(lambda bench: bench.builder.reshape(bench.input(a), 8, 3)), a.reshape(3, 8))
    close(evaluate(lambda bench: bench.builder.reshape(bench.input(a), 2, 3, 4)), a.reshape(4, 3, 2))
    close(evaluate(lambda bench: bench.builder.reshape(bench.input(a), 2, 3, 2, 2)), a.reshape(2, 2, 3, 2))


def test_views_take_one_to_three_dimensions() -> None:
    a = random(5, 4, 6)
    row, plane = 24, 96

    def part(ne: tuple[int, ...], strides: tuple[int, ...], offset: int) -> npt.NDArray[np.generic]:
        return evaluate(lambda bench: bench.builder.cont(bench.builder.view(bench.input(a), ne, strides, offset)))

    close(part((7,), (), 4 * 3), a.ravel()[3:10])
    close(part((3, 2), (2 * row,), row + 8), a[0, 1::2, 2:5])
    close(part((2, 4, 3), (row, plane), plane + 16), a[1:4, :, 4:6])
    close(part((6, 2, 2), (row, 2 * plane), 2 * plane + 2 * row), a[2:5:2, 2:4])


def test_a_view_of_a_view_counts_from_the_first() -> None:
    a = random(6, 8)

    def build(bench: Bench) -> Tensor:
        lower = bench.builder.view(bench.input(a), (8, 4), (32,), 64)
        return bench.builder.cont(bench.builder.view(lower, (3, 2), (64,), 36))

    close(evaluate(build), a[2:][1::2, 1:4][:2])


def test_a_view_of_quantised_rows_takes_whole_blocks() -> None:
    a = random(4, 96)

    def build(bench: Bench) -> Tensor:
        return bench.builder.cont(bench.builder.view(bench.input(a, Q8_0), (32, 2), (3 * 34,), 3 * 34 + 34))

    close(evaluate(build), a[1:3, 32:64], EPSILON[Q8_0])


@pytest.mark.parametrize("axes", [(0, 2, 1, 3), (1, 0, 2, 3), (2, 0, 1, 3), (3, 2, 1, 0), (1, 2, 3, 0)])
@pytest.mark.parametrize("kind", [F32, F16, BF16, TensorType.I32, TensorType.I64, TensorType.I8])
def test_permute_sends_dimension_i_to_axis_i(axes: tuple[int, ...], kind: TensorType) -> None:
    a = random(2, 3, 4, 5)
    if kind not in EPSILON:
        a = np.arange(120, dtype=np.float32).reshape(a.shape)
    # numpy names, per result axis, where it comes from, in mirrored order
    sources = [3 - axes.index(3 - axis) for axis in range(4)]
    expected = a.transpose(sources)

    def build(bench: Bench) -> Tensor:
        return bench.builder.cont(bench.builder.permute(bench.input(a, kind), *axes))

    close(evaluate(build), expected, EPSILON.get(kind, 0.0))


def test_cont_2d_copies_under_a_new_shape() -> None:
    a = random(3, 4, 8)

    def build(bench: Bench) -> Tensor:
        return bench.builder.cont_2d(bench.builder.permute(bench.input(a), 0, 2, 1, 3), 24, 4)

    close(evaluate(build), a.transpose(1, 0, 2).reshape(4, 24))


@pytest.mark.parametrize("kind", [F32, F16, BF16, Q8_0])
def test_copy_fills_the_rows_of_a_view_and_leaves_the_others(kind: TensorType) -> None:
    a = random(5, 64)

    def build(bench: Bench) -> Tensor:
        source, target = bench.input(a, kind), bench.zeros(kind, 64, 6)
        row = kind.row_bytes(64)
        pairs = [(bench.builder.view(x, (64, 2), (2 * row,), first * row)) for x, first in ((source, 1), (target, 2))]
        bench.builder.expand(bench.builder.copy(*pairs))
        return target

    expected = np.zeros((6, 64), np.float32)
    expected[[2, 4]] = a[[1, 3]]
    close(evaluate(build), expected, EPSILON.get(kind, 0.0))


def test_copy_fills_part_of_every_column() -> None:
    a = random(3, 8)

    def build(bench: Bench) -> Tensor:
        source, target = bench.input(a, F16), bench.zeros(F16, 10, 3)
        bench.builder.expand(
            bench.builder.copy(
                bench.builder.view(source, (4, 3), (16,), 2), bench.builder.view(target, (4, 3), (20,), 10)
            )
        )
        return target

    expected = np.zeros((3, 10), np.float32)
    expected[:, 5:9] = a[:, 1:5]
    close(evaluate(build), expected, EPSILON[F16])


@pytest.mark.parametrize("source", [F32, F16, BF16])
@pytest.mark.parametrize("target", [F32, F16, BF16])
def test_cast_changes_the_type_and_packs(source: TensorType, target: TensorType) -> None:
    a = random(3, 4, 8)

    def build(bench: Bench) -> Tensor:
        result = bench.builder.cast(bench.builder.permute(bench.input(a, source), 0, 2, 1, 3), target)
        assert result.type == target
        return result

    close(evaluate(build), a.transpose(1, 0, 2), EPSILON[source] + EPSILON[target])


@pytest.mark.parametrize("axes", [(0, 1, 2, 3), (0, 2, 1, 3), (1, 0, 2, 3)])
def test_cast_cuts_f32_to_i32_and_back(axes: tuple[int, ...]) -> None:
    a = random(3, 4, 8) * 1000
    turned = a.transpose([2 - axes.index(2 - axis) for axis in range(3)])

    def cut(bench: Bench) -> Tensor:
        return bench.builder.cast(bench.builder.permute(bench.input(a), *axes), TensorType.I32)

    def back(bench: Bench) -> Tensor:
        whole = bench.input(np.trunc(a), TensorType.I32)
        return bench.builder.cast(bench.builder.permute(whole, *axes), F32)

    assert evaluate(cut).dtype == np.int32
    close(evaluate(cut), np.trunc(turned), 0.0)
    close(evaluate(back), np.trunc(turned), 0.0)


@pytest.mark.parametrize("kind", [F32, F16, BF16, TensorType.I32, TensorType.I64, TensorType.I16, TensorType.I8])
@pytest.mark.parametrize("dim", [0, 1, 2, 3])
def test_concat_joins_along_each_dimension(kind: TensorType, dim: int) -> None:
    shape = [2, 3, 4, 5]
    a = np.arange(120).reshape(shape) % 100
    shape[3 - dim] = 2
    b = 100 + np.arange(int(np.prod(shape))).reshape(shape) % 20
    found = evaluate(lambda bench: bench.builder.concat(bench.input(a, kind), bench.input(b, kind), dim))
    close(found, np.concatenate([a, b], axis=3 - dim))


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_concat_joins_quantised_rows(dim: int) -> None:
    shapes = {1: ((3, 64), (2, 64)), 2: ((2, 3, 64), (1, 3, 64)), 3: ((2, 1, 3, 64), (1, 1, 3, 64))}
    a, b = random(*shapes[dim][0]), random(*shapes[dim][1], seed=1)
    found = evaluate(lambda bench: bench.builder.concat(bench.input(a, Q8_0), bench.input(b, Q8_0), dim))
    close(found, np.concatenate([a, b], axis=a.ndim - 1 - dim), EPSILON[Q8_0])


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_concat_takes_strided_floats(dim: int) -> None:
    a = random(3, 4, 8)

    def build(bench: Bench) -> Tensor:
        turned = bench.builder.permute(bench.input(a), 1, 0, 2, 3)
        return bench.builder.concat(turned, turned, dim)

    close(evaluate(build), np.concatenate([a.transpose(0, 2, 1)] * 2, axis=2 - dim))


@pytest.mark.parametrize("kind", [F32, F16, BF16, Q8_0])
def test_get_rows_reads_rows_as_f32(kind: TensorType) -> None:
    a, ids = random(7, 32), np.array([6, 0, 3, 3])
    found = evaluate(lambda bench: bench.builder.get_rows(bench.input(a, kind), bench.input(ids, TensorType.I32)))
    close(found, a[ids], EPSILON[kind])


def test_get_rows_takes_batches() -> None:
    a, ids = random(3, 7, 8), np.array([[6, 0], [1, 1], [2, 5]])
    found = evaluate(lambda bench: bench.builder.get_rows(bench.input(a), bench.input(ids, TensorType.I32)))
    close(found, np.stack([a[i][ids[i]] for i in range(3)]))


SET_ROWS_TYPES = [
    F32,
    F16,
    BF16,
    Q8_0,
    TensorType.Q4_0,
    TensorType.Q4_1,
    TensorType.Q5_0,
    TensorType.Q5_1,
    TensorType.IQ4_NL,
]


@pytest.mark.parametrize("kind", SET_ROWS_TYPES)
def test_set_rows_writes_rows_in_the_pools_type_and_leaves_the_others(kind: TensorType) -> None:
    rows, ids = random(3, 64), np.array([5, 0, 2])
    bench = Bench()
    pool = bench.zeros(kind, 64, 7)
    written = bench.builder.set_rows(pool, bench.input(rows), bench.input(ids, TensorType.I64))
    every = bench.input(np.arange(7), TensorType.I32)
    found = bench.run(bench.builder.get_rows(written, every))
    expected = np.zeros((7, 64), np.float32)
    expected[ids] = rows
    # four-bit types keep about a sixteenth of the largest of a block
    close(found, expected, EPSILON.get(kind, 0.12))


def test_set_rows_takes_strided_rows_on_both_sides() -> None:
    rows, ids = random(3, 2, 8), np.array([4, 1, 0])
    bench = Bench()
    pool = bench.zeros(F16, 24, 6)
    left = bench.builder.view(pool, (8, 6), (48,), 16)
    source = bench.builder.view(bench.input(rows), (8, 3), (64,), 32)
    written = bench.builder.set_rows(left, source, bench.input(ids, TensorType.I64))
    found = bench.run(bench.builder.cont(written))
    expected = np.zeros((6, 8), np.float32)
    expected[ids] = rows[:, 1]
    close(found, expected, EPSILON[F16])


@pytest.mark.parametrize("kind", [F32, F16])
@pytest.mark.parametrize("mask_shape", [(4, 10), (6, 10), (2, 4, 10), (3, 1, 4, 10)])
def test_soft_max_masks_and_repeats_over_heads(kind: TensorType, mask_shape: tuple[int, ...]) -> None:
    a = random(3, 2, 4, 10)
    mask = np.where(random(*mask_shape, seed=2) > 0.7, -np.inf, 0).astype(np.float32)
    mask[..., 0] = 0
    expected = softmax(a.astype(np.float64) * 0.3 + mask[..., :4, :])
    close(evaluate(lambda bench: bench.builder.soft_max(bench.input(a), bench.input(mask, kind), 0.3)), expected)


def test_soft_max_needs_no_mask() -> None:
    a = random(2, 4, 10)
    close(evaluate(lambda bench: bench.builder.soft_max(bench.input(a))), softmax(a.astype(np.float64)))
    close(evaluate(lambda bench: bench.builder.soft_max(bench.input(a), scale=0.3)), softmax(a * np.float64(0.3)))


def with_sinks(scores: npt.NDArray[np.float64], sinks: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    """Softmax of [heads, rows, columns] with one more column a head, which is dropped."""
    column = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
    return softmax(np.concatenate([scores, column], axis=-1))[..., :-1]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("height", [0.0, 30.0, -30.0])
def test_sinks_take_part_in_the_sums_of_their_heads(masked: bool, height: float) -> None:
    a, sinks = random(3, 4, 10), random(3, seed=1) + np.float32(height)
    mask = np.where(random(4, 10, seed=2) > 0.5, -np.inf, 0).astype(np.float32)

    def build(bench: Bench) -> Tensor:
        given = bench.input(mask) if masked else None
        return bench.builder.soft_max(bench.input(a), given, 0.3, sinks=bench.input(sinks))

    close(evaluate(build, n_threads=2), with_sinks(a.astype(np.float64) * 0.3 + (mask if masked else 0), sinks))


def test_a_fully_masked_row_with_a_sink_is_zero() -> None:
    a, mask = random(3, 2, 10), np.full((2, 10), -np.inf)
    found = evaluate(
        lambda bench: bench.builder.soft_max(bench.input(a), bench.input(mask), 1.0, sinks=bench.input(np.zeros(3)))
    )
    close(found, np.zeros_like(a), 0.0)


def test_a_fully_masked_row_is_nan_and_spoils_no_other() -> None:
    a, mask = random(3, 10), np.zeros((3, 10), np.float32)
    mask[1] = -np.inf
    found = evaluate(lambda bench: bench.builder.soft_max(bench.input(a), bench.input(mask), 1.0))
    assert np.isnan(found[1]).all()
    close(found[[0, 2]], softmax(a[[0, 2]].astype(np.float64)))


@pytest.mark.parametrize("mode", [ROPE_NORMAL, ROPE_NEOX])
@pytest.mark.parametrize("n_dims", [16, 12, 2])
@pytest.mark.parametrize("with_factors", [False, True])
def test_rope_rotates_the_first_dimensions(mode: int, n_dims: int, with_factors: bool) -> None:
    a, positions = random(5, 3, 16), np.array([0, 1, 7, 100, 1000])
    factors = 1 + np.arange(n_dims // 2, dtype=np.float32) if with_factors else None
    rope = Rope(n_dims, 500.0, mode, scale=0.5)

    def build(bench: Bench) -> Tensor:
        places = bench.input(positions, TensorType.I32)
        return bench.builder.rope(bench.input(a), places, rope, None if factors is None else bench.input(factors))

    expected = a.astype(np.float64)
    turned = rotate(expected[..., :n_dims], positions * 0.5, 500.0, neox=mode == ROPE_NEOX, factors=factors)
    expected = np.concatenate([turned, expected[..., n_dims:]], axis=-1)
    # angles of up to 500 in float32
    close(evaluate(build), expected, 1e-4)


def test_rope_takes_f16_and_strided_heads() -> None:
    a, positions = random(4, 6, 8), np.arange(4)

    def build(bench: Bench) -> Tensor:
        part = bench.builder.view(bench.input(a, F16), (8, 3, 4), (16, 96), 48)
        return bench.builder.rope(part, bench.input(positions, TensorType.I32), Rope(8, 10000.0))

    close(evaluate(build), rotate(a[:, 3:].astype(np.float64), positions * 1.0, 10000.0, neox=False), 3e-3)


@pytest.mark.parametrize("mode", [ROPE_NORMAL, ROPE_NEOX])
@pytest.mark.parametrize("n_dims", [8, 4])
def test_rope_takes_the_heads_of_a_fused_row(mode: int, n_dims: int) -> None:
    # 3 heads of q, 2 of k and 2 of v beside each other in one row
    fused, positions = random(5, 7 * 8), np.array([3, 0, 9, 1, 4])
    whole = fused.reshape(5, 7, 8).astype(np.float64)
    for first, n_head in ((0, 3), (3, 2)):

        def build(bench: Bench, first: int = first, n_head: int = n_head) -> Tensor:
            row = bench.input(fused)
            part = bench.builder.view(row, (8, n_head, 5), (8 * 4, row.nb[1]), first * 8 * 4)
            return bench.builder.rope(part, bench.input(positions, TensorType.I32), Rope(n_dims, 1e4, mode))

        part = whole[:, first : first + n_head]
        turned = rotate(part[..., :n_dims], positions * 1.0, 1e4, neox=mode == ROPE_NEOX)
        close(evaluate(build, n_threads=2), np.concatenate([turned, part[..., n_dims:]], axis=-1))


@pytest.mark.parametrize("mode", [ROPE_NORMAL, ROPE_NEOX])
def test_rope_rotates_the_end_of_each_head_where_that_is_a_view(mode: int) -> None:
    # multi-head latent attention: 8 of 24 are rotated, the last ones
    a, positions = random(5, 3, 24), np.array([3, 0, 9, 1, 4])

    def build(bench: Bench) -> Tensor:
        heads = bench.input(a)
        end = bench.builder.view(heads, (8, 3, 5), heads.nb[1:3], 16 * 4)
        turned = bench.builder.rope(end, bench.input(positions, TensorType.I32), Rope(8, 1e4, mode))
        return bench.builder.concat(bench.builder.view(heads, (16, 3, 5), heads.nb[1:3], 0), turned, 0)

    turned = rotate(a[..., 16:].astype(np.float64), positions * 1.0, 1e4, neox=mode == ROPE_NEOX)
    close(evaluate(build), np.concatenate([a[..., :16], turned], axis=-1))


FLASH_TYPES = [F32, F16, BF16, Q8_0, TensorType.Q4_0]


@pytest.mark.parametrize("kind", FLASH_TYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("n_tokens", [1, 3, 70])
def test_flash_attention_is_attention(kind: TensorType, heads: int, kv_heads: int, n_tokens: int) -> None:
    check_flash(kind, heads, kv_heads, n_tokens, n_rows=80, softcap=0.0)


@pytest.mark.parametrize("softcap", [0.5, 20.0])
def test_flash_attention_caps_scores(softcap: float) -> None:
    check_flash(F32, 4, 2, 3, n_rows=80, softcap=softcap)


@pytest.mark.parametrize("n_rows", [1, 33, 511, 513])
def test_flash_attention_takes_any_number_of_rows(n_rows: int) -> None:
    check_flash(F16, 4, 2, 1, n_rows=n_rows, softcap=0.0)


@pytest.mark.parametrize("value_size", [32, 96])
def test_flash_attention_takes_values_of_another_width(value_size: int) -> None:
    check_flash(F16, 4, 2, 3, n_rows=40, softcap=0.0, value_size=value_size)


@pytest.mark.parametrize("height", [0.0, 30.0, -30.0])
@pytest.mark.parametrize("n_rows", [80, 600])
@pytest.mark.parametrize("n_tokens", [1, 3, 70])
def test_flash_attention_takes_sinks(n_tokens: int, n_rows: int, height: float) -> None:
    sinks = random(4, seed=3) + np.float32(height)
    check_flash(F32, 4, 2, n_tokens, n_rows=n_rows, softcap=0.0, sinks=sinks)


def check_flash(
    kind: TensorType,
    heads: int,
    kv_heads: int,
    n_tokens: int,
    *,
    n_rows: int,
    softcap: float,
    value_size: int = 64,
    sinks: npt.NDArray[np.float32] | None = None,
) -> None:
    size = 64
    q, k, v = (
        random(heads, n_tokens, size),
        random(kv_heads, n_rows, size),
        random(kv_heads, n_rows, value_size, seed=1),
    )
    mask = np.where(random(n_tokens, n_rows, seed=2) > 0.5, -np.inf, 0).astype(np.float32)
    mask[:, 0] = 0

    def build(bench: Bench) -> Tensor:
        tensors = [bench.input(q), bench.input(k, kind), bench.input(v, kind), bench.input(mask, F16)]
        given = None if sinks is None else bench.input(sinks)
        return bench.builder.flash_attention(*tensors, 0.125, softcap=softcap, sinks=given)

    group = heads // kv_heads
    scores = np.einsum("hqd,hrd->hqr", q.astype(np.float64), np.repeat(k, group, axis=0)) * 0.125
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    weights = softmax(scores + mask) if sinks is None else with_sinks(scores + mask, sinks)
    expected = np.einsum("hqr,hrd->qhd", weights, np.repeat(v, group, axis=0))
    found = evaluate(build, n_threads=2)
    # q is rounded to k's partner type, k and v to theirs; over f16 values single tokens are summed in f16
    bound = {F32: 1e-5, F16: 5e-3, BF16: 2e-2, Q8_0: 2e-2}.get(kind, 0.25)
    close(found.reshape(expected.shape), expected, bound)


def test_no_node_is_needed_for_an_input_that_is_the_result() -> None:
    a = random(3, 4)
    close(evaluate(lambda bench: bench.input(a)), a)


def test_a_graph_may_use_its_last_tensor() -> None:
    bench = Bench(max_tensors=11)
    result = bench.input(np.ones(4))
    for _ in range(10):
        result = bench.builder.add(result, result)
    assert bench.builder.n_tensors == bench.builder.max_tensors
    close(bench.run(result), np.full(4, 1024.0))


def test_an_input_is_spent_by_the_run() -> None:
    # ggml computes in place where it can: who runs a graph again must fill every input again
    bench = Bench()
    a = bench.builder.input("a", F32, 4)
    result = bench.builder.output(bench.builder.tanh(a), "y")
    backend = Backend(bench.libraries, backends.cpu_device(bench.libraries), 1)
    graph = Graph(bench.builder, [backend], "twice")
    for _ in range(2):
        backends.set_data(bench.libraries, a, np.ones(4, np.float32))
        graph.compute()
        close(backends.get_array(bench.libraries, result), np.full(4, np.tanh(1.0)))
    graph.compute()
    assert np.abs(backends.get_array(bench.libraries, result) - np.tanh(1.0)).max() > 0.1
    graph.free()
    backend.free()
