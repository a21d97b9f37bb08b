"""What an architecture's own file checks: metadata that cannot be, and biases that must be, are named at loading.

What all architectures have in common is in `test_model_mutations`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architecture_rows import ROWS, model_file
from engines import loaded
from forged_models import drop_key, drop_tensors, set_key, taken_apart

from ggml_engine.errors import HyperparameterError, WeightError

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    ("row", "name", "value"),
    [
        ("cohere2", "attention.sliding_window", 0),
        ("cohere2", "attention.sliding_window_pattern", np.array([True])),
        ("cohere2", "attention.sliding_window", None),
        ("cohere2", "logit_scale", -1.0),
        ("cohere2", "logit_scale", None),
        ("cohere2", "attention.layer_norm_epsilon", 0.0),
        ("command-r", "logit_scale", NAN),
        ("falcon", "rope.dimension_count", 8),
        ("starcoder2", "rope.dimension_count", 8),
        ("starcoder2", "attention.value_length", 8),
        ("gptneox", "use_parallel_residual", 1),
        ("gptneox", "use_parallel_residual", None),
        ("gptneox", "rope.dimension_count", 0),
        ("stablelm", "rope.dimension_count", 7),
        ("nemotron", "rope.dimension_count", 18),
        ("phi2", "attention.layer_norm_epsilon", INF),
        ("phi3 longrope", "rope.scaling.original_context_length", 0),
        ("phi3 longrope", "rope.scaling.attn_factor", NAN),
        ("gpt2", "context_length", 0),
    ],
)
def test_metadata_that_cannot_be_is_named(row: str, name: str, value: Any, tmp_path: Path) -> None:
    forge = taken_apart(model_file(row))
    key = f"{ROWS[row].architecture}.{name}"
    if value is None:
        drop_key(forge, key)
    else:
        set_key(forge, key, value)
    path = tmp_path / "model.gguf"
    forge.write(path)
    with pytest.raises(HyperparameterError) as refusal, loaded(path):
        pass
    assert refusal.value.key == key


@pytest.mark.parametrize(
    ("row", "name"),
    [
        ("gpt2", "blk.2.attn_qkv.bias"),
        ("gpt2", "position_embd.weight"),
        ("gptneox", "blk.2.ffn_down.bias"),
        ("phi2", "output.bias"),
        ("phi2", "blk.2.attn_output.bias"),
        ("starcoder2", "blk.2.ffn_up.bias"),
        ("nemotron", "blk.2.ffn_norm.bias"),
        ("command-r norms", "blk.63.attn_k_norm.weight"),
        ("stablelm", "output.weight"),
    ],
)
def test_tensors_that_must_be_are_named(row: str, name: str, tmp_path: Path) -> None:
    forge = taken_apart(model_file(row))
    drop_tensors(forge, name)
    path = tmp_path / "model.gguf"
    forge.write(path)
    with pytest.raises(WeightError, match=rf"{name}.*is missing"), loaded(path):
        pass
