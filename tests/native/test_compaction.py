"""Cells of a sequence that are moved together: their K and V, what the steps after it read, and when it is not done."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from cell_walk import n_stretches, state_of
from engines import batch_of, executor_over, feed, loaded
from moves import move_at_every_step, move_now
from side_by_side import side_by_side
from tiny_models import VOCAB, write_gemma3, write_llama

from ggml_engine.errors import AllocationError, ComputeError, OptionError
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.executor.options import ExecutorOptions
from ggml_engine.ggml.backends import Graph
from ggml_engine.models.model import Model
from ggml_engine.pool import kv_pool
from ggml_engine.pool.kv_pool import GgmlKvPool
from ggml_engine.pool.kv_types import KV_TYPES
from ggml_engine.pool.step import Placement

TOKENS: list[int] = np.random.default_rng(8).integers(3, VOCAB, 2000).tolist()
MODES: dict[str, dict[str, Any]] = {
    "matmul, columns": {"attention": "matmul", "v_layout": "columns"},
    "matmul, rows": {"attention": "matmul", "v_layout": "rows"},
    "flash, rows": {"attention": "flash", "v_layout": "rows"},
    "deterministic": {"deterministic": True},
}
SMALL_RUNS: dict[str, Any] = {"run": 4, "read_block": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """Heads of 64, so that K and V can be of any type."""
    path = write_llama(tmp_path_factory.mktemp("tiny") / "model.gguf", n_head=2, n_head_kv=1, head_size=64)
    with loaded(path, threads=2) as model:
        yield model


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    """One layer with a window and one that sees everything."""
    path = tmp_path_factory.mktemp("tiny") / "model.gguf"
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "head_size": 16, "n_ff": 32, "context_length": 8192}
    write_gemma3(path, window=256, pattern=[True, False], **sizes)
    with loaded(path, threads=1) as model:
        yield model


@pytest.fixture
def placements(monkeypatch: pytest.MonkeyPatch) -> list[Placement]:
    """Every placement that was committed."""
    found: list[Placement] = []
    commit = Placement.commit

    def recorded(placement: Placement) -> None:
        commit(placement)
        found.append(placement)

    monkeypatch.setattr(Placement, "commit", recorded)
    return found


def cells_of(executor: GgmlExecutor, sequence: int) -> list[int]:
    return executor.cache.cells_of(sequence).tolist()  # type: ignore[attr-defined]


def side_by_side_grown(executor: GgmlExecutor, n: int, n_others: int = 2) -> tuple[int, ...]:
    """Sequences of `n` tokens that were grown in turns, a run each."""
    sequences = tuple(executor.open() for _ in range(1 + n_others))
    run = executor.options.run
    for start in range(0, n, run):
        for i, sequence in enumerate(sequences):
            feed(executor, sequence, TOKENS[i + start : i + min(start + run, n)])
    return sequences


def decode(executor: GgmlExecutor, sequence: int, n: int) -> np.ndarray:
    at = executor.length(sequence)
    return feed(executor, sequence, TOKENS[at : at + n], 1)


def stored(executor: GgmlExecutor, cells: list[int]) -> list[bytes]:
    """For each of these cells its K and V in every layer."""
    pool = executor.cache.pool
    return [b"".join(x.tobytes() for il in range(len(pool.layers)) for x in pool.cell(il, cell)) for cell in cells]


# ---- the bytes

KV_CASES = [
    *(("rows", k, v) for k in KV_TYPES for v in KV_TYPES),
    *(("columns", k, v) for k in KV_TYPES for v in ("f32", "f16", "bf16")),
]


@pytest.mark.parametrize(("v_layout", "k_type", "v_type"), KV_CASES, ids=[" ".join(case) for case in KV_CASES])
def test_k_and_v_of_every_cell_go_along_and_all_others_stay(
    model: Model, v_layout: str, k_type: str, v_type: str
) -> None:
    options = {"v_layout": v_layout, "k_type": k_type, "v_type": v_type, **SMALL_RUNS}
    with executor_over(model, capacity=128, compact=False, **options) as executor:
        sequence, *others = side_by_side_grown(executor, 18)
        before, others_before = stored(executor, cells_of(executor, sequence)), [cells_of(executor, s) for s in others]
        kept = [stored(executor, cells) for cells in others_before]
        assert len(set(before)) == len(before), "cells that are alike show nothing"
        move = move_now(executor, sequence)
        assert move is not None
        assert (move.n_cells, move.n_stretches, move.n_saved) == (18, 5, 4)
        assert cells_of(executor, sequence) == move.new.tolist()
        assert stored(executor, move.new.tolist()) == before
        assert [cells_of(executor, s) for s in others] == others_before
        assert [stored(executor, cells) for cells in others_before] == kept


def test_pieces_of_any_length_and_distance_are_copied(model: Model) -> None:
    pieces = [(0, 40, 3), (5, 43, 3), (10, 46, 3), (14, 60, 3), (20, 64, 1), (22, 66, 5), (36, 75, 2), (30, 80, 2)]
    for v_layout in ("rows", "columns"):
        with executor_over(model, capacity=128, v_layout=v_layout, **SMALL_RUNS) as executor:
            feed(executor, executor.open(), TOKENS[:100])
            expected = stored(executor, list(range(100)))
            for source, target, n in pieces:
                expected[target : target + n] = expected[source : source + n]
            pool = executor.cache.pool
            n_bytes = pool.copy_rows(pieces, model.backends)
            assert n_bytes == sum(n for _, _, n in pieces) * pool.bytes_per_cell
            assert stored(executor, list(range(100))) == expected


def test_more_pieces_than_a_graph_holds_are_copied(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_pool, "_COPIES_PER_GRAPH", 2)
    with executor_over(model, capacity=128, compact=False, **SMALL_RUNS) as executor:
        sequence, other = side_by_side_grown(executor, 18, 1)
        executor.rewind(other, 3)
        feed(executor, sequence, TOKENS[:30])
        before = stored(executor, cells_of(executor, sequence))
        assert move_now(executor, sequence) is not None
        assert stored(executor, cells_of(executor, sequence)) == before


# ---- faults


def failing_copies(monkeypatch: pytest.MonkeyPatch, *, after: bool) -> list[str]:
    """Graphs that copy fail, before or after they have run; gives their names."""
    failed: list[str] = []
    compute = Graph.compute

    def faulty(graph: Graph) -> None:
        if not graph.name.startswith("copy of"):
            compute(graph)
            return
        if after:
            compute(graph)
        failed.append(graph.name)
        raise ComputeError("a fault point")

    monkeypatch.setattr(Graph, "compute", faulty)
    return failed


@pytest.mark.parametrize("after", [False, True], ids=["before the copy", "after it"])
def test_a_copy_that_fails_leaves_everything_as_it_was(
    model: Model, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    with executor_over(model, capacity=128, compact=False, **SMALL_RUNS) as executor:
        sequence, *others = side_by_side_grown(executor, 18)
        held = [cell for s in (sequence, *others) for cell in cells_of(executor, s)]
        before = (state_of(executor.cache), stored(executor, held))  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            failed = failing_copies(patch, after=after)
            with pytest.raises(ComputeError):
                move_now(executor, sequence)
            assert failed
        assert (state_of(executor.cache), stored(executor, held)) == before  # type: ignore[arg-type]
        assert move_now(executor, sequence) is not None


@pytest.mark.usefixtures("in_matmul_form")
def test_a_step_goes_on_where_its_cells_lie_when_the_move_fails(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with side_by_side(model, capacity=256, **SMALL_RUNS) as sides, monkeypatch.context() as patch:
        move_at_every_step(patch)
        failed = failing_copies(patch, after=False)
        a, b = sides.open(), sides.open()
        for _ in range(4):
            sides.step({a: 4})
            sides.step({b: 4})
        cells = cells_of(sides.executor, a)
        sides.decode([a], 2)
        assert failed
        assert cells_of(sides.executor, a)[:16] == cells
        stats = sides.executor.stats()
        assert (stats["moves"], stats["cells_moved"], stats["bytes_moved"]) == (0, 0, 0)
        assert stats["moves_failed"] == len(failed)


@pytest.mark.parametrize("error", [AllocationError, MemoryError])
@pytest.mark.usefixtures("in_matmul_form")
def test_a_move_for_which_there_is_no_memory_is_no_error_of_the_step(
    model: Model, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    with side_by_side(model, capacity=256, **SMALL_RUNS) as sides:
        a, b = sides.open(), sides.open()
        for _ in range(8):
            sides.step({a: 4})
            sides.step({b: 4})
        assert sides.executor.cache.pool.rows == 64, "the move has to grow"
        with monkeypatch.context() as patch:
            move_at_every_step(patch)

            def grow(pool: GgmlKvPool, extent: int) -> None:
                raise error("a fault point")

            sides.rewind(a, 31)  # the step itself needs no more rows
            patch.setattr(GgmlKvPool, "grow", grow)
            sides.step({a: 1})
            assert sides.executor.stats()["moves_failed"] == 1
        assert sides.executor.stats()["moves"] == 0


# ---- when


def parked_between(executor: GgmlExecutor, n: int = 512) -> int:
    """A sequence in runs of 64, eight others between them."""
    sequence, *_ = side_by_side_grown(executor, n, 8)
    return sequence


@pytest.mark.usefixtures("in_matmul_form")
def test_the_steps_after_a_move_read_what_they_read_of_a_sequence_alone(
    windowed: Model, placements: list[Placement]
) -> None:
    with executor_over(windowed, capacity=16_384) as executor:
        alone = executor.open()
        feed(executor, alone, TOKENS[:512])
        placements.clear()
        decode(executor, alone, 40)
        expected = [([[n for _, n in read.spans] for read in p.reads], p.rows_read) for p in placements]
        assert executor.stats()["moves"] == 0
    with executor_over(windowed, capacity=16_384) as executor:
        sequence = parked_between(executor)
        placements.clear()
        decode(executor, sequence, 40)
        found = [([[n for _, n in read.spans] for read in p.reads], p.rows_read) for p in placements]
        stats = executor.stats()
        assert stats["moves"] == 1
        first = found.index(expected[0])
        assert 3 < first < 20
        assert found[first:] == [expected[0]] * (40 - first)
        assert stats["cells_moved"] == 512 + first
        assert stats["bytes_moved"] == stats["cells_moved"] * executor.cache.pool.bytes_per_cell
        assert n_stretches(cells_of(executor, sequence)) == 1


@pytest.mark.usefixtures("in_matmul_form")
def test_a_sequence_that_decodes_three_tokens_is_not_moved(windowed: Model) -> None:
    with executor_over(windowed, capacity=16_384) as executor:
        sequence = parked_between(executor)
        decode(executor, sequence, 3)
        assert executor.stats()["moves"] == 0


@pytest.mark.usefixtures("in_matmul_form")
def test_the_sum_begins_anew_after_a_rewind(windowed: Model) -> None:
    with executor_over(windowed, capacity=16_384) as executor:
        sequence = parked_between(executor)
        for _ in range(20):
            decode(executor, sequence, 3)
            executor.rewind(sequence, 512)
        assert executor.stats()["moves"] == 0
        decode(executor, sequence, 20)
        assert executor.stats()["moves"] == 1
        for leave in (executor.close, executor.close_later):
            other = executor.clone(sequence, 100)
            decode(executor, other, 2)
            leave(other)
        executor.close(sequence)
        assert executor._compaction._debts == {}


@pytest.mark.usefixtures("in_matmul_form")
def test_what_moving_costs_is_never_more_than_what_pieces_have_cost(windowed: Model) -> None:
    """Others take the runs behind it again and again."""
    with executor_over(windowed, capacity=16_384) as executor:
        sequence = parked_between(executor, 256)
        compaction, paid = executor._compaction, 0.0
        spent, n_moves = 0.0, 0
        for i in range(400):
            if i % 64 == 0:
                feed(executor, executor.open(), TOKENS[:200])
            debt = compaction._debts.get(sequence)
            before = debt.paid if debt else 0.0
            cost = compaction._cost(move) if (move := executor.cache.plan_move(sequence)) else 0.0  # type: ignore[attr-defined]
            decode(executor, sequence, 1)
            if compaction.n_moves > n_moves:
                n_moves, spent = compaction.n_moves, spent + cost
                paid += before
            assert spent <= paid
        assert n_moves > 1


@pytest.mark.usefixtures("in_matmul_form")
def test_nothing_is_moved_when_asked_not_to(windowed: Model) -> None:
    with executor_over(windowed, capacity=16_384, compact=False) as executor:
        sequence = parked_between(executor)
        decode(executor, sequence, 40)
        assert executor.stats()["moves"] == 0
        assert n_stretches(cells_of(executor, sequence)) == 9


def test_nothing_is_moved_for_the_compiled_attention_which_pieces_cost_nothing(windowed: Model) -> None:
    with executor_over(windowed, capacity=16_384, attention="cells") as executor:
        sequence = parked_between(executor)
        decode(executor, sequence, 40)
        assert executor.stats()["moves"] == 0
        assert n_stretches(cells_of(executor, sequence)) == 9


@pytest.mark.parametrize("bad", [1, 0, None, "yes"])
def test_compact_is_true_or_false(bad: Any) -> None:
    with pytest.raises(OptionError, match="compact"):
        ExecutorOptions(compact=bad)


@pytest.mark.usefixtures("in_matmul_form")
def test_sequences_that_decode_side_by_side_in_one_dense_span_stay(
    windowed: Model, placements: list[Placement]
) -> None:
    with executor_over(windowed, capacity=16_384) as executor:
        sequences = side_by_side_grown(executor, 256, 3)
        placements.clear()
        for i in range(60):
            executor.forward(batch_of([(sequence, [TOKENS[i]]) for sequence in sequences]))
        assert {len(p.reads[0].spans) for p in placements} == {1}
        assert executor.stats()["moves"] == 0


@pytest.mark.usefixtures("in_matmul_form")
def test_a_prefix_that_the_step_shares_is_no_piece(windowed: Model) -> None:
    with executor_over(windowed, capacity=16_384) as executor:
        source = executor.open()
        feed(executor, source, TOKENS[:512])
        clones = [executor.clone(source, 512) for _ in range(3)]
        feed(executor, executor.open(), TOKENS[:1024])
        for clone in clones:
            feed(executor, clone, TOKENS[:60])
            feed(executor, executor.open(), TOKENS[:400])
        for i in range(60):
            executor.forward(batch_of([(clone, [TOKENS[i]]) for clone in clones]))
        assert executor.stats()["moves"] == 0


def test_a_full_pool_goes_on_without_moves(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    move_at_every_step(monkeypatch)
    with side_by_side(model, capacity=64, **SMALL_RUNS) as sides:
        a, b = sides.open(), sides.open()
        for _ in range(7):
            sides.step({a: 4})
            sides.step({b: 4})
        n_grown = sides.executor.cache.pool.n_grown
        sides.decode([a], 4)
        sides.decode([b], 4)
        assert sides.executor.cache.free_cells == 0
        assert (sides.executor.cache.pool.rows, sides.executor.cache.pool.n_grown) == (64, n_grown)


def test_one_contiguous_sequence_never_moves(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    move_at_every_step(monkeypatch)
    with side_by_side(model, capacity=64, cache_kind="sequence") as sides:
        a = sides.open()
        sides.step({a: 30})
        sides.rewind(a, 3)
        sides.decode([a], 10)
        assert sides.executor.stats()["moves"] == 0


# ---- the logits


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_sequence_that_was_moved_computes_what_it_computes_alone(model: Model, mode: dict[str, Any]) -> None:  # R73
    """Its history was computed in one stretch; later tokens in two, until they were rewound."""
    options = {**mode, "capacity": 4096}
    with executor_over(model, **options) as executor:
        alone = executor.open()
        feed(executor, alone, TOKENS[:512])
        expected = decode(executor, alone, 80)
    with executor_over(model, **options) as executor:
        sequence, other = executor.open(), executor.open()
        feed(executor, sequence, TOKENS[:512])
        feed(executor, other, TOKENS[:1024])
        assert cells_of(executor, sequence) == list(range(512))
        decode(executor, sequence, 80)
        assert executor.stats()["moves"] == 1
        executor.rewind(sequence, 512)
        cells = cells_of(executor, sequence)
        assert n_stretches(cells) == 1
        assert cells[0] >= 1024, "they lie elsewhere"
        assert decode(executor, sequence, 80).tobytes() == expected.tobytes()
        assert cells_of(executor, sequence)[-1] == cells[0] + 591


@pytest.mark.parametrize("eager", [False, True], ids=["as it pays", "at every step"])
def test_deterministic_logits_are_the_same_bits_while_cells_move(
    windowed: Model, monkeypatch: pytest.MonkeyPatch, eager: bool
) -> None:
    options: dict[str, Any] = {"deterministic": True, "capacity": 4096}
    with executor_over(windowed, **options) as executor:
        alone = executor.open()
        expected = np.concatenate([feed(executor, alone, TOKENS[:256], 64), decode(executor, alone, 60)])
    if eager:
        move_at_every_step(monkeypatch)
    with executor_over(windowed, **options) as executor:
        sequence, *others = (executor.open() for _ in range(3))
        found = []
        for start in range(0, 256, 64):
            found.append(feed(executor, sequence, TOKENS[start : start + 64]))
            for other in others:
                feed(executor, other, TOKENS[start + 5 : start + 69])
        for i in range(60):
            found.append(decode(executor, sequence, 1))
            feed(executor, others[i % 2], TOKENS[i : i + 40])
        assert np.concatenate(found).tobytes() == expected.tobytes()
        assert executor.stats()["moves"] > 0


def test_graphs_stay_when_cells_move_inside_of_what_is_stored(windowed: Model) -> None:
    with executor_over(windowed, capacity=16_384) as executor:
        feed(executor, executor.open(), TOKENS[:64])
        sequence = parked_between(executor)
        executor.forward(Batch.of_sequence(executor.open(), TOKENS[:2000][:512]))
        pool = executor.cache.pool
        n_graphs, n_grown = len(executor.graphs), pool.n_grown
        assert n_graphs > 1
        assert move_now(executor, sequence) is not None
        assert (len(executor.graphs), pool.n_grown) == (n_graphs, n_grown)
