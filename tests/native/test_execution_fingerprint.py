"""The name of an execution: K/V of another name cannot stand for it. And cells that are counted once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import executor_over, feed, loaded
from tiny_models import write_llama

from ggml_engine.models.model import Model

SIZES = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_head_kv": 1, "head_size": 32, "n_ff": 32}
CHANGES: list[dict[str, Any]] = [
    {"k_type": "f32"},
    {"v_type": "f32"},
    {"attention": "flash"},
    {"attention": "matmul"},
    {"v_layout": "rows", "attention": "matmul"},
    {"run": 128},
    {"read_block": 128},
    {"deterministic": True},
    {"cache_kind": "sequence"},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("tiny") / "model.gguf"
    write_llama(path, **SIZES)
    with loaded(path, threads=1) as model:
        yield model


def name_of(model: Model, **options: Any) -> str:
    with executor_over(model, capacity=512, **options) as executor:
        return executor.fingerprint


@pytest.mark.parametrize("options", CHANGES, ids=str)
def test_another_execution_has_another_fingerprint(model: Model, options: dict[str, Any]) -> None:  # R25
    assert name_of(model, **options) != name_of(model)


def test_what_changes_no_number_changes_no_fingerprint(model: Model) -> None:  # R25
    assert name_of(model) == name_of(model, max_batch_tokens=64, max_graphs=2, compact=False, calibrate=True)
    assert len(name_of(model)) == 64


def test_another_model_has_another_fingerprint(model: Model, tmp_path: Path) -> None:  # R25
    write_llama(tmp_path / "other.gguf", seed=8, **SIZES)
    with loaded(tmp_path / "other.gguf", threads=1) as other:
        assert name_of(other) != name_of(model)


def test_a_cell_of_several_sequences_counts_once(model: Model) -> None:  # R43
    with executor_over(model, capacity=512) as executor:
        source = executor.open()
        feed(executor, source, [5] * 20)
        clone = executor.clone(source, 15)
        assert clone is not None
        feed(executor, clone, [6] * 3)
        assert executor.count_cells([source]) == 20
        assert executor.count_cells([source, clone]) == 23
        assert executor.count_cells([]) == 0
        assert executor.bytes_per_cell == executor.cache.pool.bytes_per_cell > 0
