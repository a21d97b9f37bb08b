"""K and V of cells, as stored and as computed; and weights in float64, against gguf-py's."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from engines import feed, running
from tiny_models import BF16, F16, F32, Q4_0, Q8_0, write_llama

from ggml_engine.errors import CacheError, PositionError, UnknownSequenceError, WeightError
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.reference.inspection import kv_of, kv_of_position
from ggml_engine.reference.weights import FileWeights

TOKENS = list(range(20, 32))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "l.gguf", head_size=64, n_head=2, n_head_kv=2)


def test_k_and_v_of_a_position_are_those_of_its_cell_by_head(path: Path) -> None:
    with running(path, capacity=128, k_type="f32", v_type="f32") as executor:
        sequence = executor.open()
        feed(executor, sequence, TOKENS)
        cell = int(executor.cache.cells_of(sequence)[5])
        k, v = kv_of(executor, 1, cell)
        assert k.shape == v.shape == (2, 64)
        assert np.array_equal(kv_of_position(executor, sequence, 1, 5).k, k)
        assert np.array_equal(np.concatenate(k), executor.cache.pool.cell(1, cell)[0])
        clone = executor.clone(sequence, 6)
        assert np.array_equal(kv_of_position(executor, clone, 1, 5).v, v)


@pytest.mark.parametrize(("kv_type", "limit"), [("f16", 1e-3), ("q8_0", 2e-2), ("q4_0", 2e-1)])
def test_quantised_heads_are_rotated_back(path: Path, kv_type: str, limit: float) -> None:
    found = {}
    for name in ("f32", kv_type):
        with running(path, capacity=128, attention="flash", k_type=name, v_type=name) as executor:
            sequence = executor.open()
            feed(executor, sequence, TOKENS)
            # the first layer: its K and V do not depend on what was read back
            found[name] = kv_of_position(executor, sequence, 0, 7)
            stored = kv_of(executor, 0, int(executor.cache.cells_of(sequence)[7]))
    for exact, rounded, raw in zip(found["f32"], found[kv_type], stored, strict=True):
        assert np.abs(rounded - exact).max() < limit * np.abs(exact).max()
        is_rotated = np.abs(raw - exact).max() > 0.5 * np.abs(exact).max()
        assert is_rotated == (kv_type != "f16")


def test_what_is_not_there_is_refused(path: Path) -> None:
    with running(path, capacity=128) as executor:
        sequence = executor.open()
        feed(executor, sequence, TOKENS)
        with pytest.raises(PositionError, match="holds 12 positions, asked for 12"):
            kv_of_position(executor, sequence, 0, 12)
        with pytest.raises(UnknownSequenceError):
            kv_of_position(executor, 99, 0, 0)
        for layer, cell in ((2, 0), (-1, 0), (0, -1), (0, 10**6)):
            with pytest.raises(CacheError):
                kv_of(executor, layer, cell)


@pytest.mark.parametrize("types", [F32, F16, BF16, Q8_0, Q4_0])
def test_weights_in_float64_are_those_of_gguf_py(tmp_path: Path, types: gguf.GGMLQuantizationType) -> None:
    path = write_llama(tmp_path / "l.gguf", types=types)
    with GGUFFile.open(path) as file:
        weights = FileWeights(file)
        for tensor in gguf.GGUFReader(path).tensors:
            expected = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            found = weights.tensor(tensor.name)
            assert found.dtype == np.float64
            assert np.array_equal(found, expected)
        rows = weights.rows("token_embd.weight", [7, 0, 7])
        assert np.array_equal(rows, weights.tensor("token_embd.weight")[[7, 0, 7]])
        assert "nothing" not in weights
        with pytest.raises(WeightError, match="nothing"):
            weights.tensor("nothing")
