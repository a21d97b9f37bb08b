"""The two oracles of the suite agree with each other, so that a later disagreement blames the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from libllama import Oracle, reference_logits
from naive import NaiveModel
from tiny_models import F16, Q8_0, VOCAB, write_gemma3, write_llama

TOKENS = np.random.default_rng(3).integers(3, VOCAB, 40).tolist()

# All f32: what remains is the order of float32 sums (1e-5 measured over two layers).
PLAIN = 1e-4
# ggml looks GELU up in a table over f16, so that a last bit of float32 may step to the next entry (4e-3 measured).
GELU_TABLE = 2e-2
# With flash attention libllama rounds f32 keys, values and queries to f16 (3e-2 measured at 62 layers).
FLASH = 1e-1

LLAMAS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "one head a group": {"n_head_kv": 4},
    "tied embeddings": {"tied": True},
    "frequency factors": {"rope_factors": [1, 1, 2, 2, 4, 4, 8, 8]},
    "linear scaling": {"metadata": {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}},
    "wide heads": {"head_size": 32, "n_layer": 1},
}
GEMMAS: dict[str, dict[str, Any]] = {
    "window 1": {"window": 1},
    "window 3": {"window": 3},
    "window 5": {"window": 5},
    "no window": {"window": 0},
    "window longer than the text": {"window": 100},
    "every second layer full": {"window": 3, "pattern": 2, "n_layer": 4},
    "a pattern of flags": {"window": 3, "pattern": [True, False, False], "n_layer": 3},
    "another local base": {"window": 3, "rope_base_swa": 500.0},
    "scaled full layers": {"window": 3, "rope_scale": 8.0},
    "capped logits": {"window": 3, "softcap": 5.0},
    "own output matrix": {"window": 3, "tied": False},
    "the 27B's attention scale": {"window": 3, "n_layer": 62, "n_ff": 32},
}


def largest_difference(path: Path, *, flash: bool = False) -> float:
    expected = NaiveModel(path).logits(TOKENS)
    found = reference_logits(path, TOKENS, flash=flash)
    assert expected.std() > 1, "flat logits would hide mistakes"
    return float(np.abs(expected - found).max())


@pytest.mark.parametrize("options", LLAMAS.values(), ids=LLAMAS)
def test_a_llama_by_definition_agrees_with_libllama(tmp_path: Path, options: dict[str, Any]) -> None:
    path = write_llama(tmp_path / "tiny.gguf", **options)
    assert largest_difference(path) < PLAIN
    assert largest_difference(path, flash=True) < FLASH


@pytest.mark.parametrize("options", GEMMAS.values(), ids=GEMMAS)
def test_a_gemma_by_definition_agrees_with_libllama(tmp_path: Path, options: dict[str, Any]) -> None:
    path = write_gemma3(tmp_path / "tiny.gguf", **options)
    assert largest_difference(path) < GELU_TABLE
    assert largest_difference(path, flash=True) < FLASH


@pytest.mark.parametrize(
    ("write", "changes"),
    [
        (write_llama, {"rope_base": 9000.0}),
        (write_llama, {"rope_factors": [1.0] * 7 + [2.0]}),
        (write_llama, {"eps": 1e-2}),
        (write_gemma3, {"window": 4}),
        (write_gemma3, {"rope_base_swa": 2000.0}),
        (write_gemma3, {"rope_base": 5e5}),
        (write_gemma3, {"pattern": 5}),
        (write_gemma3, {"softcap": 30.0}),
    ],
)
def test_the_bound_tells_a_slightly_different_model(
    tmp_path: Path, write: Callable[..., Path], changes: dict[str, Any]
) -> None:
    expected = NaiveModel(write(tmp_path / "one.gguf")).logits(TOKENS)
    found = reference_logits(write(tmp_path / "other.gguf", **changes), TOKENS)
    bound = PLAIN if write is write_llama else GELU_TABLE
    assert np.abs(expected - found).max() > 3 * bound


@pytest.mark.parametrize("write", [write_llama, write_gemma3])
def test_equal_arguments_write_equal_files_and_another_seed_another(tmp_path: Path, write: Callable[..., Path]) -> None:
    first = write(tmp_path / "a.gguf", seed=5).read_bytes()
    assert write(tmp_path / "b.gguf", seed=5).read_bytes() == first
    assert write(tmp_path / "c.gguf", seed=6).read_bytes() != first


@pytest.mark.parametrize("types", [F16, Q8_0])
def test_matrices_of_another_type_load_and_stay_close(tmp_path: Path, types: Any) -> None:
    path = write_llama(tmp_path / "tiny.gguf", types=types)
    expected = NaiveModel(path).logits(TOKENS)
    # the kernels round their activations to the type's partner (f16, q8_0); 0.1 and less measured
    assert np.abs(expected - reference_logits(path, TOKENS)).max() < 0.5


def test_the_reference_continues_rewinds_and_gives_the_last_row(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf")
    whole = reference_logits(path, TOKENS)
    with Oracle(path) as oracle:
        oracle.forward(TOKENS[:25])
        rest = oracle.forward(TOKENS[25:], 25)
        again = oracle.forward(TOKENS[30:], 30)
        last = oracle.forward(TOKENS[39:], 39, all_logits=False)
    assert np.abs(rest - whole[25:]).max() < PLAIN
    assert np.abs(again - whole[30:]).max() < PLAIN
    assert last.shape == (VOCAB,)
    assert np.abs(last - whole[39]).max() < PLAIN


def test_the_tiny_vocabulary_reads_and_writes_text(tmp_path: Path) -> None:
    with Oracle(write_llama(tmp_path / "tiny.gguf")) as oracle:
        tokens = oracle.tokenize("the hat é")
        assert tokens[0] == 1
        assert b"".join(oracle.piece(token) for token in tokens).decode() == " the hat é"
        assert oracle.n_vocab == VOCAB
