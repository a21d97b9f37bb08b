"""Metadata and tensors of experts that cannot be: one typed error that names them, or a model that runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from architecture_rows import model_file
from engines import feed, running
from forged_models import drop_key, drop_tensors, find_tensor, set_key, taken_apart
from gguf_forge import INT64, UINT64, GGUFForge
from tiny_models import VOCAB

from ggml_engine.errors import HyperparameterError, ModelError, WeightError
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.models.model import load_model

Change = Callable[[GGUFForge], object]
NAN = float("nan")


class Case(NamedTuple):
    row: str
    name: str
    change: Change
    error: type[ModelError]
    parts: tuple[str, ...]


def architecture(row: str) -> str:
    return row.split(maxsplit=1)[0]


def values(row: str, key: str, *parts: str, of: tuple[Any, ...]) -> list[Case]:
    full = f"{architecture(row)}.{key}"

    def setting(value: Any) -> Change:
        is_wide = type(value) is int and not 0 <= value < 2**32
        kind = {"kind": INT64 if value < 0 else UINT64} if is_wide else {}
        return lambda forge: set_key(forge, full, value, **kind)

    return [Case(row, f"{key} {value!r}", setting(value), HyperparameterError, (full, *parts)) for value in of]


def without(row: str, key: str) -> Case:
    full = f"{architecture(row)}.{key}"
    return Case(row, f"no {key}", lambda forge: drop_key(forge, full), HyperparameterError, (full,))


def shaped(row: str, name: str, *shape: int) -> Case:
    def change(forge: GGUFForge) -> None:
        tensor = find_tensor(forge, name)
        tensor.shape, tensor.data = shape, tensor.data[: 4 * math.prod(shape)]

    return Case(row, f"{name} {shape}", change, WeightError, (name, str(list(shape))))


def dropped(row: str, name: str) -> Case:
    return Case(row, f"no {name}", lambda forge: drop_tensors(forge, name), WeightError, (name, "missing"))


WITH_EXPERTS = ["qwen2moe", "qwen3moe", "olmoe", "gpt-oss", "glm4moe", "deepseek", "bailingmoe", "dots1"]
CASES = [
    *values("qwen3moe", "expert_count", of=(0, -1, 2000, 2**63, 1.0, "4", True)),
    *values("qwen3moe", "expert_used_count",
            of=(0, -1, 5, NAN, [2, 2, 2], [2, 2, 1, 2], [2, 2, 5, 2], ["2"] * 4)),
    *values("qwen3moe", "expert_group_count", of=(-1, 3, 4)),
    Case("qwen3moe", "no group is chosen", lambda forge: set_key(forge, "qwen3moe.expert_group_count", 2),
         HyperparameterError, ("qwen3moe.expert_group_used_count", "0 of 2")),
    *(case for row in WITH_EXPERTS for case in [
        *values(row, "expert_used_count", of=(0, 5)),
        without(row, "expert_count"),
        dropped(row, "blk.1.ffn_gate_inp.weight"),
        shaped(row, "blk.3.ffn_up_exps.weight", 64, 64, 3),
    ]),
    *(case for row in ("gpt-oss", "dots1") for case in [
        *values(row, "expert_feed_forward_length", of=(0, -1, 2**40, [64, 64, 64, 32], [64])),
        without(row, "expert_feed_forward_length"),
    ]),
    *(case for row in ("glm4moe", "bailingmoe") for case in [
        *values(row, "expert_shared_count", of=(0, -1, 2**40)),
        without(row, "expert_shared_count"),
        *values(row, "expert_weights_scale", of=(-1.0, NAN, float("inf"))),
        dropped(row, "blk.1.ffn_up_shexp.weight"),
    ]),
    *(case for row in ("glm4moe", "deepseek") for case in [
        *values(row, "leading_dense_block_count", of=(-1, 2**40, 1.5)),
        Case(row, "no dense layer", lambda forge, row=row: set_key(forge, f"{row}.leading_dense_block_count", 0),
             WeightError, ("blk.0.", "missing")),
        Case(row, "more dense layers", lambda forge, row=row: set_key(forge, f"{row}.leading_dense_block_count", 9),
             WeightError, ("blk.1.ffn_gate.weight", "missing")),
    ]),
    *values("glm4moe", "expert_gating_func", "5", of=(5,)),
    *values("glm4moe", "nextn_predict_layers", of=(-1, 4)),
    *values("glm4moe", "rope.dimension_sections", of=([2, 1, 1, 1], [2, 1], [1.5] * 4, 3)),
    *values("glm4moe", "attention.value_length", of=(8,)),
    dropped("glm4moe", "blk.1.exp_probs_b.bias"),
    without("dots1", "expert_gating_func"),
    *values("dots1", "expert_gating_func", of=(0, 5, -1, "sigmoid")),
    *values("bailingmoe", "expert_weights_norm", of=(1, "yes")),
    *values("bailingmoe", "rope.dimension_count", "16", of=(8,)),
    *values("gpt-oss", "rope.dimension_count", "32", of=(16,)),
    *values("gpt-oss", "attention.sliding_window", of=(0, -1, NAN)),
    without("gpt-oss", "attention.sliding_window"),
    *values("gpt-oss", "attention.sliding_window_pattern", of=([True], ["yes"] * 4, -1)),
    *values("gpt-oss", "rope.freq_base_swa", of=(0.0, -1.0, NAN)),
    dropped("gpt-oss", "blk.0.attn_sinks.weight"),
    dropped("gpt-oss", "blk.0.ffn_gate_inp.bias"),
    shaped("gpt-oss", "blk.0.attn_sinks.weight", 3),
    shaped("gpt-oss", "blk.0.ffn_up_exps.bias", 64, 3),
    dropped("qwen2moe", "blk.0.ffn_gate_inp_shexp.weight"),
    *values("qwen2moe", "expert_shared_feed_forward_length", of=(-1, 2**40)),
    dropped("olmoe", "output.weight"),
    dropped("olmoe", "blk.0.attn_q_norm.weight"),
    shaped("olmoe", "blk.0.attn_k_norm.weight", 16),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=[f"{case.row}: {case.name}" for case in CASES])
def test_what_cannot_be_is_said(tmp_path: Path, case: Case) -> None:
    forge = taken_apart(model_file(case.row))
    case.change(forge)
    with GGUFFile.open(forge.write(tmp_path / "changed.gguf")) as file, pytest.raises(case.error) as caught:
        load_model(file, threads=1)
    for part in case.parts:
        assert part in str(caught.value)


@pytest.mark.parametrize("row", WITH_EXPERTS)
def test_routers_of_nonsense_end_in_logits(tmp_path: Path, row: str) -> None:
    """Which experts a token passes is data: NaN must not lead beside the weights."""
    forge = taken_apart(model_file(row))
    router = find_tensor(forge, "blk.1.ffn_gate_inp.weight")
    router.data = np.full(len(router.data) // 4, np.nan, np.float32).tobytes()
    with running(forge.write(tmp_path / "changed.gguf"), capacity=64) as executor:
        assert feed(executor, executor.open(), list(range(5, 30))).shape == (25, VOCAB)
