"""What the compiled attention pays for: rows that its plans name, and graphs that are built."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from engines import batch_of, executor_over, feed, loaded
from tiny_models import VOCAB, write_llama

from ggml_engine.executor.planned_rows import PlannedReading
from ggml_engine.models.model import Model
from ggml_engine.pool.cell_plan import CellPlan
from ggml_engine.pool.step import Placement

TOKENS: list[int] = np.random.default_rng(9).integers(3, VOCAB, 1024).tolist()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    path = write_llama(tmp_path_factory.mktemp("tiny") / "model.gguf", n_layer=1, context_length=4096)
    with loaded(path, threads=1) as model:
        yield model


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[CellPlan]:
    """The plan of every step."""
    found: list[CellPlan] = []
    make = PlannedReading.plans

    def recorded(self: PlannedReading, placement: Placement) -> tuple[CellPlan, ...]:
        made = make(self, placement)
        found.extend(made)
        return made

    monkeypatch.setattr(PlannedReading, "plans", recorded)
    return found


def spans(plan: CellPlan) -> list[tuple[int, int, int]]:
    """(rows, first token, tokens) of every span."""
    numbers = plan.numbers.tolist()
    return [(numbers[i + 1], numbers[i + 3], numbers[i + 4]) for i in range(numbers[2], len(numbers), 5)]


def test_a_graph_serves_all_steps_of_a_session_until_the_pool_grows(model: Model) -> None:
    with executor_over(model, capacity=2048, attention="cells") as executor:
        sequence = executor.open()
        feed(executor, sequence, TOKENS[:100])
        assert executor.graphs.n_built == 1
        feed(executor, sequence, TOKENS[:156], 1)  # up to 256 rows
        assert executor.graphs.n_built == 2, "one for the prompt, one for 156 steps"
        assert executor.cache.pool.n_grown == 1
        feed(executor, sequence, TOKENS[:200], 1)
        assert executor.cache.pool.n_grown == 2, "to 512 rows, whose views are others"
        assert executor.graphs.n_built == 3
        assert executor.graphs.n_reused == 156 + 200 - 2


def test_two_hundred_steps_from_nothing_build_one_graph(model: Model) -> None:
    with executor_over(model, capacity=2048, attention="cells") as executor:
        feed(executor, executor.open(), TOKENS[:200], 1)
        assert executor.graphs.n_built == 1


def test_sessions_that_grow_side_by_side_build_one_graph_for_each_size_of_a_plan(
    model: Model, plans: list[CellPlan]
) -> None:
    with executor_over(model, capacity=2048, attention="cells") as executor:
        sequences = [executor.open() for _ in range(8)]
        feed(executor, sequences[0], TOKENS[:1])
        executor._make_room(2048)  # so that it is not growth that drops graphs
        built = executor.graphs.n_built
        for i in range(200):
            executor.forward(batch_of([(sequence, [TOKENS[i]]) for sequence in sequences]))
        assert executor.graphs.n_built - built == len({plan.capacity for plan in plans[1:]}) == 1


def test_a_plan_that_outgrows_its_graph_gets_another_one(model: Model, plans: list[CellPlan]) -> None:
    with executor_over(model, capacity=2048, attention="cells", run=1) as executor:
        sequence, other = executor.open(), executor.open()
        executor._make_room(2048)
        for token in TOKENS[:120]:  # their cells alternate: every position is a stretch
            feed(executor, sequence, [token])
            feed(executor, other, [token])
        assert {plan.capacity for plan in plans} == {256, 512, 1024}
        assert executor.graphs.n_built == 3


def test_sessions_on_one_prefix_read_it_once(model: Model, plans: list[CellPlan]) -> None:
    with executor_over(model, capacity=2048, attention="cells") as executor:
        trunk = executor.open()
        feed(executor, trunk, TOKENS[:512])
        clones = [executor.clone(trunk, 512) for _ in range(8)]
        for i in range(5):
            plans.clear()
            n_read = executor.n_rows_read
            executor.forward(batch_of([(clone, [TOKENS[i]]) for clone in clones if clone is not None]))
            (plan,) = plans
            assert sorted(spans(plan)) == sorted([(512, 0, 8), *((i + 1, token, 1) for token in range(8))])
            assert executor.n_rows_read - n_read == 512 + 8 * (i + 1)


def test_the_first_step_of_a_clone_reads_nothing_twice(model: Model, plans: list[CellPlan]) -> None:
    with executor_over(model, capacity=2048, attention="cells") as executor:
        trunk = executor.open()
        feed(executor, trunk, TOKENS[:300])
        clone = executor.clone(trunk, 250)
        assert clone is not None
        plans.clear()
        n_read = executor.n_rows_read
        feed(executor, clone, TOKENS[:1])
        assert sorted(spans(plans[0])) == [(1, 0, 1), (250, 0, 1)]
        assert executor.n_rows_read - n_read == 251
