"""The pieces that models by definition are made of, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np

from ggml_engine.reference.naive import attention, gelu, ggml_gelu, rms_norm, rotate, silu, softmax, visible


def test_a_query_sees_itself_and_what_is_before_it_inside_its_window() -> None:
    assert visible(3, 0).tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    assert visible(4, 2).tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [False, True, True, False],
        [False, False, True, True],
    ]
    assert np.array_equal(visible(3, 1), np.eye(3, dtype=bool))
    assert np.array_equal(visible(3, 9), visible(3, 0))


def test_attention_with_equal_scores_is_the_mean_of_what_is_seen() -> None:
    q = np.zeros((3, 2, 4))
    k = np.ones((3, 1, 4))
    v = np.arange(3.0).reshape(3, 1, 1)  # values may be narrower than keys
    assert attention(q, k, v, visible(3, 0), 0.5).tolist() == [[0.0, 0.0], [0.5, 0.5], [1.0, 1.0]]
    assert attention(q, k, v, visible(3, 1), 0.5).tolist() == [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]


def test_each_group_of_query_heads_reads_its_own_head_of_keys() -> None:
    v = np.array([[[1.0], [2.0]]])
    assert attention(np.zeros((1, 4, 2)), np.zeros((1, 2, 2)), v, visible(1, 0), 1.0).tolist() == [[1.0, 1.0, 2.0, 2.0]]


def test_rotation_by_a_quarter_turns_pairs_side_by_side_or_half_a_head_apart() -> None:
    x = np.array([[[1.0, 0.0]]])
    assert np.allclose(rotate(x, np.array([np.pi / 2]), 10000.0, neox=False), [[[0.0, 1.0]]])
    wide = np.array([[[1.0, 2.0, 3.0, 4.0]]])
    still = 1e300  # as a base: the second pair does not turn
    assert np.allclose(rotate(wide, np.array([np.pi / 2]), still, neox=False), [[[-2.0, 1.0, 3.0, 4.0]]])
    assert np.allclose(rotate(wide, np.array([np.pi / 2]), still, neox=True), [[[-3.0, 2.0, 1.0, 4.0]]])
    halved = rotate(x, np.array([np.pi]), 10000.0, neox=False, factors=np.array([2.0]))
    assert np.allclose(halved, [[[0.0, 1.0]]])


def test_functions_stay_finite_where_arguments_are_large() -> None:
    x = np.array([-1e5, -1e3, 0.0, 1e3, 1e5])
    assert silu(x).tolist() == [0.0, 0.0, 0.0, 1e3, 1e5]
    assert ggml_gelu(x).tolist() == [0.0, 0.0, 0.0, 1e3, 1e5]
    assert softmax(np.array([1e4, 1e4])).tolist() == [0.5, 0.5]
    near = np.linspace(-3, 3, 50)
    assert 0 < np.abs(gelu(near) - ggml_gelu(near)).max() < 4e-3
    assert np.allclose(rms_norm(np.array([3.0, 4.0]), np.array([1.0, 2.0]), 0.0), np.array([3.0, 8.0]) / np.sqrt(12.5))
