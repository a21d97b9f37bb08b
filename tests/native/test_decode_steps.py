"""What a decode step makes and calls: it is counted over hundreds of steps, on all kinds of inputs."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from architecture_rows import model_file
from engines import batch_of, executor_over, feed, loaded
from tiny_models import VOCAB, write_gemma3
from visible import visible_cells

from ggml_engine import Engine
from ggml_engine.errors import GraphError
from ggml_engine.executor import input_memory
from ggml_engine.executor import result_rows as rows_module
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.executor.input_memory import InputMemory
from ggml_engine.models.model import Model
from ggml_engine.pool.cells import CellCache
from ggml_engine.pool.read_plan import find_stretches

BLOCK = 256  # the default read_block
TOKENS: list[int] = np.random.default_rng(8).integers(3, VOCAB, 700).tolist()
MODES: dict[str, dict[str, Any]] = {
    "matmul, columns": {"attention": "matmul", "v_layout": "columns"},
    "flash, rows": {"attention": "flash", "v_layout": "rows"},
    "deterministic": {"deterministic": True},
    "cells": {"attention": "cells"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """One layer with a window and one that sees everything."""
    path = tmp_path_factory.mktemp("tiny") / "model.gguf"
    write_gemma3(path, window=64, pattern=[True, False], n_layer=2, n_embd=32, n_head=2, head_size=16, n_ff=32)
    with loaded(path, threads=1) as model:
        yield model


@pytest.fixture(params=MODES)
def executor(model: Model, request: pytest.FixtureRequest) -> Iterator[GgmlExecutor]:
    with executor_over(model, capacity=4096, **MODES[request.param]) as executor:
        yield executor


def decode(executor: GgmlExecutor, sequences: list[int], first: int, n: int) -> None:
    for token in TOKENS[first : first + n]:
        executor.forward(batch_of([(sequence, [token]) for sequence in sequences]))


def test_two_hundred_steps_of_one_sequence_build_a_graph_for_each_block_that_it_enters(executor: GgmlExecutor) -> None:
    """250 to 450 lie in two blocks of everything, and the window of 64 in three spans of blocks: 1, 1 and 2, 2.

    By position a window begins at a run, so at five of them. The kernel's one graph is built again for a larger pool.
    """
    sequence = executor.open()
    feed(executor, sequence, TOKENS[:250])
    before = executor.graphs.n_built
    decode(executor, [sequence], 250, 200)
    n_built = executor.graphs.n_built - before
    mode = "deterministic" if executor.options.deterministic else executor.options.attention
    assert n_built <= {"deterministic": 6, "cells": 2}.get(mode, 4)
    assert executor.graphs.n_reused >= 200 - n_built


def test_two_hundred_steps_of_four_sequences_build_as_few(executor: GgmlExecutor) -> None:
    """Each takes a run of 64 cells in turn; their spans change when any of them does, and the blocks are filled up."""
    sequences = [executor.open() for _ in range(4)]
    for sequence in sequences:
        feed(executor, sequence, TOKENS[:64])
    before = executor.graphs.n_built
    decode(executor, sequences, 64, 200)
    assert executor.graphs.n_built - before <= 32


def test_steps_of_one_shape_keep_nothing(executor: GgmlExecutor) -> None:
    sequence = executor.open()
    feed(executor, sequence, TOKENS[:330])  # up to 384 all is in one run, and so are the window's borders
    decode(executor, [sequence], 330, 5)
    gc.collect()
    n_built = executor.graphs.n_built
    tracemalloc.start()
    try:
        decode(executor, [sequence], 335, 5)
        gc.collect()  # which also empties the interpreter's lists of free objects
        before = tracemalloc.get_traced_memory()[0]
        decode(executor, [sequence], 340, 40)
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert executor.graphs.n_built == n_built
    assert kept < 4096  # counters, and what the interpreter keeps for itself


def test_a_step_sends_nothing_where_python_reaches_the_memory(
    executor: GgmlExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but the computation gives Python's lock away."""
    sequence = executor.open()
    feed(executor, sequence, TOKENS[:260])
    decode(executor, [sequence], 260, 2)
    sent: list[object] = []
    monkeypatch.setattr(input_memory, "set_data", lambda *a: sent.append(a))
    monkeypatch.setattr(rows_module, "get_data", lambda *a: sent.append(a))
    decode(executor, [sequence], 262, 5)
    assert sent == []


