"""Embeddings beside libllama's on the same file, and what texts that share steps and an executor leave of each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from architecture_rows import ROWS, Row, model_file
from engines import batch_of, executor_over, feed, loaded, running
from engines import embedded as embed
from libllama_embeddings import Rows, reference_embeddings
from tiny_models import VOCAB

from ggml_engine.control.embedding import Embedding
from ggml_engine.errors import AbortedError, InputError
from ggml_engine.models.registry import ARCHITECTURES

ALLOWED_ERROR = 1e-6  # normalised mean squared
GEOMETRY: dict[str, Any] = {
    "attention": "matmul", "v_layout": "columns", "k_type": "f32", "v_type": "f32", "capacity": 512, "run": 1,
}  # fmt: skip
_RNG = np.random.default_rng(11)
TEXTS: list[list[int]] = [_RNG.integers(3, VOCAB, n).tolist() for n in (40, 1, 17, 9)]
ONE_OF_EACH = list(
    {row.architecture: row for row in reversed(ROWS.values()) if row.architecture in ARCHITECTURES}.values()
)
COMPARED = [ROWS[name] for name in ("llama", "gemma3", "qwen3")]


def names(rows: Sequence[Row]) -> list[str]:
    return [row.name for row in rows]


def error(found: Rows, expected: Rows) -> float:
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype == np.float32
    return float(np.square(found.astype(np.float64) - expected).sum() / np.square(expected.astype(np.float64)).sum())


@pytest.mark.parametrize("row", ONE_OF_EACH, ids=names(ONE_OF_EACH))
def test_hidden_states_of_every_architecture_are_libllamas(row: Row) -> None:
    path = model_file(row.name)
    expected = np.concatenate(reference_embeddings(path, TEXTS, "none"))
    with running(path, **GEOMETRY) as executor:
        batch = batch_of([(executor.open(), text) for text in TEXTS])
        found = executor.forward_hidden(batch)
    assert np.isfinite(expected).all()
    assert expected.std() > 0.5, "flat states would hide mistakes"
    if row.tolerance:
        assert error(found, expected) < ALLOWED_ERROR
    else:
        assert found.tobytes() == expected.tobytes(), f"differs by {error(found, expected)}"


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
@pytest.mark.parametrize("row", COMPARED, ids=names(COMPARED))
def test_pooled_embeddings_are_libllamas(row: Row, pooling: str) -> None:
    """But for rounding: libllama averages in f32, and multiplies all tokens where we take only those that count."""
    path = model_file(row.name)
    expected = np.stack(reference_embeddings(path, TEXTS, pooling))
    with running(path, **GEOMETRY) as executor:
        found = embed(executor, TEXTS, pooling)
    assert error(found, expected) < ALLOWED_ERROR
    assert error(found[::-1].copy(), expected) > 0.1, "the texts' embeddings are too much alike"


@pytest.mark.parametrize("pooling", ["mean", "last", "cls", "none"])
def test_long_texts_in_pieces_are_texts_at_once(pooling: str) -> None:
    path = model_file("gemma3")
    with loaded(path, threads=1) as model:
        with executor_over(model, **GEOMETRY) as executor:
            expected = [np.atleast_2d(embed(executor, [text], pooling)[0]) for text in TEXTS]
        with executor_over(model, **GEOMETRY, max_batch_tokens=7) as executor:
            found = embed(executor, TEXTS, pooling)
            assert executor.free_cells == executor.capacity
    for ours, theirs in zip(found, expected, strict=True):
        assert error(np.atleast_2d(ours), theirs) < ALLOWED_ERROR


def test_rows_of_length_one_point_where_the_others_do() -> None:
    with running(model_file("llama"), **GEOMETRY) as executor:
        for pooling in ("mean", "none"):
            plain = np.concatenate([np.atleast_2d(rows) for rows in embed(executor, TEXTS, pooling)])
            unit = np.concatenate([np.atleast_2d(rows) for rows in embed(executor, TEXTS, pooling, normalize=True)])
            length = np.linalg.norm(plain, axis=1, keepdims=True)
            assert np.abs(length - 1).max() > 0.5
            assert np.abs(unit - plain / length).max() < 1e-6


def test_texts_that_have_no_room_beside_each_other_come_one_after_the_other() -> None:
    """Runs of 16 cells: four texts of few tokens take more than there are, and a sequence is in the way."""
    with running(model_file("llama"), **{**GEOMETRY, "run": 16, "capacity": 64}) as executor:
        held = executor.open()
        feed(executor, held, TEXTS[2])
        before = feed(executor, held, [5])
        expected = [embed(executor, [text], "mean")[0] for text in TEXTS[1:]]
        found = embed(executor, TEXTS[1:], "mean")
        assert error(found, np.stack(expected)) < ALLOWED_ERROR
        assert list(executor.cache.open_sequences) == [held]
        executor.rewind(held, len(TEXTS[2]))
        assert feed(executor, held, [5]).tobytes() == before.tobytes()


def test_graphs_of_logits_and_of_hidden_states_are_kept_apart() -> None:
    with running(model_file("llama"), **GEOMETRY) as executor:
        widths = []
        for forward in (executor.forward, executor.forward_hidden, executor.forward, executor.forward_hidden):
            sequence = executor.open()
            widths.append(forward(batch_of([(sequence, TEXTS[3])])).shape)
            executor.close(sequence)
        assert widths == [(9, VOCAB), (9, 64)] * 2
        assert (executor.graphs.n_built, executor.graphs.n_reused) == (2, 2)


def test_what_cannot_be_embedded_is_refused() -> None:
    with pytest.raises(InputError, match="no texts"):
        Embedding([], "mean")
    with pytest.raises(InputError, match="text 1 has no tokens"):
        Embedding([np.array([5], np.int32), np.array([], np.int32)], "mean")


def test_a_step_that_fails_leaves_no_sequence() -> None:
    with running(model_file("llama"), **GEOMETRY, max_batch_tokens=16) as executor:
        work = Embedding([np.array(text, np.int32) for text in TEXTS], "mean", normalize=False)
        assert work.step(executor)
        executor.abort()
        with pytest.raises(AbortedError):
            work.step(executor)
        assert executor.free_cells == executor.capacity
        executor.clear_abort()
        while work.step(executor):
            pass
        assert error(work.result(), embed(executor, TEXTS, "mean")) < ALLOWED_ERROR  # type: ignore[arg-type]
