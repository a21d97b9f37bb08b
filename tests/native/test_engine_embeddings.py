"""`Engine.embed`: pooling by the file, beside generations and snapshots, and what it refuses; the command `embed`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architecture_rows import model_file
from forged_models import set_key, taken_apart
from libllama_embeddings import reference_embeddings
from tiny_models import VOCAB

from ggml_engine import (
    ClosedError,
    ContextLengthError,
    Engine,
    GenConfig,
    HyperparameterError,
    InputError,
    OptionError,
    PoolFullError,
    SamplerConfig,
    UnsupportedArchitectureError,
    WouldBlockError,
)
from ggml_engine.cli.main import main

GREEDY = GenConfig(max_tokens=24, sampler=SamplerConfig(temperature=0.0), ignore_eos=True)
_RNG = np.random.default_rng(12)
TEXTS: list[list[int]] = [_RNG.integers(3, VOCAB, n).tolist() for n in (40, 1, 17, 9)]


@pytest.fixture
def engine() -> Iterator[Engine]:
    with Engine.load(model_file("llama"), threads=1, ctx=256) as engine:
        yield engine


def free_cells(engine: Engine) -> int:
    return engine.runner().compute_async(lambda executor: executor.free_cells).result()


def error(found: Any, expected: Any) -> float:
    assert np.shape(found) == np.shape(expected)
    return float(np.square(found - expected).sum() / np.square(expected).sum())


def with_pooling(path: Path, **options: Any) -> Path:
    forge = taken_apart(model_file("llama"))
    set_key(forge, "llama.pooling_type", **options)
    return forge.write(path)


@pytest.mark.parametrize(("number", "pooling"), [(0, "none"), (1, "mean"), (2, "cls"), (3, "last")])
def test_the_file_says_how_to_pool(tmp_path: Path, number: int, pooling: Any) -> None:
    with Engine.load(with_pooling(tmp_path / "model.gguf", value=number), threads=1, ctx=256) as engine:
        found, expected = engine.embed(TEXTS), engine.embed(TEXTS, pooling)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.tobytes() == theirs.tobytes()
        other = engine.embed(TEXTS, "last" if pooling == "mean" else "mean")
        assert np.shape(found[0]) != np.shape(other[0]) or error(found[0], other[0]) > 0.01


def test_without_a_word_of_the_file_it_is_the_mean(engine: Engine) -> None:
    found = engine.embed(TEXTS)
    assert np.asarray(found).tobytes() == np.asarray(engine.embed(TEXTS, "mean")).tobytes()
    assert np.abs(np.linalg.norm(found, axis=1) - 1).max() < 1e-6
    expected = np.stack(reference_embeddings(model_file("llama"), TEXTS, "mean"))
    assert error(engine.embed(TEXTS, normalize=False), expected) < 1e-4  # K and V in f16 here


@pytest.mark.parametrize(
    ("number", "kind", "why"),
    [(4, UnsupportedArchitectureError, "ranks"), (5, HyperparameterError, "llama.pooling_type: must be 0 to 4, is 5")],
)
def test_a_file_that_says_something_else_is_refused(tmp_path: Path, number: int, kind: Any, why: str) -> None:
    with Engine.load(with_pooling(tmp_path / "model.gguf", value=number), threads=1, ctx=256) as engine:
        with pytest.raises(kind, match=why):
            engine.embed(TEXTS)
        assert np.shape(engine.embed(TEXTS, "mean")) == (4, 64)


def test_text_is_embedded_as_its_tokens(engine: Engine) -> None:
    ids = engine.vocabulary.encode("the cat", add_special=True, parse_special=False).tolist()
    assert np.asarray(engine.embed(["the cat"])).tobytes() == np.asarray(engine.embed([ids])).tobytes()


def test_generations_and_embeddings_take_turns(engine: Engine) -> None:
    alone = engine.generate(TEXTS[0], GREEDY)
    list(alone)
    expected = engine.embed(TEXTS, "mean")
    beside = engine.generate(TEXTS[0], GREEDY)
    next(beside)
    found = engine.embed(TEXTS, "mean")
    assert beside.reason is None, "the generation had ended before"
    list(beside)
    assert beside.tokens == alone.tokens
    assert error(found, expected) < 1e-6
    assert free_cells(engine) == 256


def test_snapshots_make_room(engine: Engine) -> None:
    session = engine.session()
    session.generate([5] * 130, GenConfig(max_tokens=1)).result()
    snapshot = session.snapshot_async().result()
    session.close()
    assert free_cells(engine) < 130
    assert np.shape(engine.embed([[7] * 200])) == (1, 64)
    assert free_cells(engine) == 256
    assert snapshot is not None


def test_without_room_it_is_refused_and_nothing_is_kept(engine: Engine) -> None:
    session = engine.session()
    session.generate([5] * 130, GenConfig(max_tokens=1)).result()
    before = free_cells(engine)
    with pytest.raises(PoolFullError):
        engine.embed([[7] * 200])
    assert free_cells(engine) == before
    assert np.shape(engine.embed([[7] * 20])) == (1, 64)


@pytest.mark.parametrize(
    ("texts", "pooling", "kind", "why"),
    [
        ("text", "mean", InputError, "a list of texts"),
        ([], "mean", InputError, "no texts"),
        ([[5], []], "mean", InputError, "text 1 has no tokens"),
        ([[VOCAB]], "mean", InputError, str(VOCAB)),
        ([[5] * 257], "mean", ContextLengthError, "text 0 needs 257 tokens, the context holds 256"),
        ([[5]], "max", OptionError, "'max'"),
    ],
)
def test_what_cannot_be_embedded_is_refused(engine: Engine, texts: Any, pooling: Any, kind: Any, why: str) -> None:
    with pytest.raises(kind, match=why):
        engine.embed(texts, pooling)
    assert free_cells(engine) == 256


def test_it_does_not_wait_in_a_callback(engine: Engine) -> None:
    future = engine.runner().compute_async(lambda _: engine.embed(TEXTS))
    with pytest.raises(WouldBlockError):
        future.result()
    assert free_cells(engine) == 256


def test_a_closed_engine_embeds_nothing() -> None:
    engine = Engine.load(model_file("llama"), threads=1, ctx=256)
    engine.close()
    with pytest.raises(ClosedError):
        engine.embed(TEXTS)


def test_an_engine_that_is_closed_meanwhile_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with Engine.load(model_file("llama"), threads=1, ctx=256, max_batch_tokens=8) as engine:
        forward = engine.executor.forward_hidden
        n_calls = []

        def closing(batch: Any) -> Any:
            n_calls.append(batch.n_tokens)
            if len(n_calls) == 3:
                engine.runner()._core.stop(0)  # as `close` does from another thread
            return forward(batch)

        monkeypatch.setattr(engine.executor, "forward_hidden", closing)
        with pytest.raises(ClosedError):
            engine.embed(TEXTS)
    assert len(n_calls) == 3


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_the_command_writes_a_line_for_each_text(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", str(model_file(name)), "the cat", "the dog", "--threads", "1"]) == 0
    found = lines(capsys)
    assert [line["index"] for line in found] == [0, 1]
    rows = np.array([line["embedding"] for line in found])
    assert rows.shape == (2, 64)
    assert np.abs(np.linalg.norm(rows, axis=1) - 1).max() < 1e-6
    assert np.abs(rows[0] - rows[1]).max() > 0.01
    options = ["--pooling", "none", "--no-normalize", "--threads", "1"]
    assert main(["embed", str(model_file(name)), "the cat", *options]) == 0
    (line,) = lines(capsys)
    assert np.shape(line["embedding"])[1] == 64
    assert np.abs(np.linalg.norm(line["embedding"], axis=1) - 1).max() > 0.5


def test_the_command_needs_texts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", "no.gguf"]) == 2
    assert main(["embed", "no.gguf", "text"]) == 1
    assert "no.gguf" in capsys.readouterr().err
