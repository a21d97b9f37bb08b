"""What a step that cannot be does: a typed refusal with nothing changed, or cells that wait to be rewound or closed."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from cell_walk import state_of
from engines import batch_of, executor_over, feed, loaded
from naive import NaiveModel
from tiny_models import VOCAB, write_gemma3

from ggml_engine.errors import (
    AllocationError,
    ClosedError,
    ComputeError,
    GraphError,
    InputError,
    PoolFullError,
    PositionError,
    StepError,
    UnknownSequenceError,
)
from ggml_engine.executor import step_graphs as graphs_module
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.ggml.backends import Graph
from ggml_engine.models.model import Model
from ggml_engine.pool import kv_pool
from ggml_engine.pool.step import Placement, Step

TOKENS: list[int] = np.random.default_rng(11).integers(3, VOCAB, 60).tolist()
ROUNDED = 1e-1  # f16 K and V, GELU's table: see test_engine_against_naive


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = write_gemma3(tmp_path_factory.mktemp("tiny") / "gemma3.gguf", window=5)
    with loaded(path, threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def expected(model: Model) -> Any:
    return NaiveModel(model.file.path).logits(TOKENS)


@pytest.fixture
def executor(model: Model, every_default: str) -> Iterator[GgmlExecutor]:
    with executor_over(model, capacity=64, run=4, read_block=8, max_batch_tokens=16) as executor:
        yield executor


def snapshot(executor: GgmlExecutor) -> tuple[object, ...]:
    """All that a refusal must not change."""
    pool = executor.cache.pool
    rows = tuple(pool.cell(layer, cell)[0].tobytes() for layer in range(7) for cell in range(pool.rows))
    return (
        state_of(executor.cache),
        pool.rows,
        rows,
        executor.n_forwarded,
        executor.graphs.n_built,
        len(executor.graphs),
    )


def refused(executor: GgmlExecutor, batch: Batch, error: type[Exception], match: str) -> None:
    before = snapshot(executor)
    with pytest.raises(error, match=match):
        executor.forward(batch)
    assert snapshot(executor) == before


def at(sequence: int, tokens: list[int], positions: Any) -> Batch:
    whole = Batch.of_sequence(sequence, tokens)
    return Batch(whole.tokens, whole.sequences, whole.wants_logits, positions)


# ---- R67, R68: what is not declared, what does not continue


def test_only_a_declared_step_can_be_placed_and_only_a_placed_one_committed() -> None:  # R67
    """By types: a forward takes a batch and declares it itself; `place` is a Step's, `commit` a Placement's."""
    assert list(inspect.signature(GgmlExecutor.forward).parameters) == ["self", "batch"]
    assert hasattr(Step, "place")
    assert not hasattr(Step, "commit")
    assert hasattr(Placement, "commit")
    assert not hasattr(Placement, "place")


def test_a_sequence_that_is_not_open_is_refused(executor: GgmlExecutor) -> None:  # R67
    sequence = executor.open()
    feed(executor, sequence, TOKENS[:5])
    for unknown in (sequence + 1, -1, 2**40, 2**62):
        refused(executor, Batch.of_sequence(unknown, [5]), UnknownSequenceError, str(unknown))
    refused(executor, batch_of([(sequence, [5]), (sequence + 9, [5])]), UnknownSequenceError, str(sequence + 9))
    closed = executor.open()
    executor.close(closed)
    refused(executor, Batch.of_sequence(closed, [5]), UnknownSequenceError, str(closed))


@pytest.mark.parametrize(
    "positions",
    [[4, 5], [6, 7], [0, 1], [-1, 0], [5, 5], [5, 7], [6, 5], [2**31, 5], [5], [5, 6, 7], [5.0, 6.0], [[5, 6]]],
)
def test_positions_that_do_not_continue_their_sequence_are_refused(
    executor: GgmlExecutor, positions: Any, expected: Any
) -> None:  # R68
    sequence = executor.open()
    feed(executor, sequence, TOKENS[:5])
    refused(executor, at(sequence, TOKENS[5:7], np.asarray(positions)), PositionError, "position")
    logits = executor.forward(at(sequence, TOKENS[5:7], np.array([5, 6], np.int32)))
    assert np.abs(logits[0] - expected[6]).max() < ROUNDED


@pytest.mark.parametrize("token", [-1, VOCAB, 2**31 - 1, -(2**31)])
def test_token_ids_without_an_embedding_are_refused(executor: GgmlExecutor, token: int) -> None:
    sequence = executor.open()
    feed(executor, sequence, TOKENS[:5])
    refused(executor, Batch.of_sequence(sequence, [3, token, 4]), InputError, f"0 to {VOCAB - 1}, got {token}")


@pytest.mark.parametrize(
    "tokens", [[], [2**31], [-(2**31) - 1], [2**63], [2**70], [1.0], [True], ["a"], [[1, 2]], [[1], [2, 3]], 5, None]
)
def test_what_is_no_list_of_token_ids_is_refused(tokens: Any) -> None:
    with pytest.raises(InputError):
        Batch.of_sequence(0, tokens)


@pytest.mark.parametrize(
    ("tokens", "sequences", "marks"),
    [
        ([1, 2], [0], [True, True]),
        ([1, 2], [0, 0], [True]),
        ([1, 2], [0, 0], [1, 0]),
        ([1, 2], [0.0, 0.0], [True, False]),
        ([1, 2], [0, 0], [[True, False]]),
    ],
)
def test_arrays_that_do_not_go_together_make_no_batch(tokens: Any, sequences: Any, marks: Any) -> None:
    with pytest.raises(InputError):
        Batch(np.asarray(tokens), np.asarray(sequences), np.asarray(marks))


def test_arrays_of_other_integer_types_and_strides_are_the_same_batch(executor: GgmlExecutor, expected: Any) -> None:
    wide = np.repeat(np.array(TOKENS[:6], np.int64), 2)[::2]
    sequence = executor.open()
    batch = Batch(wide, np.full(6, sequence, np.uint8), np.ones(6, np.bool_))  # type: ignore[arg-type]
    assert np.abs(executor.forward(batch) - expected[:6]).max() < ROUNDED
    with pytest.raises(InputError, match="'some'"):
        Batch.of_sequence(sequence, [1], logits="some")


def test_a_batch_that_is_too_large_is_refused(executor: GgmlExecutor) -> None:
    sequence = executor.open()
    refused(executor, Batch.of_sequence(sequence, TOKENS[:17]), InputError, r"1 to 16 tokens .*has 17")


def test_a_full_pool_refuses_with_its_figures(executor: GgmlExecutor) -> None:  # R73
    first, second = executor.open(), executor.open()
    feed(executor, first, TOKENS[:56], chunk=16)
    refused(executor, Batch.of_sequence(second, TOKENS[:12]), PoolFullError, "needs 12 more cells, 8 of 64")
    with pytest.raises(PoolFullError) as caught:
        executor.forward(Batch.of_sequence(second, TOKENS[:12]))
    assert (caught.value.needed, caught.value.free, caught.value.capacity) == (12, 8, 64)
    feed(executor, second, TOKENS[:8])
    refused(executor, Batch.of_sequence(first, [5]), PoolFullError, "needs 1 more cells, 0 of 64")
    executor.close(second)
    feed(executor, first, TOKENS[56:])


# ---- R69: what fails after placement


def fail_compute(monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    def compute(_: Graph) -> None:
        raise ComputeError("a fault point")

    monkeypatch.setattr(Graph, "compute", compute)
    return ComputeError


def fail_growth(monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    allocate, calls = kv_pool.allocate_tensors, []

    def allocate_two_layers(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) > 2:
            raise AllocationError("a fault point")
        return allocate(*arguments)

    monkeypatch.setattr(kv_pool, "allocate_tensors", allocate_two_layers)
    return AllocationError


def fail_copy(monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    def get(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(kv_pool, "get_data", get)
    return MemoryError


def fail_build(monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    monkeypatch.setattr(graphs_module, "_NODES_PER_LAYER", 2)
    monkeypatch.setattr(graphs_module, "_NODES_BESIDE", 1)
    return GraphError


def fail_graph_memory(monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    def graph(*_: Any) -> None:
        raise AllocationError("a fault point")

    monkeypatch.setattr(graphs_module, "Graph", graph)
    return AllocationError


def fail_reading(monkeypatch: pytest.MonkeyPatch) -> type[Exception]:
    def get(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(graphs_module, "host_view", get)
    return MemoryError


FAULTS = [fail_compute, fail_growth, fail_copy, fail_build, fail_graph_memory, fail_reading]


@pytest.mark.parametrize("recover", ["rewind", "close"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_fails_after_placement_leaves_its_cells_claimed_and_nothing_more(
    executor: GgmlExecutor, expected: Any, fault: Callable[[pytest.MonkeyPatch], type[Exception]], recover: str
) -> None:  # R69
    sequence, other = executor.open(), executor.open()
    feed(executor, sequence, TOKENS[:7])
    feed(executor, other, TOKENS[:3])
    used, n_forwarded = executor.cache.used_cells, executor.n_forwarded
    batch = batch_of([(sequence, TOKENS[7:19]), (other, TOKENS[3:6])])  # 25 cells: the pool of 16 rows must grow
    with pytest.MonkeyPatch.context() as patch:
        error = fault(patch)
        with pytest.raises(error):
            executor.forward(batch)
    assert executor.cache.used_cells == used + 15
    assert executor.length(sequence) == 7
    assert executor.length(other) == 3
    assert executor.n_forwarded == n_forwarded
    for claimed in (sequence, other):
        with pytest.raises(StepError, match="not committed"):
            executor.forward(Batch.of_sequence(claimed, [5]))
    if recover == "close":
        executor.close(sequence)
        sequence = executor.open()
        feed(executor, sequence, TOKENS[:7])
    else:
        executor.rewind(sequence, 7)
    executor.rewind(other, 3)
    assert executor.cache.used_cells == used
    logits = executor.forward(batch_of([(sequence, TOKENS[7:19]), (other, TOKENS[3:6])]))
    assert np.abs(logits[:12] - expected[7:19]).max() < ROUNDED
    assert np.abs(logits[12:] - expected[3:6]).max() < ROUNDED


def test_graphs_that_fail_to_be_built_leave_nothing_behind(executor: GgmlExecutor) -> None:
    sequence, builders = executor.open(), []
    make = graphs_module.GraphBuilder

    def recorded(*arguments: Any) -> Any:
        builder = make(*arguments)
        builders.append(builder)
        return builder

    for fault in (fail_build, fail_graph_memory):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(graphs_module, "GraphBuilder", recorded)
            error = fault(patch)
            with pytest.raises(error):
                executor.forward(Batch.of_sequence(sequence, TOKENS[:3]))
        executor.rewind(sequence, 0)
        assert len(executor.graphs) == 0
    assert len(builders) == 2
    assert all(builder._ctx is None for builder in builders), "a context was not freed"


def test_a_closed_executor_refuses_everything_with_closed_error(model: Model) -> None:
    with executor_over(model, capacity=8) as closed:
        sequence = closed.open()
        feed(closed, sequence, TOKENS[:3])
        closed.close(sequence)
    closed.close_all()
    calls: list[Callable[[], object]] = [
        closed.open, lambda: closed.close(sequence), lambda: closed.clone(sequence, 0), lambda: closed.rewind(sequence, 0),
        lambda: closed.length(sequence), lambda: closed.forward(Batch.of_sequence(sequence, [5])),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ClosedError):
            call()
    assert closed.stats()["kv_bytes"] == 0
    assert closed.stats()["graph_bytes"] == 0
