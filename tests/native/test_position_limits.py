"""What a model does with positions: none beyond its table of them, and none at all where it asks for none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from architecture_rows import ROWS
from cell_walk import state_of
from engines import batch_of, executor_over, feed, libllama_running, loaded, running
from forged_models import set_key, taken_apart
from saved_models import SavedModel, write_model
from tiny_models import VOCAB

import ggml_engine
from ggml_engine.errors import ContextLengthError, WeightError
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.models.model import Model

LIMIT = 24
CAPACITY = 64
TOKENS: list[int] = np.random.default_rng(5).integers(3, VOCAB, LIMIT + 1).tolist()


def changed(row: str, metadata: Mapping[str, object]) -> SavedModel:
    """The model of a row with other metadata."""
    model = ROWS[row].model
    return replace(model, metadata={**model.metadata, **metadata})


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(changed("gpt2", {"context_length": LIMIT}), tmp_path_factory.mktemp("tiny") / "gpt2.gguf")


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[Model]:
    with loaded(path, threads=1) as model:
        yield model


@pytest.fixture
def executor(model: Model) -> Iterator[GgmlExecutor]:
    with executor_over(model, capacity=CAPACITY, run=4, read_block=8) as executor:
        yield executor


def test_libllama_is_given_no_position_beyond_its_table(path: Path) -> None:
    """It looks it up all the same, and ggml ends the process."""
    with libllama_running(path, capacity=CAPACITY) as executor:
        assert (executor.capacity, executor.max_positions) == (CAPACITY, LIMIT)
        sequence = executor.open()
        feed(executor, sequence, TOKENS[:LIMIT])
        with pytest.raises(ContextLengthError, match=r"gpt2 model needs 25 tokens, the context holds 24"):
            feed(executor, sequence, TOKENS[LIMIT:])
        assert (executor.length(sequence), executor.free_cells) == (LIMIT, CAPACITY - LIMIT)
        executor.rewind(sequence, 3)
        feed(executor, sequence, TOKENS[3:LIMIT])


class TestATableOfPositions:
    def test_ends_a_sequence_where_it_ends(self, executor: GgmlExecutor) -> None:
        assert (executor.capacity, executor.max_positions) == (CAPACITY, LIMIT)
        sequence = executor.open()
        feed(executor, sequence, TOKENS[:LIMIT])
        with pytest.raises(ContextLengthError, match=r"gpt2 model needs 25 tokens, the context holds 24") as refusal:
            feed(executor, sequence, TOKENS[LIMIT:])
        assert (refusal.value.requested, refusal.value.limit) == (LIMIT + 1, LIMIT)
        assert executor.length(sequence) == LIMIT

    def test_refuses_a_step_as_a_whole_and_changes_nothing(self, executor: GgmlExecutor) -> None:
        short, long = executor.open(), executor.open()
        feed(executor, long, TOKENS[:20])
        before = state_of(executor.cache), executor.stats()
        with pytest.raises(ContextLengthError, match=r"needs 26 tokens"):
            executor.forward(batch_of([(short, TOKENS[:3]), (long, TOKENS[:6])]))
        assert (state_of(executor.cache), executor.stats()) == before
        executor.forward(batch_of([(short, TOKENS[:3]), (long, TOKENS[20:LIMIT])]))
        assert (executor.length(short), executor.length(long)) == (3, LIMIT)

    def test_leaves_the_way_back_open(self, executor: GgmlExecutor) -> None:
        sequence = executor.open()
        first = feed(executor, sequence, TOKENS[:LIMIT])
        with pytest.raises(ContextLengthError):
            feed(executor, sequence, TOKENS[LIMIT:])
        executor.rewind(sequence, 20)
        np.testing.assert_allclose(feed(executor, sequence, TOKENS[20:LIMIT]), first[20:], atol=1e-2)

    def test_needs_a_row_for_every_position_of_the_context(self, tmp_path: Path) -> None:
        made = write_model(changed("gpt2", {"context_length": LIMIT}), tmp_path / "gpt2.gguf")
        forge = taken_apart(made)
        set_key(forge, "gpt2.context_length", LIMIT + 1)
        forge.write(made)
        with pytest.raises(WeightError, match=r"position_embd.*\[64, 24\], expected \[64, 25\]"), loaded(made):
            pass

    def test_bounds_an_engines_sessions(self, path: Path) -> None:
        with ggml_engine.Engine.load(path, ctx=CAPACITY, threads=1) as engine:
            session = engine.session()
            assert session.limit == LIMIT
            with pytest.raises(ContextLengthError) as refusal:
                engine.generate(TOKENS)
            assert (refusal.value.requested, refusal.value.limit) == (LIMIT + 1, LIMIT)
            generation = session.generate(TOKENS[:20], ggml_engine.GenConfig(ignore_eos=True), max_tokens=40)
            generation.wait()
            assert generation.reason is ggml_engine.Reason.LENGTH
            assert session.position == LIMIT


def test_positions_that_no_layer_asks_for_are_left_out(tmp_path: Path) -> None:
    # one layer that does not rotate: the tokens before the last are a set
    sizes = {"block_count": 1, "attention.sliding_window_pattern": 1}
    made = write_model(changed("cohere2", sizes), tmp_path / "cohere2.gguf")
    with running(made, capacity=64, run=4) as executor:
        found = [
            feed(executor, executor.open(), [*order, 9])[-1] for order in ([5, 6, 7, 8], [8, 6, 5, 7], [5, 6, 6, 8])
        ]
    np.testing.assert_allclose(found[0], found[1], atol=1e-2)
    assert np.abs(found[0] - found[2]).max() > 0.1
