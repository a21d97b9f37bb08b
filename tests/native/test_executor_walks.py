"""Random interleavings of many sequences, failures among them, against the definition of each sequence alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from engines import executor_over, loaded
from moves import move_now
from naive import NaiveModel
from tiny_models import VOCAB, write_gemma3, write_llama

from ggml_engine.errors import ComputeError, PoolFullError
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.ggml.backends import Graph
from ggml_engine.models.model import Model
from ggml_engine.pool import read_plan

# f16 K and V, GELU's table, flash's f16: see test_engine_against_naive, whose bound is the same
ROUNDED = 1e-1
LONGEST = 40
MODES: list[dict[str, Any]] = [
    {"attention": "matmul", "v_layout": "columns"},
    {"attention": "matmul", "v_layout": "rows"},
    {"attention": "flash", "v_layout": "rows"},
    {"attention": "cells"},
    {"deterministic": True},
]
GEOMETRIES = [(1, 1), (1, 8), (4, 1), (4, 8), (16, 64), (64, 256)]


class Walk:
    """Open sequences and what each has seen; every command runs on both sides."""

    def __init__(self, executor: GgmlExecutor, naive: NaiveModel, rng: random.Random) -> None:
        self.executor = executor
        self.naive = naive
        self.rng = rng
        self.histories: dict[int, list[int]] = {}
        self.n_compared = 0
        self.n_failed = 0
        self.n_refused = 0
        self.n_moved = 0

    def command(self) -> None:
        commands = [self.forward] * 6 + [self.open] * 2 + [self.clone, self.rewind, self.close, self.fail]
        commands += [self.move] * 2
        self.rng.choice(commands if self.histories else [self.open])()
        self.check()

    def check(self) -> None:
        cells = self.executor.cache
        assert cells.free_cells + cells.used_cells == cells.capacity  # R74
        for sequence, history in self.histories.items():
            assert self.executor.length(sequence) == len(history)

    def any_sequence(self) -> int:
        return self.rng.choice(list(self.histories))

    def open(self) -> None:
        self.histories[self.executor.open()] = []

    def close(self) -> None:
        sequence = self.any_sequence()
        self.executor.close(sequence)
        del self.histories[sequence]

    def clone(self) -> None:
        source = self.any_sequence()
        upto = self.rng.randint(0, len(self.histories[source]))
        free = self.executor.cache.free_cells
        self.histories[self.executor.clone(source, upto)] = self.histories[source][:upto]
        assert self.executor.cache.free_cells == free

    def rewind(self) -> None:
        sequence = self.any_sequence()
        to = self.rng.randint(0, len(self.histories[sequence]))
        self.executor.rewind(sequence, to)
        del self.histories[sequence][to:]

    def move(self) -> None:
        self.n_moved += move_now(self.executor, self.any_sequence()) is not None

    def batch(self) -> tuple[Batch, dict[int, list[int]]]:
        """Tokens of up to four sequences, in chunks or interleaved; what each history becomes."""
        chosen = self.rng.sample(list(self.histories), min(len(self.histories), self.rng.randint(1, 4)))
        after = {sequence: list(self.histories[sequence]) for sequence in chosen}
        order = []
        for sequence in chosen:
            n = min(self.rng.choice((1, 1, 1, 2, 5, 13)), LONGEST - len(after[sequence]))
            order += [sequence] * n
        if self.rng.random() < 0.3:
            self.rng.shuffle(order)
        tokens = [self.rng.randrange(3, VOCAB) for _ in order]
        for sequence, token in zip(order, tokens, strict=True):
            after[sequence].append(token)
        marks = np.array([self.rng.random() < 0.7 for _ in order], np.bool_)
        if not order:
            return self.batch() if any(len(h) < LONGEST for h in self.histories.values()) else self.shorten()
        return Batch(np.array(tokens), np.array(order), marks), after

    def shorten(self) -> tuple[Batch, dict[int, list[int]]]:
        for sequence, history in self.histories.items():
            self.executor.rewind(sequence, 0)
            history.clear()
        return self.batch()

    def forward(self) -> None:
        batch, after = self.batch()
        try:
            logits = self.executor.forward(batch)
        except PoolFullError:
            self.n_refused += 1
            return
        before, self.histories = self.histories, {**self.histories, **after}
        whole = {sequence: self.naive.logits(tokens) for sequence, tokens in after.items() if tokens}
        at = {sequence: len(before[sequence]) for sequence in after}
        row = 0
        for sequence, wanted in zip(batch.sequences.tolist(), batch.wants_logits.tolist(), strict=True):
            if wanted:
                assert np.abs(logits[row] - whole[sequence][at[sequence]]).max() < ROUNDED
                row += 1
            at[sequence] += 1
        assert row == len(logits)
        self.n_compared += row

    def fail(self) -> None:
        """A step that fails in the middle of nowhere; its sequences are rewound or closed."""
        batch, after = self.batch()
        with pytest.MonkeyPatch.context() as patch, suppress(PoolFullError):

            def compute(_: Graph) -> None:
                self.n_failed += 1
                raise ComputeError("a fault point")

            patch.setattr(Graph, "compute", compute)
            with suppress(ComputeError):
                self.executor.forward(batch)
        for sequence in after:
            if self.rng.random() < 0.3:
                self.executor.close(sequence)
                del self.histories[sequence]
            else:
                self.executor.rewind(sequence, len(self.histories[sequence]))


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("tiny") / "model.gguf"
    write_llama(path) if request.param == "llama" else write_gemma3(path, window=5, pattern=2, n_layer=3)
    with loaded(path, threads=1) as model:
        yield model


def walk(model: Model, seed: int, n_commands: int) -> Walk:
    rng = random.Random(seed)
    run, read_block = rng.choice(GEOMETRIES)
    capacity = rng.choice((64, 128, 256))
    options = {**MODES[seed % len(MODES)], "max_graphs": rng.choice((1, 4, 32)), "k_type": rng.choice(("f32", "f16"))}
    with executor_over(model, capacity=capacity, run=run, read_block=read_block, **options) as executor:
        walked = Walk(executor, NaiveModel(model.file.path), rng)
        for _ in range(n_commands):
            walked.command()
    return walked


def test_random_interleavings_agree_with_every_sequence_alone(model: Model) -> None:  # R64, R69, R71, R74
    walks = [walk(model, seed, 48) for seed in range(16)]
    assert sum(walked.n_compared for walked in walks) > 1000
    assert sum(walked.n_failed for walked in walks) > 10
    assert sum(walked.n_refused for walked in walks) > 5
    assert sum(walked.n_moved for walked in walks) > 10


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_hundreds_of_random_interleavings_agree(model: Model, block: int) -> None:
    walks = [walk(model, 1000 + 30 * block + i, 60) for i in range(30)]
    assert sum(walked.n_compared for walked in walks) > 1000


def test_a_walk_without_the_mask_ends_red(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control."""
    monkeypatch.setattr(read_plan, "fill_mask", lambda out, *_: out.fill(0))
    with pytest.raises(AssertionError):
        walk(model, 0, 40)
