"""The cell cache against a naive model, under every interleaving of commands that we can think of."""

from __future__ import annotations

import pytest
from cell_walk import GEOMETRIES, Geometry, Walk, random_walk
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

CROWDED = Geometry(64, 8, 4, (0, 3))
ROOMY = Geometry(160, 4, 8, (0, 3))
INDEX = st.integers(0, 30)


class CellCacheMachine(RuleBasedStateMachine):
    """Every command is compared with owner bitsets, masks by definition and the placement rule (R63-R74)."""

    walk: Walk

    @initialize(geometry=st.sampled_from(GEOMETRIES))
    def build(self, geometry: Geometry) -> None:
        self.walk = Walk(geometry)
        self.walk.open()

    def pick(self, index: int) -> int:
        sequences = self.walk.open_sequences
        return sequences[index % len(sequences)]

    @precondition(lambda self: len(self.walk.open_sequences) < 9)
    @rule()
    def open(self) -> None:
        self.walk.open()

    @precondition(lambda self: self.walk.open_sequences)
    @rule(index=INDEX)
    def close(self, index: int) -> None:
        self.walk.close(self.pick(index))

    @precondition(lambda self: 0 < len(self.walk.open_sequences) < 9)
    @rule(index=INDEX, share=st.floats(0, 1))
    def clone(self, index: int, share: float) -> None:
        source = self.pick(index)
        self.walk.clone(source, round(share * self.walk.model.committed[source]))

    @precondition(lambda self: self.walk.open_sequences)
    @rule(index=INDEX, share=st.floats(0, 1))
    def rewind(self, index: int, share: float) -> None:
        sequence = self.pick(index)
        self.walk.rewind(sequence, round(share * self.walk.model.committed[sequence]))

    @precondition(lambda self: self.walk.open_sequences)
    @rule(index=INDEX)
    def refuse_bad_numbers(self, index: int) -> None:
        self.walk.refuse_bad_numbers(self.pick(index))

    @precondition(lambda self: self.walk.open_sequences)
    @rule(index=INDEX)
    def compact(self, index: int) -> None:
        self.walk.compact(self.pick(index))

    @precondition(lambda self: self.walk.open_sequences)
    @rule(
        members=st.lists(st.tuples(INDEX, st.sampled_from((1, 1, 2, 5, 17, 70))), min_size=1, max_size=4),
        outcome=st.sampled_from(("commit", "commit", "commit", "fail", "misplace")),
        bad_token=INDEX,
        bad_by=st.sampled_from((-2, -1, 1, 5)),
    )
    def step(self, members: list[tuple[int, int]], outcome: str, bad_token: int, bad_by: int) -> None:
        tokens = [self.pick(index) for index, n in members for _ in range(n)]
        self.walk.step(tokens, outcome, bad_token, bad_by)


CellCacheMachine.TestCase.settings = settings(
    max_examples=15, stateful_step_count=20, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class TestCellCacheAgreesWithTheNaiveModel(CellCacheMachine.TestCase):  # R74
    pass


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
@pytest.mark.parametrize("seed", range(1), ids="seed={}".format)
def test_a_random_walk_agrees_with_the_naive_model(geometry: Geometry, seed: int) -> None:  # R71 R73 R74
    walk = random_walk(geometry, seed, 40)
    for sequence in walk.open_sequences:
        walk.close(sequence)
    assert walk.cache.free_cells == walk.cache.capacity


@pytest.mark.parametrize("seed", range(6), ids="seed={}".format)
def test_a_walk_through_a_crowded_pool_agrees_with_the_naive_model(seed: int) -> None:  # R73 R74
    walk = random_walk(CROWDED, seed, 90, crowding=0.8)
    assert walk.model.n_pieces > 0, "the walk never came to broken runs: it shows nothing"


@pytest.mark.parametrize("geometry", [*GEOMETRIES, ROOMY], ids=str)
def test_walks_in_which_cells_are_moved_together_agree_with_the_naive_model(geometry: Geometry) -> None:  # R73 R74
    walks = [random_walk(geometry, seed, 50, crowding, moving=0.3) for crowding in (0, 0.4, 0.8) for seed in range(2)]
    assert sum(walk.n_moves for walk in walks) > 0, "nothing was moved: it shows nothing"


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1_000, 1_300), ids="seed={}".format)
def test_a_long_random_walk_agrees_with_the_naive_model(seed: int) -> None:  # R71 R73 R74
    walk = random_walk(GEOMETRIES[seed % len(GEOMETRIES)], seed, 100, seed % 3 * 0.4, seed % 2 * 0.3)
    for sequence in walk.open_sequences:
        walk.close(sequence)
    assert walk.cache.free_cells == walk.cache.capacity