def test_where_python_does_not_reach_the_memory_inputs_are_sent(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for reaches in (True, False):
        if not reaches:
            monkeypatch.setattr(input_memory, "host_view", lambda *_: None)
        with executor_over(model, capacity=1024) as executor:
            sequence, other = executor.open(), executor.open()
            logits = [feed(executor, sequence, TOKENS[:70], 33), feed(executor, other, TOKENS[5:12])]
            logits.append(executor.forward(batch_of([(sequence, TOKENS[70:71]), (other, TOKENS[12:13])])))
            found.append(np.concatenate(logits))
    assert found[0].tobytes() == found[1].tobytes()


def test_token_ids_are_looked_at_once_a_step(executor: GgmlExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    from ggml_engine.executor import admission, inputs

    looked: list[int] = []
    check = inputs.check_tokens

    def noted(tokens: Any, n_vocab: int) -> None:
        looked.append(tokens.size)
        check(tokens, n_vocab)

    for module in (admission, inputs):
        monkeypatch.setattr(module, "check_tokens", noted)
    feed(executor, executor.open(), TOKENS[:5])
    assert looked == [5]


def test_an_input_is_given_as_many_values_as_it_has(model: Model) -> None:
    with executor_over(model, capacity=256) as executor:
        sequence = executor.open()
        feed(executor, sequence, TOKENS[:4])
        (ready,) = executor.graphs._ready.values()
        memory = InputMemory(model.libraries, ready.inputs.tokens)
        with pytest.raises(GraphError, match="given 1 values"):
            memory.set(np.zeros(1, np.int32))
        memory.set(np.arange(4).reshape(2, 2))
        assert memory.array.tolist() == [0, 1, 2, 3]


def test_one_stretch_is_planned_as_any_cells_are(model: Model) -> None:
    """The short way and the long way give the same spans and masks, wherever the stretch lies."""
    from ggml_engine.pool import read_plan
    from ggml_engine.pool.window import Window

    geometry = read_plan.ReadGeometry(64, BLOCK, 2048)
    n_short = 0
    for first in (0, 1, 63, 64, 255, 256, 500, 1791, 2000):
        for n in (1, 2, 40, 48):
            for window in (Window(0), Window(30), Window(64, is_chunked=True)):
                query = first + n - 1
                seen = max(first, window.first_seen(query))
                cells = np.arange(seen, first + n, dtype=np.int32)
                visible = visible_cells(slice(0, 1), 1, query, seen, cells)
                short = read_plan._plan_one_stretch(window, visible, 1, geometry)
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(read_plan, "_plan_one_stretch", lambda *_: None)
                    long = read_plan.plan_read(window, [visible], 1, geometry)
                if short is None:
                    continue
                n_short += 1
                assert (short.spans, short.n_rows, short.n_visible) == (long.spans, long.n_rows, long.n_visible)
                masks = [np.full((1, read.n_rows), 7, np.float16) for read in (short, long)]
                short.fill_mask(masks[0])
                long.fill_mask(masks[1])
                assert masks[0].tobytes() == masks[1].tobytes()
    assert n_short > 90
    broken = np.array([4, 6, 5, 7], np.int32)  # as far apart as a stretch, and none
    assert find_stretches(broken)[0].size > 1
    assert read_plan._plan_one_stretch(Window(0), visible_cells(slice(0, 1), 1, 3, 0, broken), 1, geometry) is None


def test_a_batch_may_say_the_positions_that_its_step_has(model: Model) -> None:
    with executor_over(model, capacity=256) as executor:
        sequence = executor.open()
        feed(executor, sequence, TOKENS[:4])
        batch = Batch.of_sequence(sequence, TOKENS[4:6])
        said = Batch(batch.tokens, batch.sequences, batch.wants_logits, np.array([4, 5]))
        assert executor.forward(said).shape == (1, VOCAB)
        assert executor.length(sequence) == 6


def test_a_sequence_that_decodes_alone_is_planned_anew_where_a_run_begins_only(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    declared: list[int] = []
    declare = CellCache.declare

    def noted(cache: CellCache, sequences: Any) -> Any:
        declared.append(np.size(sequences))
        return declare(cache, sequences)

    with executor_over(model, capacity=1024, attention="cells") as executor:
        sequence = executor.open()
        feed(executor, sequence, TOKENS[:70])
        monkeypatch.setattr(CellCache, "declare", noted)
        decode(executor, [sequence], 70, 130)  # 70 to 200
        # the first token, and those at the runs 128 and 192 with the ones after which the window leaves a run
        assert len(declared) <= 7
        executor.rewind(sequence, 190)
        n = len(declared)
        decode(executor, [sequence], 190, 2)
        assert len(declared) == n + 1


def test_logits_are_the_same_where_every_step_is_planned_anew(model: Model) -> None:
    """Two sequences in turn and together, rewound, cloned and closed."""
    found = []
    for moves_on in (True, False):
        rng = np.random.default_rng(4)
        with executor_over(model, capacity=2048, attention="cells") as executor:
            executor._moves_on = moves_on
            live = [executor.open(), executor.open()]
            logits = [feed(executor, each, TOKENS[: 60 + each]) for each in live]
            for i in range(60):
                kind = rng.integers(0, 12)
                if kind == 0:
                    executor.rewind(live[0], executor.length(live[0]) - int(rng.integers(0, 4)))
                elif kind == 1:
                    clone = executor.clone(live[0], executor.length(live[0]) - 1)
                    assert clone is not None
                    executor.close(live.pop())
                    live.append(clone)
                elif kind == 2:
                    logits.append(executor.forward(batch_of([(each, TOKENS[i : i + 1]) for each in live])))
                for _ in range(rng.integers(1, 5)):
                    logits.append(executor.forward(Batch.of_sequence(live[0], TOKENS[i : i + 1])))
            found.append(np.concatenate(logits).tobytes())
            stats = executor.stats()
            found.append(str((stats["rows_read"], stats["tokens_forwarded"], stats["graphs_reused"])).encode())
    assert found[:2] == found[2:]


def test_a_loaded_engine_has_the_storage_that_its_first_step_takes() -> None:
    with Engine.load(model_file("llama"), threads=1, ctx=600, attention="cells") as engine:
        assert isinstance(engine.executor, GgmlExecutor)
        assert isinstance(engine.executor.cache, CellCache)
        pool = engine.executor.cache.pool
        assert (pool.rows, pool.n_grown) == (BLOCK, 1)
        assert engine.executor.stats()["graphs_built"] == 0
        engine.generate(TOKENS[:5], max_tokens=2).result()
        assert (pool.rows, pool.n_grown) == (BLOCK, 1)
