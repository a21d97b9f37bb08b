"""The engine's logits are those of the models' definition, in numpy float64, whatever way they are computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import Logits, feed, loaded, running
from libllama import Oracle, Type
from naive import NaiveModel
from tiny_models import F16, Q8_0, VOCAB, write_gemma3, write_llama

from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.executor.options import ExecutorOptions
from ggml_engine.ggml import backends
from ggml_engine.pool import cell_plan, read_plan
from ggml_engine.pool.window import Window

TOKENS: list[int] = np.random.default_rng(7).integers(3, VOCAB, 40).tolist()

# Largest differences allowed, for logits that spread by 2 to 3. Each is what was measured times five or so.
EXACT = 1e-4  # all f32: only the order of float32 sums differs (1e-5 measured)
GELU_TABLE = 3e-2  # ggml looks GELU up in a table over f16: a last bit of f32 may step to the next entry (4e-3)
ROUNDED_KV = 1e-1  # f16 K and V, or flash attention, which rounds queries and weights to f16 too (2e-2)

MODES = {
    "matmul, columns": {"attention": "matmul", "v_layout": "columns"},
    "matmul, rows": {"attention": "matmul", "v_layout": "rows"},
    "flash, rows": {"attention": "flash", "v_layout": "rows"},
    "cells": {"attention": "cells"},
    "matmul folded, columns": {"attention": "matmul_folded", "v_layout": "columns"},
    "matmul folded, rows": {"attention": "matmul_folded", "v_layout": "rows"},
    "flash folded, rows": {"attention": "flash_folded", "v_layout": "rows"},
    "deterministic": {"deterministic": True},
}
LLAMAS: dict[str, dict[str, Any]] = {
    "one query head a group": {"n_head_kv": 4},
    "groups of two": {"n_head_kv": 2},
    "groups of four": {"n_head_kv": 1},
    "tied": {"tied": True},
    "biases": {"biases": True},
    "frequency factors": {"rope_factors": [1, 1, 2, 2, 4, 4, 8, 8]},
    "linear scaling": {"metadata": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}},
    "heads by layer": {"n_head_kv": [1, 4, 2], "n_layer": 3},
    "wider values": {"value_size": 24},
    "narrower values": {"value_size": 8, "n_head_kv": [4, 1]},
}
GEMMAS: dict[str, dict[str, Any]] = {
    "window 1": {"window": 1},
    "window 3": {"window": 3},
    "window 5": {"window": 5},
    "no window": {"window": 0},
    "a pattern of flags": {"window": 3, "pattern": [True, False, False], "n_layer": 3},
    "other bases and scaled full layers": {
        "window": 3,
        "rope_base_swa": 500.0,
        "rope_scale": 8.0,
        "pattern": 2,
        "n_layer": 4,
    },
    "own output": {"window": 3, "tied": False},
    "capped logits": {"window": 3, "softcap": 5.0},
    "two heads, wider values": {"window": 3, "n_head_kv": 2, "value_size": 48},
}


def bound(path: Path, executor: GgmlExecutor) -> float:
    rounded = executor.options.k_type == "f16" or executor.form.is_flash
    exact = EXACT if "llama" in path.name else GELU_TABLE
    return ROUNDED_KV if rounded else exact


def assert_close(found: Logits, expected: np.ndarray, limit: float) -> None:
    assert expected.std() > 1, "flat logits would hide mistakes"
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() < limit


def prefill_and_decode(executor: GgmlExecutor, tokens: Sequence[int], n_prefill: int, chunk: int) -> Logits:
    sequence = executor.open()
    found = feed(executor, sequence, tokens[:n_prefill], chunk)
    return (
        np.concatenate([found, feed(executor, sequence, tokens[n_prefill:], 1)]) if n_prefill < len(tokens) else found
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tiny")


def written(folder: Path, kind: str, name: str) -> Path:
    path = folder / f"{kind} {name}.gguf"
    if not path.exists():
        options = (LLAMAS if kind == "llama" else GEMMAS).get(name) or BY_LIBLLAMA[f"{kind} {name}"]
        (write_llama if kind == "llama" else write_gemma3)(path, **options)
    return path


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
# compared with libllama only
BY_LIBLLAMA: dict[str, dict[str, Any]] = {
    "llama YaRN": {"metadata": {f"llama.{key}": value for key, value in YARN.items()}},
    "llama YaRN stretched less than once": {
        "metadata": {f"llama.{key}": value for key, value in {**YARN, "rope.scaling.factor": 0.5}.items()}
    },
    "llama own attention factor": {"metadata": {"llama.rope.scaling.attn_factor": 1.25}},
    "llama a scale that llama has not": {"metadata": {"llama.attention.scale": 0.5}},
    "gemma3 YaRN": {"window": 3, "metadata": {f"gemma3.{key}": value for key, value in YARN.items()}},
}
CASES = [("llama", name) for name in LLAMAS] + [("gemma3", name) for name in GEMMAS]


@pytest.mark.parametrize("kv", ["f32", "f16"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize(("kind", "name"), CASES, ids=[" ".join(case) for case in CASES])
def test_logits_are_those_of_the_definition(folder: Path, kind: str, name: str, mode: Any, kv: str) -> None:  # R71, R72
    """30 tokens in one step, wider than every window; then 10 one by one, over storage that grows from one row."""
    path = written(folder, kind, name)
    expected = NaiveModel(path).logits(TOKENS)
    options = {**mode, "k_type": kv, "v_type": kv, "capacity": 64, "run": 1, "read_block": 1}
    with running(path, **options) as executor:
        assert executor.cache.pool.rows == 1
        found = prefill_and_decode(executor, TOKENS, 30, chunk=30)
        assert_close(found, expected, bound(path, executor))


@pytest.mark.parametrize("attention", ["matmul", "cells"])
@pytest.mark.parametrize("max_graphs", [1, 32])
@pytest.mark.parametrize("geometry", [(1, 1), (4, 8), (64, 256)])
@pytest.mark.parametrize("name", ["window 1", "window 3", "window 5", "no window"])
def test_graphs_used_again_give_the_same_answer(
    folder: Path, name: str, geometry: tuple[int, int], max_graphs: int, attention: str
) -> None:  # R72
    path = written(folder, "gemma3", name)
    expected = NaiveModel(path).logits(TOKENS)
    run, read_block = geometry
    options = {"capacity": 256, "run": run, "read_block": read_block, "max_graphs": max_graphs, "k_type": "f32"}
    with running(path, v_type="f32", attention=attention, **options) as executor:
        for _ in range(2):  # the second time over storage that has grown
            assert_close(prefill_and_decode(executor, TOKENS, 12, chunk=5), expected, GELU_TABLE)
        stats = executor.stats()
        n_steps = 2 * (3 + 28)
        assert stats["graphs_built"] + stats["graphs_reused"] == n_steps
        assert len(executor.graphs) <= max_graphs
        if attention == "cells" and max_graphs > 1:  # the same three, again for every size of the pool
            assert 3 <= stats["graphs_built"] <= 3 * executor.cache.pool.n_grown
        if attention == "cells":
            return
        # blocks of 256: a shape for 5 tokens, one for 2 and one for 1; single rows: another shape for every step
        least = {(64, 256): 3, (4, 8): 8, (1, 1): 31}[geometry]
        assert stats["graphs_built"] >= least
        if max_graphs > 1 and geometry == (64, 256):
            assert stats["graphs_built"] == 3


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("kv", ["f32", "f16"])
def test_chunks_of_a_prefill_come_to_what_one_step_computes(folder: Path, mode: Any, kv: str) -> None:
    path = written(folder, "gemma3", "window 5")
    with running(path, **mode, k_type=kv, v_type=kv, capacity=256) as executor:
        found = [prefill_and_decode(executor, TOKENS, 40, chunk) for chunk in (40, 17, 7, 1)]
        for other in found[1:]:
            # the same K and V, but products of other shapes: sums in another order, then GELU's table and f16 rows
            assert_close(other, found[0].astype(np.float64), bound(path, executor))


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("kv", ["f32", "f16"])
def test_storage_doubles_from_one_row_and_keeps_every_byte(folder: Path, mode: Any, kv: str) -> None:  # R70
    path = written(folder, "llama", "narrower values")
    with running(path, **mode, k_type=kv, v_type=kv, capacity=48, run=1, read_block=1) as executor:
        sequence, pool = executor.open(), executor.cache.pool
        rows, before = [pool.rows], []
        for length, token in enumerate(TOKENS):
            feed(executor, sequence, [token])
            after = [pool.cell(layer, cell) for layer in range(2) for cell in range(length + 1)]
            if rows[-1] != pool.rows:
                rows.append(pool.rows)
                kept = [pool.cell(layer, cell) for layer in range(2) for cell in range(length)]
                for old, new in zip(before, kept, strict=True):
                    assert old[0].tobytes() == new[0].tobytes()
                    assert old[1].tobytes() == new[1].tobytes()
            assert all(np.any(k) and np.any(v) for k, v in after)
            assert pool.n_bytes == pool.rows * pool.bytes_per_cell
            before = after
        assert rows == [1, 2, 4, 8, 16, 32, 48]
        assert pool.n_grown == 6


@pytest.mark.parametrize("types", [F16, Q8_0])
def test_weights_of_other_types_stay_close(tmp_path: Path, types: Any) -> None:
    path = write_llama(tmp_path / "llama.gguf", types=types)
    with running(path, capacity=64, k_type="f32", v_type="f32") as executor:
        # the kernels round activations to the weights' partner type, f16 or q8_0 (0.1 measured)
        assert_close(prefill_and_decode(executor, TOKENS, 30, 30), NaiveModel(path).logits(TOKENS), 0.5)


@pytest.mark.parametrize("mode", ["matmul, columns", "flash, rows"])
@pytest.mark.parametrize("kv", ["f32", "f16"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [("llama", "groups of two"), ("llama", "biases"), ("llama", "frequency factors"), ("llama", "groups of four"),
     ("gemma3", "window 3"), ("gemma3", "capped logits"),
     *(tuple(case.split(" ", 1)) for case in BY_LIBLLAMA)],
)  # fmt: skip
def test_tiny_models_give_the_bytes_of_libllama(folder: Path, kind: str, name: str, mode: str, kv: str) -> None:
    path = written(folder, kind, name)
    kv_type = Type.F32 if kv == "f32" else Type.F16
    oracle = Oracle(path, flash=mode.startswith("flash"), type_k=kv_type, type_v=kv_type, use_extra_bufts=True)
    with oracle, running(path, **MODES[mode], capacity=512, k_type=kv, v_type=kv) as executor:
        sequence = executor.open()
        ours = [feed(executor, sequence, TOKENS[:30]), feed(executor, sequence, TOKENS[30:], 1)]
        theirs = [oracle.forward(TOKENS[:30]), *(oracle.forward([TOKENS[i]], i) for i in range(30, 40))]
        assert np.concatenate(ours).tobytes() == np.concatenate(theirs).tobytes()


def see_everything(out: np.ndarray, *_: object) -> None:
    out.fill(0)


def see_the_whole_past(out: np.ndarray, groups: Any, _: Window) -> None:
    masks_fill(out, groups, Window())


masks_fill = read_plan.fill_mask


MASKED = {name: mode for name, mode in MODES.items() if name != "cells"}


@pytest.mark.parametrize("mode", MASKED.values(), ids=MASKED)
@pytest.mark.parametrize(
    ("kind", "name", "mutant"),
    [
        ("llama", "groups of two", see_everything),
        ("gemma3", "no window", see_everything),
        ("gemma3", "window 1", see_everything),
        ("gemma3", "window 5", see_everything),
        ("gemma3", "window 1", see_the_whole_past),
        ("gemma3", "window 5", see_the_whole_past),
    ],
)
def test_without_the_mask_the_comparison_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str, mutant: Any, mode: Any
) -> None:  # R71
    path = written(folder, kind, name)
    expected = NaiveModel(path).logits(TOKENS)
    monkeypatch.setattr(read_plan, "fill_mask", mutant)
    with running(path, **mode, capacity=64, run=1, read_block=1) as executor:
        found = prefill_and_decode(executor, TOKENS, 30, 30)
        assert np.abs(found - expected).max() > 5 * bound(path, executor)


def see_the_rows_of_the_tile(read: Any) -> np.ndarray:
    return np.repeat(np.array([len(TOKENS), 0], np.int32), read.n_tokens)


def see_the_whole_past_of_the_tile(read: Any) -> np.ndarray:
    return plan_seen(replace(read, window=Window()))


plan_seen = cell_plan._seen


@pytest.mark.parametrize(
    ("kind", "name", "mutant"),
    [
        ("llama", "groups of two", see_the_rows_of_the_tile),
        ("gemma3", "no window", see_the_rows_of_the_tile),
        ("gemma3", "window 1", see_the_rows_of_the_tile),
        ("gemma3", "window 5", see_the_rows_of_the_tile),
        ("gemma3", "window 1", see_the_whole_past_of_the_tile),
        ("gemma3", "window 5", see_the_whole_past_of_the_tile),
    ],
)
def test_without_a_plans_edges_the_comparison_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str, mutant: Any
) -> None:  # R71
    path = written(folder, kind, name)
    expected = NaiveModel(path).logits(TOKENS)
    monkeypatch.setattr(cell_plan, "_seen", mutant)
    with running(path, attention="cells", capacity=64, run=1, read_block=1) as executor:
        found = prefill_and_decode(executor, TOKENS, 30, 30)
        assert np.abs(found - expected).max() > 5 * bound(path, executor)


def test_rows_that_nobody_wrote_are_zero_and_padding_changes_nothing(folder: Path) -> None:
    """A padded read must be finite and masked: the answer over blocks of 256 rows is that over single rows."""
    path = written(folder, "llama", "tied")
    expected = NaiveModel(path).logits(TOKENS)
    with loaded(path, threads=1) as model:
        executor = GgmlExecutor(model, ExecutorOptions(attention="matmul"))
        sequence = executor.open()
        assert_close(feed(executor, sequence, TOKENS), expected, ROUNDED_KV)
        pool = executor.cache.pool
        assert pool.rows == 256
        k = np.empty((256, 32), np.float16)
        backends.get_data(model.libraries, pool._storage[1].k, k)
        assert np.all(k[:40].any(axis=1))
        assert not k[40:].any()
        executor.close_all()
