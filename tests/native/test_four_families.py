"""The four families: batches, clones, windows, refusals, each against attention by definition, one sequence at a time.

They are the acceptance of many sequences in one pool, also when cells move before every step in which that saves a
stretch. What each must notice when it is broken is kept as patches
(tests/reverts). In every family sessions come and go beside the ones compared: a freed cell that somebody still owned
is soon written by a newcomer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cell_walk import state_of
from engines import batch_of, loaded
from moves import move_at_every_step
from side_by_side import SideBySide, side_by_side
from tiny_models import VOCAB, write_gemma3, write_llama

from ggml_engine.errors import CacheError, ComputeError, InputError, PositionError, StepError, UnknownSequenceError
from ggml_engine.executor.batch import Batch
from ggml_engine.ggml.backends import Graph
from ggml_engine.models.config import Hyperparameters, KvLayer
from ggml_engine.models.model import Model
from ggml_engine.pool.window import Window
from ggml_engine.reference import naive

MODES: dict[str, dict[str, Any]] = {
    "matmul, columns": {"attention": "matmul", "v_layout": "columns"},
    "matmul, rows": {"attention": "matmul", "v_layout": "rows"},
    "flash, rows": {"attention": "flash", "v_layout": "rows"},
    "cells": {"attention": "cells"},
    "matmul folded, columns": {"attention": "matmul_folded", "v_layout": "columns"},
    "flash folded, rows": {"attention": "flash_folded", "v_layout": "rows"},
    "deterministic": {"deterministic": True},
}
FROM_ONE_ROW: dict[str, Any] = {"run": 1, "read_block": 1}  # reads are exact, so that storage doubles from 1 row
SMALL_RUNS: dict[str, Any] = {"run": 4, "read_block": 8}
MODELS: dict[str, Callable[[Path], Path]] = {
    "llama": write_llama,
    "gemma3": lambda path: write_gemma3(path, window=5, n_layer=3, pattern=2),
}


@pytest.fixture(scope="module", params=MODELS)
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Model]:
    with loaded(MODELS[request.param](tmp_path_factory.mktemp("tiny") / "model.gguf"), threads=1) as model:
        yield model


@pytest.fixture(params=[False, True], ids=["moved as it pays", "moved at every step"], autouse=True)
def is_eager(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param:
        move_at_every_step(monkeypatch)
    return bool(request.param)


def come_and_go(sides: SideBySide, sequence: int, n: int = 7) -> int:
    """A clone of `sequence` is rewound and closed, and a newcomer takes `n` cells: those of others must stay."""
    clone = sides.clone(sequence)
    sides.step({clone: 2})
    sides.rewind(clone, 1)
    sides.close(clone)
    newcomer = sides.open()
    sides.step({newcomer: n})
    sides.check_cells()
    return newcomer


class TestBatches:
    """(a) Sequences prefill apart and decode in one forward."""

    @pytest.mark.parametrize("max_graphs", [1, 32])
    @pytest.mark.parametrize("kv", ["f32", "f16"])
    @pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
    def test_two_prefill_apart_and_decode_together_over_storage_that_grows_from_one_row(
        self, model: Model, mode: dict[str, Any], kv: str, max_graphs: int, is_eager: bool
    ) -> None:  # R70, R71, R72
        options = {**mode, **FROM_ONE_ROW, "k_type": kv, "v_type": kv, "max_graphs": max_graphs}
        with side_by_side(model, capacity=64, **options) as sides:
            pool = sides.executor.cache.pool
            assert pool.rows == 1
            a, b = sides.open(), sides.open()
            sides.decode([a], 2)
            sides.step({a: 7})
            sides.step({b: 6})
            sides.decode([a, b], 6)
            if is_eager:
                # pieces cost the compiled kernel nothing, so that nothing is moved for it
                assert (sides.executor.stats()["moves"] > 0) == (mode != {"attention": "cells"})
            else:
                assert (pool.rows, pool.n_grown) == (36, 4)  # 1, 2, 9, 18, 36
            assert len(sides.executor.graphs) <= max_graphs

    @pytest.mark.parametrize("max_graphs", [1, 32])
    @pytest.mark.parametrize("kv", ["f32", "f16"])
    @pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
    def test_graphs_are_used_again_while_sessions_come_and_go(
        self, model: Model, mode: dict[str, Any], kv: str, max_graphs: int
    ) -> None:  # R64, R71, R72
        options = {**mode, "run": 4, "read_block": 16, "k_type": kv, "v_type": kv, "max_graphs": max_graphs}
        with side_by_side(model, capacity=160, **options) as sides:
            a, b = sides.open(), sides.open()
            sides.step({a: 9})
            sides.step({b: 5})
            sides.decode([a, b], 3)
            newcomer = come_and_go(sides, a)
            sides.decode([a, b, newcomer], 4)
            sides.close(b)
            sides.decode([newcomer, a], 4)
            stats = sides.executor.stats()
            assert len(sides.executor.graphs) <= max_graphs
            assert stats["graphs_reused"] > 0

    @pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
    def test_prefills_and_decodes_of_four_go_in_one_forward(self, model: Model, mode: dict[str, Any]) -> None:  # R72
        with side_by_side(model, capacity=128, **mode, **SMALL_RUNS) as sides:
            a, b, c, d = (sides.open() for _ in range(4))
            sides.step({a: 9})
            sides.step({b: 3, a: 1})
            sides.step({a: 1, c: 11, b: 1})
            sides.step({d: 6, c: 1, b: 1, a: 1})
            sides.decode([b, d, a, c], 3)


class TestClones:
    """(b) A clone shares its source's prefix while both go on; rewinds; closing either."""

    @pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
    @pytest.mark.parametrize("geometry", [FROM_ONE_ROW, SMALL_RUNS, {}], ids=["rows", "runs of 4", "as it comes"])
    def test_both_go_on_from_a_shared_prefix(
        self, model: Model, mode: dict[str, Any], geometry: dict[str, Any]
    ) -> None:  # R63
        with side_by_side(model, capacity=256, **mode, **geometry) as sides:
            source = sides.open()
            sides.step({source: 13})
            clone = sides.clone(source, 9)
            sides.decode([source, clone], 6)
            grandchild = sides.clone(clone, 11)
            sides.step({grandchild: 5, source: 1, clone: 2})
            assert sides.executor.cache.used_cells == 13 + 6 + 6 + 5 + 1 + 2
            sides.check_cells()

    @pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
    @pytest.mark.parametrize("closed", ["source", "clone"])
    def test_the_other_keeps_its_prefix_when_one_is_closed(
        self, model: Model, mode: dict[str, Any], closed: str
    ) -> None:  # R64, R73
        with side_by_side(model, capacity=96, **mode, **SMALL_RUNS) as sides:
            source = sides.open()
            sides.step({source: 14})
            clone = sides.clone(source, 10)
            sides.decode([source, clone], 2)
            gone, kept = (source, clone) if closed == "source" else (clone, source)
            sides.close(gone)
            newcomers = [sides.open() for _ in range(3)]
            sides.step(dict.fromkeys(newcomers, 9))
            sides.decode([kept, *newcomers], 4)
            sides.check_cells()

    @pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
    @pytest.mark.parametrize("rewound", ["source", "clone", "both"])
    def test_the_other_keeps_its_prefix_when_one_is_rewound(
        self, model: Model, mode: dict[str, Any], rewound: str
    ) -> None:  # R64, R104
        with side_by_side(model, capacity=96, **mode, **SMALL_RUNS) as sides:
            source = sides.open()
            sides.step({source: 14})
            clone = sides.clone(source, 10)
            sides.decode([source, clone], 2)
            for sequence in {"source": [source], "clone": [clone], "both": [source, clone]}[rewound]:
                sides.rewind(sequence, 5)
            sides.check_cells()
            newcomer = sides.open()
            sides.step({newcomer: 9})
            sides.step({source: 4, clone: 3, newcomer: 1})
            sides.decode([clone, source], 4)

    def test_clones_of_clones_close_in_any_order(self, model: Model) -> None:  # R64
        for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]):
            with side_by_side(model, capacity=96, **SMALL_RUNS) as sides:
                family = [sides.open()]
                sides.step({family[0]: 7})
                for _ in range(3):
                    family.append(sides.clone(family[-1]))
                    sides.step({family[-1]: 3})
                for gone in order:
                    sides.close(family[gone])
                    others = [sequence for sequence in family if sequence in sides.histories]
                    newcomer = sides.open()
                    sides.step({newcomer: 5, **dict.fromkeys(others, 1)})
                    sides.check_cells()


