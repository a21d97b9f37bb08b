"""K and V of a model whose layers differ: fewer layers keep any than there are, with heads and windows of two kinds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architecture_rows import WINDOW
from engines import batch_of, executor_over, feed, loaded, running
from forged_models import set_key, taken_apart
from libllama import Oracle, Type
from moves import move_at_every_step, move_now
from saved_models import SavedModel, write_model
from tiny_models import VOCAB

from ggml_engine.executor.batch import Batch
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.models.config import KvLayer
from ggml_engine.models.model import Model
from ggml_engine.pool.kv_types import KV_TYPES, kv_type

TOKENS: list[int] = np.random.default_rng(4).integers(3, VOCAB, 400).tolist()
SMALL_RUNS: dict[str, Any] = {"run": 4, "read_block": 8}
MODES: dict[str, dict[str, Any]] = {
    "matmul, columns": {"attention": "matmul", "v_layout": "columns"},
    "matmul, rows": {"attention": "matmul", "v_layout": "rows"},
    "flash, rows": {"attention": "flash", "v_layout": "rows"},
    "cells": {"attention": "cells"},
    "matmul folded, columns": {"attention": "matmul_folded", "v_layout": "columns"},
    "deterministic": {"deterministic": True},
}
# Six layers, windowed and full in turns, of which the last two read the K and V of layers 2 and 3. All have a head of
# 128 or two of 64, but for layer 0 with one: rows of 64, 128, 128 and 128.
HEADS = [1, 1, 2, 1, 2, 1]
GEMMA4 = SavedModel(
    "gemma4",
    {
        "block_count": 6, "context_length": 8192, "embedding_length": 64, "feed_forward_length": 96,
        "attention.head_count": 2, "attention.head_count_kv": HEADS, "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.sliding_window": WINDOW, "attention.sliding_window_pattern": [True, False] * 3,
        "attention.shared_kv_layers": 2, "embedding_length_per_layer_input": 16,
        "attention.key_length": 128, "attention.value_length": 128, "rope.dimension_count": 128,
        "attention.key_length_swa": 64, "attention.value_length_swa": 64, "rope.dimension_count_swa": 64,
        "rope.freq_base": 1e6, "rope.freq_base_swa": 10000.0,
    },
    drop=(r"^output\.weight",),
)  # fmt: skip
WIDTHS = [64, 128, 128, 128]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(GEMMA4, tmp_path_factory.mktemp("gemma4") / "model.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with loaded(path, threads=1) as model:
        yield model


def stored(executor: GgmlExecutor, cells: list[int]) -> list[bytes]:
    """For each of these cells its K and V in every layer that keeps any."""
    pool = executor.cache.pool
    return [b"".join(x.tobytes() for il in range(len(pool.layers)) for x in pool.cell(il, cell)) for cell in cells]


def cells_of(executor: GgmlExecutor, sequence: int) -> list[int]:
    return executor.cache.cells_of(sequence).tolist()  # type: ignore[attr-defined]


# ---- what is kept


def test_k_and_v_that_layers_share_are_stored_once(model: Model) -> None:
    assert model.hp.kv_source == (0, 1, 2, 3, 2, 3)
    assert model.hp.kv_owners() == (0, 1, 2, 3)
    assert [model.hp.kv_index(il) for il in range(6)] == [0, 1, 2, 3, 2, 3]
    assert [model.hp.owns_kv(il) for il in range(6)] == [True, True, True, True, False, False]
    assert model.hp.kv_layers() == (
        KvLayer(64, 64, WINDOW, 1), KvLayer(128, 128, 0, 1), KvLayer(128, 128, WINDOW, 2), KvLayer(128, 128, 0, 1),
    )  # fmt: skip
    with executor_over(model, capacity=64, k_type="f32", v_type="f16") as executor:
        assert len(executor.cache.pool.layers) == 4
        assert executor.bytes_per_cell == sum(4 * width + 2 * width for width in WIDTHS)
        assert [window.size for window in executor.cache.windows] == [0, WINDOW]
        feed(executor, executor.open(), TOKENS[:30])
        told = executor.memory()
        assert told["live"] == 30 * executor.bytes_per_cell
        assert told["storage"] == executor.cache.pool.rows * executor.bytes_per_cell
        held = [x for storage in executor.cache.pool._storage for x in (storage.k, storage.v)]
        assert told["storage"] == sum(x.n_elements * x.type.block_bytes for x in held)


def test_a_layer_that_reads_another_ones_k_and_v_is_another_model(model: Model, path: Path, tmp_path: Path) -> None:
    forge = taken_apart(path)
    set_key(forge, "gemma4.attention.shared_kv_layers", 0)
    with loaded(forge.write(tmp_path / "own.gguf"), threads=1) as other:
        assert other.hp.kv_source == ()
        assert len(other.hp.kv_layers()) == 6
        assert other.fingerprint != model.fingerprint
        with executor_over(other, capacity=64) as theirs, executor_over(model, capacity=64) as ours:
            assert theirs.fingerprint != ours.fingerprint
            assert theirs.bytes_per_cell > ours.bytes_per_cell
            logits = [feed(executor, executor.open(), TOKENS[:20]) for executor in (theirs, ours)]
            assert np.abs(logits[0] - logits[1]).max() > 0.1


# ---- steps that want no logits


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_step_without_logits_ends_with_the_last_k_and_v_that_are_kept(model: Model, mode: dict[str, Any]) -> None:
    found, n_nodes = [], []
    for wants in ("all", "none"):
        with executor_over(model, capacity=64, **mode, **SMALL_RUNS) as executor:
            sequence = executor.open()
            for start in (0, 20):
                tokens = np.array(TOKENS[start : start + 20], np.int32)
                wanted = np.full(20, wants == "all")
                logits = executor.forward(Batch(tokens, np.full(20, sequence, np.int32), wanted))
                assert len(logits) == (20 if wants == "all" else 0)
            ready = list(executor.graphs._ready.values())[-1]
            n_nodes.append(ready.graph.n_nodes)
            found.append([*stored(executor, list(range(40))), feed(executor, sequence, TOKENS[40:45]).tobytes()])
    assert found[0] == found[1]
    assert n_nodes[1] < 0.7 * n_nodes[0], "two layers of six keep nothing"


# ---- cells that move, storage that grows


@pytest.mark.parametrize("k_type", KV_TYPES)
@pytest.mark.parametrize(
    ("v_layout", "v_type"), [("rows", "q8_0"), ("rows", "f16"), ("columns", "f16"), ("columns", "f32")]
)
def test_k_and_v_of_every_layer_go_along_and_stay_when_storage_grows(
    model: Model, v_layout: str, k_type: str, v_type: str
) -> None:
    options = {"v_layout": v_layout, "k_type": k_type, "v_type": v_type, "compact": False, **SMALL_RUNS}
    with executor_over(model, capacity=512, **options) as executor:
        sequence, other = executor.open(), executor.open()
        for start in range(0, 20, 4):
            for one in (sequence, other):
                feed(executor, one, TOKENS[start + one : start + one + 4])
        pool = executor.cache.pool
        row_bytes = [kv_type(k_type).row_bytes(n) + kv_type(v_type).row_bytes(n) for n in WIDTHS]
        assert pool.bytes_per_cell == sum(row_bytes)
        before, others = stored(executor, cells_of(executor, sequence)), stored(executor, cells_of(executor, other))
        assert len(set(before + others)) == 40, "cells that are alike show nothing"
        move = move_now(executor, sequence)
        assert move is not None
        assert stored(executor, cells_of(executor, sequence)) == before
        n_grown = pool.n_grown
        feed(executor, executor.open(), TOKENS[:200])
        assert pool.n_grown > n_grown
        assert stored(executor, cells_of(executor, sequence)) == before
        assert stored(executor, cells_of(executor, other)) == others


def test_deterministic_logits_are_the_same_bits_while_cells_move(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    options: dict[str, Any] = {"deterministic": True, "capacity": 2048}
    with executor_over(model, **options) as executor:
        expected = feed(executor, executor.open(), TOKENS[:200], 64).tobytes()
    move_at_every_step(monkeypatch)
    with executor_over(model, **options) as executor:
        sequence, other = executor.open(), executor.open()
        found = []
        for start in range(0, 200, 25):
            found.append(feed(executor, sequence, TOKENS[start : start + 25]))
            feed(executor, other, TOKENS[start + 3 : start + 40])
        assert np.concatenate(found).tobytes() == expected
        assert executor.stats()["moves"] > 0


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_clones_and_rewinds_past_the_window_read_what_a_sequence_alone_reads(
    model: Model, mode: dict[str, Any]
) -> None:
    """Of one step of all sequences; harness and executor differ in how reads are cut, so logits are near, not equal."""
    options = {**mode, "capacity": 256, "k_type": "f32", "v_type": "f32", **SMALL_RUNS}
    texts = [TOKENS[:50], TOKENS[:35] + TOKENS[60:75], TOKENS[:20] + TOKENS[80:110]]
    with executor_over(model, **options) as executor:
        alone = []
        for text in texts:
            sequence = executor.open()
            alone.append(feed(executor, sequence, text)[-10:])
            executor.close(sequence)
    with executor_over(model, **options) as executor:
        first = executor.open()
        feed(executor, first, TOKENS[:40])
        second, third = executor.clone(first, 35), executor.clone(first, 40)
        assert second is not None
        assert third is not None
        executor.rewind(third, 20)
        feed(executor, second, texts[1][35:40])
        feed(executor, third, texts[2][20:40])
        logits = executor.forward(
            batch_of([(s, text[40:]) for s, text in zip((first, second, third), texts, strict=True)])
        )
        expected = np.concatenate(alone)
        assert expected.std() > 0.5
        assert np.abs(logits - expected).max() < 0.05  # GELU rounds to f16


# ---- types


@pytest.mark.parametrize(
    ("k_type", "v_type", "flash"), [("q8_0", "q8_0", True), ("q4_0", "q8_0", True), ("q8_0", "f16", False)]
)
def test_quantised_k_and_v_rotated_by_the_size_of_each_layers_heads_are_libllamas(
    path: Path, k_type: str, v_type: str, flash: bool
) -> None:
    options = MODES["flash, rows" if flash else "matmul, columns"]
    kinds = {"type_k": Type[k_type.upper()], "type_v": Type[v_type.upper()]}
    oracle = Oracle(path, flash=flash, use_extra_bufts=True, **kinds)
    with oracle, running(path, **options, capacity=512, k_type=k_type, v_type=v_type) as executor:
        sizes = {executor.cache.pool.format.k_rotation(layer.head_k) for layer in executor.cache.pool.layers}
        assert sizes == {64, 128}
        sequence = executor.open()
        ours = [feed(executor, sequence, TOKENS[:40]), feed(executor, sequence, TOKENS[40:50], 1)]
        theirs = [oracle.forward(TOKENS[:40]), *(oracle.forward([TOKENS[i]], i) for i in range(40, 50))]
        assert np.concatenate(ours).tobytes() == np.concatenate(theirs).tobytes()
