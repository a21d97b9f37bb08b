"""Encoders, and decoders in libllama's own context, give libllama's embeddings; nothing of a text stays for the next."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architecture_rows import ROWS, model_file
from forged_models import set_key, taken_apart
from libllama_embeddings import reference_embeddings
from tiny_models import VOCAB

from ggml_engine import (
    ClosedError,
    ContextLengthError,
    Engine,
    GenConfig,
    InputError,
    OptionError,
    SamplerConfig,
    UnsupportedArchitectureError,
)
from ggml_engine.executor.encoder import Encoder
from ggml_engine.ggml import library

_RNG = np.random.default_rng(11)
TEXTS: list[list[int]] = [_RNG.integers(3, VOCAB, n).tolist() for n in (40, 1, 17, 9)]
GREEDY = GenConfig(max_tokens=6, sampler=SamplerConfig(temperature=0.0))
BESIDE = ("llama", "mamba", "lfm2", "qwen35")  # memories of every kind


@pytest.fixture(scope="module")
def encoder() -> Iterator[Encoder]:
    with Encoder.load(model_file("bert"), threads=1) as encoder:
        yield encoder


def error(found: Any, expected: Any) -> float:
    assert found.shape == expected.shape
    return float(np.square(found - expected).sum() / np.square(expected).sum())


@pytest.mark.parametrize("pooling", ["mean", "last", "cls", "none"])
def test_an_encoders_embeddings_are_libllamas(encoder: Encoder, pooling: Any) -> None:
    expected = reference_embeddings(model_file("bert"), TEXTS, pooling, flash=True)
    found = encoder.embed(TEXTS, pooling, normalize=False)
    for ours, theirs in zip(found, expected, strict=True):
        if pooling == "mean":  # libllama adds in f32
            assert error(ours, theirs) < 1e-12
        else:
            assert ours.tobytes() == theirs.tobytes()


def test_a_text_is_the_same_in_any_company_and_order(encoder: Encoder) -> None:
    together = encoder.embed(TEXTS, "mean")
    turned = encoder.embed(TEXTS[::-1], "mean")
    alone = np.concatenate([encoder.embed([text], "mean") for text in TEXTS])
    assert isinstance(together, np.ndarray)
    assert error(np.asarray(turned)[::-1], together) < 1e-6
    assert error(alone, together) < 1e-6
    assert np.abs(np.linalg.norm(together, axis=1) - 1).max() < 1e-6
    assert error(together[1:], together[:-1]) > 0.05, "the texts' embeddings are too much alike"


def test_text_is_embedded_as_its_tokens(encoder: Encoder) -> None:
    ids = encoder.model.tokenize("the cat")
    llama_cpp = importlib.import_module("llama_cpp")
    library.restore_log()
    with closing(llama_cpp.Llama(str(model_file("bert")), vocab_only=True, verbose=False)) as theirs:
        assert ids.tolist() == theirs.tokenize(b"the cat")
    assert np.asarray(encoder.embed(["the cat"])).tobytes() == np.asarray(encoder.embed([ids.tolist()])).tobytes()


def test_many_texts_take_several_forwards(encoder: Encoder) -> None:
    many = [TEXTS[2]] * 100  # more than sequences, and more tokens than a forward has
    found = np.asarray(encoder.embed([*many, TEXTS[0]], "mean"))
    assert found.shape == (101, 64)
    assert error(found[1:100], np.repeat(found[:1], 99, axis=0)) < 1e-6
    assert error(found[100:], np.asarray(encoder.embed(TEXTS[:1], "mean"))) < 1e-6


def test_longer_texts_than_the_first_context_takes(tmp_path: Path) -> None:
    forge = taken_apart(model_file("bert"))
    table = next(tensor for tensor in forge.tensors if tensor.name == "position_embd.weight")
    table.shape, table.data = (64, 1024), bytes(table.data) * 2
    set_key(forge, "bert.context_length", 1024)
    path = forge.write(tmp_path / "long.gguf")
    long = _RNG.integers(3, VOCAB, 700).tolist()
    with Encoder.load(path, threads=1) as encoder:
        alone = np.asarray(encoder.embed([TEXTS[0]], "cls"))
        both = np.asarray(encoder.embed([long, TEXTS[0]], "cls"))
        assert error(both[1:], alone) < 1e-6
        with pytest.raises(ContextLengthError, match="text 0 needs 1025 tokens, the context holds 1024"):
            encoder.embed([[5] * 1025])
        assert np.asarray(encoder.embed([TEXTS[0]], "cls")).shape == (1, 64)


@pytest.mark.parametrize(
    ("texts", "pooling", "kind", "why"),
    [
        ("text", "mean", InputError, "a list of texts"),
        ([], "mean", InputError, "no texts"),
        ([[5], []], "mean", InputError, "text 1 has no tokens"),
        ([[VOCAB]], "mean", InputError, str(VOCAB)),
        (["\ud800"], "mean", InputError, "UTF-8"),
        (["a" * (1 << 20 | 1)], "mean", InputError, "1048577 bytes"),
        ([[5] * 513], "mean", ContextLengthError, "513"),
        ([[5]], "max", OptionError, "'max'"),
    ],
)
def test_what_cannot_be_embedded_is_refused(
    encoder: Encoder, texts: Any, pooling: Any, kind: type[Exception], why: str
) -> None:
    before = np.asarray(encoder.embed([[5]]))
    with pytest.raises(kind, match=why):
        encoder.embed(texts, pooling)
    assert np.asarray(encoder.embed([[5]])).tobytes() == before.tobytes()


def test_a_decoder_is_no_encoder() -> None:
    with pytest.raises(UnsupportedArchitectureError, match="is no encoder"):
        Encoder.load(model_file("llama"))


def test_a_closed_encoder_says_so() -> None:
    encoder = Encoder.load(model_file("bert"), threads=1)
    encoder.close()
    encoder.close()
    with pytest.raises(ClosedError):
        encoder.embed([[5]])


@pytest.mark.parametrize("pooling", ["mean", "last", "none"])
@pytest.mark.parametrize("name", BESIDE)
def test_decoders_in_libllama_embed_too(name: str, pooling: Any) -> None:
    """In steps of 16 tokens, with a generation before, whose logits are not disturbed."""
    expected = reference_embeddings(model_file(ROWS[name].name), TEXTS, pooling)
    with Engine.load(model_file(name), engine="llama", threads=1, ctx=256, max_batch_tokens=16) as engine:
        before = engine.generate(TEXTS[2], GREEDY)
        list(before)
        found = engine.embed(TEXTS, pooling, normalize=False)
        again = engine.generate(TEXTS[2], GREEDY)
        list(again)
        free = engine.runner().compute_async(lambda executor: executor.free_cells).result()
        assert free == engine.executor.capacity
        assert before.tokens == again.tokens
    for ours, theirs in zip(found, expected, strict=True):
        assert error(ours, theirs) < 1e-4  # K and V in f16 here