def in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows are chunks from here on, in the executor and, by definition, in what it is compared with.

    There is an architecture with chunks, but its chunks are of 8192 tokens.
    """
    kv_layers = Hyperparameters.kv_layers

    def chunked(hp: Hyperparameters) -> tuple[KvLayer, ...]:
        return tuple(replace(layer, is_chunked=layer.window > 0) for layer in kv_layers(hp))

    def visible(n_tokens: int, window: int) -> np.ndarray:
        return np.array([[q <= p and (not window or q // window == p // window) for q in range(n_tokens)]
                         for p in range(n_tokens)])  # fmt: skip

    monkeypatch.setattr(Hyperparameters, "kv_layers", chunked)
    monkeypatch.setattr(naive, "visible", visible)


class TestWindows:
    """(c) Windows that slide, and chunks; also inside a prefill that is wider than the window."""

    @pytest.fixture(params=[Window(1), Window(3), Window(5), Window(0), Window(6, True)], ids=str)
    def window(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Window:
        window: Window = request.param
        if window.is_chunked:
            in_chunks(monkeypatch)
        return window

    @pytest.fixture
    def windowed(self, tmp_path: Path, window: Window) -> Path:
        """Two windowed layers around one that sees everything; 0: all do."""
        return write_gemma3(tmp_path / "gemma3.gguf", window=window.size, pattern=[True, False, True], n_layer=3)

    @pytest.mark.parametrize("kv", ["f32", "f16"])
    @pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
    def test_a_prefill_wider_than_the_window_and_decodes_after_it(
        self, windowed: Path, mode: dict[str, Any], kv: str
    ) -> None:  # R71, R72
        with side_by_side(windowed, capacity=96, **mode, **FROM_ONE_ROW, k_type=kv, v_type=kv) as sides:
            a, b = sides.open(), sides.open()
            sides.step({a: 14})
            sides.step({b: 9, a: 1})
            sides.decode([a, b], 5)

    @pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
    def test_rewinds_and_clones_find_the_history_that_the_window_had_left(
        self, windowed: Path, mode: dict[str, Any]
    ) -> None:  # R65, R103
        with side_by_side(windowed, capacity=96, **mode, **SMALL_RUNS) as sides:
            a = sides.open()
            sides.step({a: 20})
            clone = sides.clone(a, 6)
            newcomer = come_and_go(sides, a)
            sides.rewind(a, 8)
            sides.step({a: 1, clone: 2, newcomer: 1})
            sides.step({clone: 7, a: 6})
            sides.decode([a, newcomer, clone], 3)

    def test_a_read_of_a_window_holds_no_more_than_it_sees(self, windowed: Path, window: Window) -> None:
        with side_by_side(windowed, capacity=96, **FROM_ONE_ROW) as sides:
            a = sides.open()
            sides.step({a: 20})
            before = sides.executor.n_rows_read
            sides.decode([a], 1)
            seen = 20 % window.size + 1 if window.is_chunked else window.size
            assert sides.executor.n_rows_read - before == (21 + seen if window.size else 21)


class TestRefusals:
    """(d) What was not declared or does not continue its sequence is refused, changes nothing, and harms nobody."""

    @pytest.fixture(params=["matmul, columns", "flash, rows"])
    def sides(self, model: Model, request: pytest.FixtureRequest) -> Iterator[SideBySide]:
        with side_by_side(model, capacity=96, **MODES[request.param], **SMALL_RUNS) as sides:
            yield sides

    def two(self, sides: SideBySide) -> tuple[int, int]:
        """A sequence of 11 tokens, and a clone of its first 7 that has gone its own way."""
        source = sides.open()
        sides.step({source: 11})
        clone = sides.clone(source, 7)
        sides.step({clone: 3})
        return source, clone

    def refuse(self, sides: SideBySide, batch: Batch, error: type[Exception], match: str) -> None:
        before = (state_of(sides.executor.cache), sides.executor.cache.pool.rows, sides.executor.n_forwarded)
        with pytest.raises(error, match=match):
            sides.executor.forward(batch)
        assert (state_of(sides.executor.cache), sides.executor.cache.pool.rows, sides.executor.n_forwarded) == before

    def test_positions_that_do_not_continue_their_sequence(self, sides: SideBySide) -> None:  # R68
        source, clone = self.two(sides)
        whole = batch_of([(source, [5, 6]), (clone, [7])])
        for positions in ([10, 11, 10], [12, 13, 10], [0, 1, 10], [-1, 0, 10], [11, 11, 10], [11, 12, 9], [11, 12, 11]):
            bad = Batch(whole.tokens, whole.sequences, whole.wants_logits, np.array(positions, np.int32))
            self.refuse(sides, bad, PositionError, "position")
        newcomer = come_and_go(sides, source)
        sides.step({source: 2, clone: 1, newcomer: 1})
        sides.decode([clone, source], 3)

    def test_sequences_that_nobody_opened_or_somebody_closed(self, sides: SideBySide) -> None:  # R67
        source, clone = self.two(sides)
        closed = sides.open()
        sides.close(closed)
        for unknown in (-1, closed, closed + 1, 2**40):
            batch = (
                batch_of([(source, [5]), (unknown, [6])]) if abs(unknown) < 2**31 else Batch.of_sequence(unknown, [6])
            )
            self.refuse(sides, batch, UnknownSequenceError, str(unknown))
        newcomer = come_and_go(sides, clone)
        sides.decode([clone, source, newcomer], 3)

    def test_a_step_whose_forerunner_was_not_committed(
        self, sides: SideBySide, monkeypatch: pytest.MonkeyPatch
    ) -> None:  # R67, R69
        source, clone = self.two(sides)
        used = sides.executor.cache.used_cells

        def compute(_: Graph) -> None:
            raise ComputeError("a fault point")

        failing = batch_of([(source, [5, 6, 7]), (clone, [8])])
        with monkeypatch.context() as patch:
            patch.setattr(Graph, "compute", compute)
            with pytest.raises(ComputeError):
                sides.executor.forward(failing)
        assert sides.executor.cache.used_cells == used + 4
        assert (sides.executor.length(source), sides.executor.length(clone)) == (11, 10)
        for batch in (Batch.of_sequence(source, [5]), batch_of([(sides.open(), [5]), (clone, [5])])):
            self.refuse(sides, batch, StepError, "not committed")
        sides.rewind(source, 11)
        sides.rewind(clone, 10)
        assert sides.executor.cache.used_cells == used
        newcomer = come_and_go(sides, source)
        sides.step({clone: 4, source: 1, newcomer: 1})
        sides.decode([clone, source], 3)

    def test_a_step_that_was_declared_once_is_placed_and_committed_once(self, sides: SideBySide) -> None:  # R67
        source, clone = self.two(sides)
        cache = sides.executor.cache
        step = cache.declare([source])
        placement = step.place([11])
        with pytest.raises(StepError):
            step.place([11])
        placement.commit()
        for again in (placement.commit, lambda: step.place([12])):
            with pytest.raises(StepError):
                again()
        assert (sides.executor.length(source), cache.used_cells) == (12, 11 + 3 + 1)
        stale = cache.declare([source, clone])
        sides.rewind(source, 9)
        with pytest.raises(StepError, match="stale"):
            stale.place([12, 10])
        sides.step({source: 5, clone: 2})

    @pytest.mark.parametrize("token", [-1, VOCAB, 2**31 - 1])
    def test_tokens_that_have_no_embedding(self, sides: SideBySide, token: int) -> None:
        source, clone = self.two(sides)
        self.refuse(sides, batch_of([(source, [5]), (clone, [token])]), InputError, f"got {token}")
        newcomer = come_and_go(sides, source)
        sides.step({clone: 1, source: 2, newcomer: 1})

    @pytest.mark.parametrize("bad", [-1, 12, True, 3.0, None])
    def test_boundaries_that_are_not_committed(self, sides: SideBySide, bad: Any) -> None:
        source, clone = self.two(sides)
        before = state_of(sides.executor.cache)
        for call in (sides.executor.clone, sides.executor.rewind):
            with pytest.raises(CacheError, match="position"):
                call(source, bad)
        assert state_of(sides.executor.cache) == before
        sides.step({clone: 1, source: 2})
