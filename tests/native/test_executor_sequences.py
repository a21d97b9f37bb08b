"""Many sequences over one pool: whatever runs beside a sequence, its logits are those of its own tokens."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import batch_of, executor_over, feed, loaded, running
from naive import NaiveModel
from tiny_models import VOCAB, write_gemma3, write_llama

from ggml_engine.executor.batch import Batch
from ggml_engine.models.model import Model

# f16 K and V, GELU's table, flash's f16: see test_engine_against_naive, whose bound is the same
ROUNDED = 1e-1
TOKENS: list[list[int]] = np.random.default_rng(5).integers(3, VOCAB, (8, 48)).tolist()
MODES: dict[str, dict[str, Any]] = {
    "matmul, columns": {"attention": "matmul", "v_layout": "columns"},
    "matmul, rows": {"attention": "matmul", "v_layout": "rows"},
    "flash, rows": {"attention": "flash", "v_layout": "rows"},
    "cells": {"attention": "cells"},
    "deterministic": {"deterministic": True},
}


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("tiny") / "model.gguf"
    write_llama(path) if request.param == "llama" else write_gemma3(path, window=5)
    with loaded(path, threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def expected(model: Model) -> list[np.ndarray]:
    naive = NaiveModel(model.file.path)
    return [naive.logits(tokens) for tokens in TOKENS]


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize("kv", ["f32", "f16"])
@pytest.mark.parametrize(("run", "read_block"), [(1, 1), (4, 8), (64, 256)])
def test_prefills_and_decodes_of_several_sequences_go_in_one_step(
    model: Model, expected: list[np.ndarray], mode: dict[str, Any], kv: str, run: int, read_block: int
) -> None:  # R71, R72
    options = {"k_type": kv, "v_type": kv, "run": run, "read_block": read_block}
    with executor_over(model, capacity=320, **mode, **options) as executor:
        sequences = [executor.open() for _ in range(4)]
        done = [0, 0, 0, 0]
        # tokens of each sequence in a step: prefills apart, decodes together, then both at once
        for step in [
            (9, 0, 0, 0),
            (0, 12, 0, 0),
            (1, 1, 0, 0),
            (1, 1, 17, 0),
            (1, 1, 1, 6),
            (3, 1, 5, 8),
            (1, 1, 1, 1),
        ]:
            parts = [(i, TOKENS[i][done[i] : done[i] + n]) for i, n in enumerate(step) if n]
            logits = executor.forward(batch_of([(sequences[i], tokens) for i, tokens in parts]))
            want = np.concatenate([expected[i][done[i] : done[i] + len(tokens)] for i, tokens in parts])
            assert np.abs(logits - want).max() < ROUNDED
            done = [length + n for length, n in zip(done, step, strict=True)]
        assert [executor.length(sequence) for sequence in sequences] == done


@pytest.mark.usefixtures("every_default")
def test_tokens_of_several_sequences_may_interleave(model: Model, expected: list[np.ndarray]) -> None:
    rng = np.random.default_rng(0)
    with executor_over(model, capacity=256, run=4, read_block=8) as executor:
        sequences = [executor.open() for _ in range(3)]
        done = np.zeros(3, int)
        for _ in range(6):
            order: list[tuple[int, int]] = []
            for i in rng.integers(0, 3, 20).tolist():
                if done[i] < 48:
                    order.append((i, int(done[i])))
                    done[i] += 1
            batch = Batch(
                np.array([TOKENS[i][p] for i, p in order]), np.array([sequences[i] for i, _ in order]),
                np.ones(len(order), np.bool_),
            )  # fmt: skip
            want = np.stack([expected[i][p] for i, p in order])
            assert np.abs(executor.forward(batch) - want).max() < ROUNDED
        assert done.sum() > 100


@pytest.mark.usefixtures("every_default")
def test_logits_come_in_batch_order_for_the_tokens_that_want_them(model: Model, expected: list[np.ndarray]) -> None:
    with executor_over(model, capacity=64, run=4, read_block=8) as executor:
        sequence, length = executor.open(), 0
        for wanted, rows in [
            ("none", []),
            ("last", [3]),
            ("all", [0, 1, 2, 3]),
            ("none", []),
            ("all", [0, 1, 2, 3]),
            ("last", [3]),
        ]:
            tokens = TOKENS[0][length : length + 4]
            logits = executor.forward(Batch.of_sequence(sequence, tokens, logits=wanted))
            assert logits.shape == (len(rows), VOCAB)
            assert logits.dtype == np.float32
            if rows:
                assert np.abs(logits - expected[0][[length + row for row in rows]]).max() < ROUNDED
            length += 4
        marks = np.array([False, True, False, True, True])
        batch = Batch(np.array(TOKENS[0][24:29]), np.full(5, sequence), marks)
        assert np.abs(executor.forward(batch) - expected[0][[25, 27, 28]]).max() < ROUNDED


@pytest.mark.usefixtures("every_default")
def test_a_clone_shares_cells_and_both_go_their_own_way(
    model: Model, expected: list[np.ndarray]
) -> None:  # R2, R4, R63
    with executor_over(model, capacity=128, run=4, read_block=8) as executor:
        source = executor.open()
        feed(executor, source, TOKENS[0][:21])
        used, rows = executor.cache.used_cells, executor.cache.pool.rows
        clone = executor.clone(source, 13)
        assert executor.cache.used_cells == used == 21
        assert executor.cache.pool.rows == rows
        assert (executor.length(source), executor.length(clone)) == (21, 13)
        other = [*TOKENS[0][:13], *TOKENS[1][13:40]]
        want = NaiveModel(model.file.path).logits(other)
        for at in range(19):
            step = batch_of([(clone, [other[13 + at]]), (source, [TOKENS[0][21 + at]])])
            logits = executor.forward(step)
            assert np.abs(logits[0] - want[13 + at]).max() < ROUNDED
            assert np.abs(logits[1] - expected[0][21 + at]).max() < ROUNDED
        executor.close(source)  # R64: the shared cells stay while the clone owns them
        assert executor.cache.used_cells == 32
        assert np.abs(feed(executor, clone, other[32:36], 1) - want[32:36]).max() < ROUNDED


@pytest.mark.usefixtures("every_default")
def test_a_rewind_past_the_window_continues_as_a_cold_run(model: Model) -> None:  # R65, R103
    for chunk in (24, 1):
        with executor_over(model, capacity=128, max_batch_tokens=64) as executor:
            warm, cold = executor.open(), executor.open()
            feed(executor, warm, TOKENS[2][:6])
            feed(executor, warm, TOKENS[3][6:30], 1)
            executor.rewind(warm, 6)
            executor.rewind(warm, 6)
            found = feed(executor, warm, TOKENS[2][6:30], chunk)
            executor.close(warm)  # its cells are free again, so that the cold run gets the same: equal geometry
            feed(executor, cold, TOKENS[2][:6])
            assert found.tobytes() == feed(executor, cold, TOKENS[2][6:30], chunk).tobytes()


@pytest.mark.usefixtures("every_default")
def test_threads_with_their_own_sequences_take_turns(model: Model, expected: list[np.ndarray]) -> None:
    with executor_over(model, capacity=8 * 48, run=4, read_block=64) as executor:
        start = threading.Barrier(8)  # so that all of them are at it together

        def work(i: int) -> float:
            start.wait(60)
            sequence = executor.open()
            worst = 0.0
            for at in range(0, 24, 3):
                logits = feed(executor, sequence, TOKENS[i][at : at + 3])
                worst = max(worst, float(np.abs(logits - expected[i][at : at + 3]).max()))
            executor.close(sequence)
            return worst

        with ThreadPoolExecutor(8) as pool:
            worst = list(pool.map(work, range(8), timeout=120))
        assert max(worst) < ROUNDED
        assert executor.n_forwarded == 8 * 24
        assert executor.cache.used_cells == 0


@pytest.mark.usefixtures("every_default")
def test_a_finalizer_closes_later_and_twice_is_no_harm(model: Model) -> None:
    with executor_over(model, capacity=16, run=4) as executor:
        first, second = executor.open(), executor.open()
        feed(executor, first, TOKENS[0][:8])
        executor.close_later(first)
        assert executor.cache.used_cells == 8
        executor.close(second)
        executor.close_later(second)
        third = executor.open()
        assert executor.cache.used_cells == 0
        assert executor.cache.open_sequences == (third,)


# Full layers read 256, 512, 768 rows. A window of 256 reads the two blocks that it lies across. One of 100 reads a block
# of 256 rows that begins on a run of 64: that is less to read, and moves twice more.
@pytest.mark.parametrize(("window", "most"), [(256, 4), (100, 6)])
@pytest.mark.usefixtures("every_default")
def test_a_long_decode_builds_few_graphs_while_its_window_slides(tmp_path: Path, window: int, most: int) -> None:
    path = write_gemma3(tmp_path / "gemma3.gguf", window=window, n_ff=32, context_length=1024)
    tokens = np.random.default_rng(1).integers(3, VOCAB, 600).tolist()
    with running(path, capacity=1024, max_graphs=32) as executor:
        sequence = executor.open()
        for token in tokens:
            logits = executor.forward(Batch.of_sequence(sequence, [token]))
        stats = executor.stats()
        assert stats["graphs_built"] <= most
        assert stats["graphs_built"] + stats["graphs_reused"] == 600
        assert stats["tokens_forwarded"] == 600
    want = NaiveModel(path).logits(tokens)[-1]
    assert np.abs(logits[0] - want).max() < ROUNDED


@pytest.mark.usefixtures("every_default")
def test_the_graphs_that_are_kept_are_bounded_by_number_and_by_bytes(model: Model) -> None:
    def sizes(max_graphs: int, max_graph_bytes: int) -> list[int]:
        options = {"max_graphs": max_graphs, "max_graph_bytes": max_graph_bytes}
        with executor_over(model, capacity=64, run=1, read_block=1, **options) as executor:
            sequence = executor.open()
            feed(executor, sequence, [5] * 33)
            executor.rewind(sequence, 0)  # storage has grown: from here on no graph is dropped for it
            found = []
            for n in range(1, 9):
                feed(executor, sequence, [5] * n)
                executor.rewind(sequence, 0)
                found.append(len(executor.graphs))
            newest = next(reversed(executor.graphs._ready.values())).graph.working_bytes
            assert executor.graphs.working_bytes <= max_graph_bytes + newest
            return found

    assert sizes(3, 1 << 30) == [2, 3, 3, 3, 3, 3, 3, 3]
    assert sizes(1, 1 << 30) == [1] * 8
    assert sizes(32, 1 << 30)[-1] == 9
    assert max(sizes(32, 1)) == 1
