"""Latent attention keeps one row per token for all heads, and V is the first part of it: memory, moves, types.

That its logits are libllama's is shown by the rows of `deepseek2` in `test_architectures.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from architecture_rows import model_file
from engines import batch_of, executor_over, feed, loaded, running
from forged_models import drop_key, drop_tensors, find_tensor, set_key, taken_apart
from gguf_forge import INT64, GGUFForge
from libllama import Type
from libllama_sequences import SequencesOracle
from moves import move_at_every_step
from tiny_models import VOCAB

from ggml_engine import loading
from ggml_engine.errors import HyperparameterError, ModelError, WeightError
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.loading import load_executor
from ggml_engine.models.model import load_model
from ggml_engine.reference.inspection import kv_of_position

N_LAYER, RANK, N_ROT = 4, 32, 8
K, V = RANK + N_ROT, RANK  # elements
FORMS: dict[str, dict[str, Any]] = {
    "flash, rows": {"attention": "flash", "v_layout": "rows"},
    "cells": {"attention": "cells"},
    "matmul folded, columns": {"attention": "matmul_folded", "v_layout": "columns"},
    "flash folded, rows": {"attention": "flash_folded", "v_layout": "rows"},
    "matmul, rows": {"attention": "matmul", "v_layout": "rows"},
    "matmul, columns": {"attention": "matmul", "v_layout": "columns"},
}


@pytest.mark.parametrize(
    ("options", "per_layer"),
    [
        ({**FORMS["flash, rows"], "k_type": "f16", "v_type": "f16"}, 2 * K),
        ({**FORMS["matmul, rows"], "k_type": "f32", "v_type": "f32"}, 4 * K),
        ({**FORMS["matmul, columns"], "k_type": "f16", "v_type": "f16"}, 2 * K + 2 * V),
        ({**FORMS["flash, rows"], "k_type": "f16", "v_type": "q8_0"}, 2 * K + 34 * V // 32),
    ],
    ids=["rows", "f32 rows", "columns", "other type"],
)
def test_v_takes_memory_only_where_it_cannot_be_read_out_of_k(options: dict[str, Any], per_layer: int) -> None:
    with running(model_file("deepseek2"), capacity=64, **options) as executor:
        assert executor.bytes_per_cell == N_LAYER * per_layer
        feed(executor, executor.open(), range(5, 25))
        assert executor.cache.pool.n_bytes == executor.cache.pool.rows * N_LAYER * per_layer
        k, v = executor.cache.pool.cell(1, 19)
        assert k.size == K
        if per_layer in (2 * K, 4 * K, 2 * K + 2 * V):
            assert np.array_equal(v, k[:V])
        else:
            assert np.abs(v - k[:V]).max() < np.abs(k).max() / 64


def test_the_default_number_of_cells_counts_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "cpu_device", lambda _: SimpleNamespace(memory_free=200_000))  # half of it is taken
    found = {}
    for attention in ("matmul", "flash"):
        with GGUFFile.open(model_file("deepseek2")) as file:
            executor = load_executor(file, attention=attention, threads=1).executor  # type: ignore[arg-type]
            found[attention] = executor.capacity
            executor.close_all()
    in_columns, in_rows = 100_000 // (N_LAYER * 2 * (K + V)), 100_000 // (N_LAYER * 2 * K)
    assert found == {"matmul": in_columns + -in_columns % 64, "flash": in_rows + -in_rows % 64}  # whole runs


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_clones_rewinds_growth_and_moves_change_no_answer(
    form: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(1)
    tokens = rng.integers(3, VOCAB, 40).tolist()
    others = rng.integers(3, VOCAB, 40).tolist()
    options = {**form, "k_type": "f32", "v_type": "f32", "run": 1, "read_block": 1, "capacity": 256}
    with loaded(model_file("deepseek2"), threads=1) as model:
        with executor_over(model, **options) as executor:
            expected = feed(executor, executor.open(), tokens)
        move_at_every_step(monkeypatch)
        with executor_over(model, **options) as executor:
            main = executor.open()
            found = [feed(executor, main, tokens[:10])]
            beside = executor.clone(main, 5)
            for i in range(10, 30):  # cells of the two alternate, until they are moved
                both = executor.forward(batch_of([(main, [tokens[i]]), (beside, [others[i]])]))
                found.append(both[:1])
            executor.rewind(main, 20)
            executor.close(beside)
            executor.open()
            found = [np.concatenate(found)[:20], feed(executor, main, tokens[20:])]
            assert executor.cache.pool.n_grown > 1
    error = np.square(np.concatenate(found) - expected).mean() / np.square(expected).mean()
    # from 64 rows of a product on, flash attention is another kernel, whose sums are f32 and not f16
    assert error < (1e-5 if form["attention"] == "flash_folded" else 1e-6)


def test_deterministic_logits_do_not_depend_on_steps() -> None:
    tokens = np.random.default_rng(4).integers(3, VOCAB, 60).tolist()
    with loaded(model_file("deepseek2"), threads=1) as model:
        found = []
        for n in (60, 7, 1):
            with executor_over(model, deterministic=True, capacity=512) as executor:
                found.append(feed(executor, executor.open(), tokens, n).tobytes())
    assert found[1:] == found[:-1]


def test_quantised_k_and_v_are_libllamas() -> None:
    path = model_file("deepseek2 wide latents")
    tokens = np.random.default_rng(2).integers(3, VOCAB, 40).tolist()
    kinds = {"type_k": Type.Q8_0, "type_v": Type.Q8_0}
    options = {"attention": "flash", "k_type": "q8_0", "v_type": "q8_0", "run": 1, "capacity": 512}
    with (
        SequencesOracle(path, n_ctx=512, flash=True, use_extra_bufts=True, **kinds) as oracle,
        running(path, **options) as executor,
    ):
        assert executor.bytes_per_cell == 2 * 128 // 32 * 34
        sequence = executor.open()
        for piece in (tokens[:30], *([token] for token in tokens[30:])):
            assert feed(executor, sequence, piece).tobytes() == oracle.append([(0, piece)]).tobytes()


@pytest.mark.parametrize(("k_type", "v_type"), [("q8_0", "q8_0"), ("q8_0", "f16"), ("f16", "q8_0")])
def test_what_quantised_cells_hold_is_what_was_computed(k_type: str, v_type: str) -> None:
    held = []
    for types in ({"k_type": "f32", "v_type": "f32"}, {"k_type": k_type, "v_type": v_type}):
        with running(model_file("deepseek2 wide latents"), attention="flash", capacity=64, **types) as executor:
            sequence = executor.open()
            logits = feed(executor, sequence, range(5, 25))
            held.append((logits, kv_of_position(executor, sequence, 0, 7)))
    (exact, at_best), (rounded, found) = held
    assert np.abs(found.k - at_best.k).max() < np.abs(at_best.k).max() / 64
    assert np.abs(found.v - at_best.v).max() < np.abs(at_best.v).max() / 64
    errors = np.square(rounded - exact).mean(axis=1) / np.square(exact).mean()
    assert np.median(errors) < 1e-3  # where rounding leads to another expert, a token's is larger


Change = Callable[[GGUFForge], object]


def value(name: str, number: object, **kind: Any) -> Change:
    return lambda forge: set_key(forge, f"deepseek2.{name}", number, **kind)


def missing(name: str) -> Change:
    return lambda forge: drop_key(forge, f"deepseek2.{name}")


def shaped(name: str, *shape: int) -> Change:
    def change(forge: GGUFForge) -> None:
        tensor = find_tensor(forge, name)
        tensor.shape, tensor.data = shape, tensor.data[: 4 * int(np.prod(shape))]

    return change


NAN = float("nan")
YARN_MULTIPLIER, YARN_FACTOR = "rope.scaling.yarn_log_multiplier", "rope.scaling.attn_factor"
REFUSED: list[tuple[str, Change, type[ModelError], str]] = [
    ("no rank", missing("attention.kv_lora_rank"), HyperparameterError, "attention.kv_lora_rank"),
    ("rank 0", value("attention.kv_lora_rank", 0), HyperparameterError, "attention.kv_lora_rank"),
    ("rank -1", value("attention.kv_lora_rank", -1, kind=INT64), HyperparameterError, "attention.kv_lora_rank"),
    ("another rank", value("attention.kv_lora_rank", 24), HyperparameterError, "attention.key_length"),
    ("no rank of queries", missing("attention.q_lora_rank"), HyperparameterError, "attention.q_lora_rank"),
    ("queries as in lite", value("attention.q_lora_rank", 0), WeightError, "blk.0.attn_q.weight"),
    ("another rank of queries", value("attention.q_lora_rank", 16), WeightError, "blk.0.attn_q_a.weight"),
    ("heads that are kept", value("attention.head_count_kv", 4), HyperparameterError, "attention.head_count_kv"),
    ("a wider row", value("attention.key_length", 48), HyperparameterError, "attention.key_length"),
    ("nothing but rotation", value("attention.key_length_mla", 8), HyperparameterError, "rope.dimension_count"),
    ("huge heads", value("attention.key_length_mla", 2**31), HyperparameterError, "attention.key_length_mla"),
    ("wider heads", value("attention.value_length_mla", 32), WeightError, "blk.0.attn_v_b.weight"),
    ("no absorption", value("attention.key_length_mla", 0), HyperparameterError, "attention.head_count_kv"),
    ("multiplier NaN", value(YARN_MULTIPLIER, NAN), HyperparameterError, YARN_MULTIPLIER),
    ("multiplier -1", value(YARN_MULTIPLIER, -1.0), HyperparameterError, YARN_MULTIPLIER),
    ("multiplier 1e30", value(YARN_MULTIPLIER, 1e30), HyperparameterError, YARN_MULTIPLIER),
    ("infinite scores", value(YARN_FACTOR, 3e38), HyperparameterError, YARN_FACTOR),
    ("a temperature without length", value("attention.temperature_scale", 0.1), HyperparameterError, "temperature_length"),
    ("temperature NaN", value("attention.temperature_scale", NAN), HyperparameterError, "attention.temperature_scale"),
    ("no shared experts", value("expert_shared_count", 0), HyperparameterError, "expert_shared_count"),
    ("gating 9", value("expert_gating_func", 9), HyperparameterError, "expert_gating_func"),
    ("no experts", value("expert_count", 0), HyperparameterError, "expert_count"),
    ("no k_b", lambda forge: drop_tensors(forge, "blk.2.attn_k_b.weight"), WeightError, "blk.2.attn_k_b.weight"),
    ("k_b of three heads", shaped("blk.1.attn_k_b.weight", 16, 32, 3), WeightError, "[16, 32, 3]"),
    ("flat v_b", shaped("blk.1.attn_v_b.weight", 32, 64), WeightError, "[32, 64]"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "part"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_cannot_be_is_said(tmp_path: Path, change: Change, error: type[ModelError], part: str) -> None:
    forge = taken_apart(model_file("deepseek2"))
    change(forge)
    with GGUFFile.open(forge.write(tmp_path / "changed.gguf")) as file, pytest.raises(error) as caught:
        load_model(file, threads=1)
    assert part in str(caught.value)
