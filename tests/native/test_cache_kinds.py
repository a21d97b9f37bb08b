"""Kinds of caches behind the same executor: the cell cache, one contiguous sequence, and one that somebody adds."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cell_walk import state_of
from engines import executor_over, feed, loaded
from naive import NaiveModel
from side_by_side import side_by_side
from tiny_models import VOCAB, write_gemma3

from ggml_engine.errors import CacheError, OptionError, PositionError, UnknownSequenceError
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.executor.options import ExecutorOptions
from ggml_engine.models.model import Model
from ggml_engine.pool import registry
from ggml_engine.pool.cell_cache import GgmlCellCache, GgmlSequenceCache
from ggml_engine.pool.registry import CacheConfig, GgmlCache, cache_kinds, register_cache

TOKENS: list[int] = np.random.default_rng(2).integers(3, VOCAB, 60).tolist()
MODES: dict[str, dict[str, Any]] = {
    "matmul, columns": {"attention": "matmul", "v_layout": "columns"},
    "flash, rows": {"attention": "flash", "v_layout": "rows"},
    "cells": {"attention": "cells"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = write_gemma3(tmp_path_factory.mktemp("tiny") / "model.gguf", window=5, n_layer=3, pattern=2)
    with loaded(path, threads=1) as model:
        yield model


@pytest.fixture
def kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is gone after it."""
    monkeypatch.setattr(registry, "_BUILDERS", dict(registry._BUILDERS))


def test_the_known_kinds_are_three_names_for_two_caches(model: Model) -> None:
    assert cache_kinds() == ("batched_cell", "batched", "sequence")
    for kind, cache in {"batched_cell": GgmlCellCache, "batched": GgmlCellCache, "sequence": GgmlSequenceCache}.items():
        with executor_over(model, cache_kind=kind, capacity=64) as executor:
            assert type(executor.cache) is cache


def test_an_executor_clones_at_every_position_where_its_cache_does(model: Model) -> None:
    for kind, expected in {"batched_cell": True, "sequence": False}.items():
        with executor_over(model, cache_kind=kind, capacity=64) as executor:
            assert executor.clones_anywhere is expected
            sequence = executor.open()
            feed(executor, sequence, TOKENS[:9])
            assert (executor.clone(sequence, 4) is not None) is expected


@pytest.mark.parametrize("kv", ["f32", "f16"])
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_one_sequence_gives_the_same_bytes_in_every_kind(model: Model, mode: dict[str, Any], kv: str) -> None:
    found, cells = {}, {}
    for kind in cache_kinds():
        with executor_over(model, cache_kind=kind, capacity=256, **mode, k_type=kv, v_type=kv) as executor:
            sequence = executor.open()
            logits = [feed(executor, sequence, TOKENS[:40], 17), feed(executor, sequence, TOKENS[40:], 1)]
            executor.rewind(sequence, 20)
            logits.append(feed(executor, sequence, TOKENS[20:50], 7))
            found[kind] = np.concatenate(logits)
            pool = executor.cache.pool
            cells[kind] = b"".join(
                part.tobytes() for il in range(3) for cell in range(50) for part in pool.cell(il, cell)
            )
    for kind in ("batched", "sequence"):
        assert found[kind].tobytes() == found["batched_cell"].tobytes()
        assert cells[kind] == cells["batched_cell"]
    want = NaiveModel(model.file.path).logits(TOKENS)
    assert np.abs(found["sequence"][:60] - want).max() < 0.1  # f16 K and V: see test_engine_against_naive


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_the_sequence_cache_grows_from_one_row_and_rewinds_past_its_window(model: Model, mode: dict[str, Any]) -> None:
    with side_by_side(model, cache_kind="sequence", capacity=50, read_block=1, **mode) as sides:
        assert sides.executor.cache.capacity == 50  # no runs
        sequence = sides.open()
        sides.decode([sequence], 3)
        sides.step({sequence: 20})
        sides.rewind(sequence, 6)
        sides.step({sequence: 9})
        sides.close(sequence)
        again = sides.open()
        sides.step({again: 12})
        assert sides.executor.cache.cells_of(again).tolist() == list(range(12))  # type: ignore[attr-defined]


def test_the_sequence_cache_refuses_a_second_and_a_clone_and_changes_nothing(model: Model) -> None:
    with executor_over(model, cache_kind="sequence", capacity=64) as executor:
        sequence = executor.open()
        feed(executor, sequence, TOKENS[:9])
        before = state_of(executor.cache)  # type: ignore[arg-type]
        with pytest.raises(CacheError, match=f"sequence {sequence}|, {sequence} is open.*'batched_cell'"):
            executor.open()
        for upto in (0, 5, 9):
            assert executor.clone(sequence, upto) is None
            with pytest.raises(CacheError, match="cannot clone"):
                executor.cache.clone(sequence, upto)
        with pytest.raises(UnknownSequenceError):
            executor.clone(sequence + 1, 0)
        with pytest.raises(UnknownSequenceError):
            executor.forward(Batch.of_sequence(sequence + 1, [5]))
        with pytest.raises(PositionError):
            executor.rewind(sequence, 10)
        assert state_of(executor.cache) == before  # type: ignore[arg-type]
        feed(executor, sequence, TOKENS[9:12])
        executor.close(sequence)
        assert executor.open() != sequence


@pytest.mark.parametrize("kind", ["ring", "", "Batched"])
def test_an_unknown_kind_is_refused_with_the_known_ones(model: Model, kind: str) -> None:
    with pytest.raises(OptionError, match=f"'{kind}'; there are: batched_cell, batched, sequence"):
        GgmlExecutor(model, ExecutorOptions(cache_kind=kind))


@pytest.mark.usefixtures("kinds")
def test_somebody_can_add_a_kind_that_the_executor_runs(model: Model) -> None:
    class CountingCache(GgmlCellCache):
        """A cell cache that counts clones."""

        n_clones = 0

        def clone(self, source: int, upto: int) -> int:
            self.n_clones += 1
            return super().clone(source, upto)

    def build(config: CacheConfig) -> GgmlCache:
        return CountingCache(
            config.libraries, config.layers, config.backends, config.capacity, kv_format=config.kv_format, run=config.run,
            read_block=config.read_block, reads=config.reads,
        )  # fmt: skip

    register_cache("counting", build)
    assert cache_kinds()[-1] == "counting"
    with side_by_side(model, cache_kind="counting", capacity=64, run=4, read_block=8) as sides:
        source = sides.open()
        sides.step({source: 9})
        clone = sides.clone(source, 5)
        sides.step({source: 1, clone: 3})
        assert isinstance(sides.executor.cache, CountingCache)
        assert sides.executor.cache.n_clones == 1


@pytest.mark.usefixtures("kinds")
@pytest.mark.parametrize("kind", ["batched", "batched_cell", "sequence", "mine"])
def test_a_name_is_registered_once(kind: str) -> None:
    def build(_: CacheConfig) -> GgmlCache:
        raise NotImplementedError

    if kind == "mine":
        register_cache(kind, build)
    before = dict(registry._BUILDERS)
    with pytest.raises(OptionError, match=f"'{kind}' already"):
        register_cache(kind, build)
    assert before == registry._BUILDERS
