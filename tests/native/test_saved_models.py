"""The makers of tiny models: what libllama says it cannot make, what is dropped, and that models are worth comparing."""

from __future__ import annotations

import importlib
import re
from contextlib import closing
from pathlib import Path

import gguf
import numpy as np
import pytest
from architecture_rows import ROWS, WINDOW, Row, model_file
from libllama import Oracle
from saved_models import MakerError, SavedModel, write_model
from tiny_models import VOCAB

from ggml_engine.ggml import library
from ggml_engine.models.registry import ARCHITECTURES

TOKENS: list[int] = np.random.default_rng(3).integers(3, VOCAB, 48).tolist()
# Those with a graph are run by test_architectures, which asks the same of their logits.
BEYOND = [row for row in ROWS.values() if row.architecture not in ARCHITECTURES and row.memory != "none"]


@pytest.mark.parametrize("row", BEYOND, ids=[row.name for row in BEYOND])
def test_libllama_runs_the_model_and_its_logits_depend_on_the_tokens(row: Row) -> None:
    changed = list(TOKENS)
    changed[5] = changed[5] % 300 + 7
    with Oracle(model_file(row.name)) as oracle:
        logits = oracle.forward(TOKENS)
        other = oracle.forward(changed)
    assert np.isfinite(logits).all()
    assert logits.std() > 0.5
    assert np.abs(np.diff(logits, axis=0)).mean() > 0.25 * logits.std()
    assert logits[:5].tobytes() == other[:5].tobytes()
    assert np.abs(logits - other)[5 : 5 + WINDOW].mean(axis=1).min() > 0.02 * logits.std()


def test_libllama_embeds_with_the_encoder() -> None:
    llama_cpp = importlib.import_module("llama_cpp")
    library.restore_log()
    found = []
    with closing(llama_cpp.Llama(str(model_file("bert")), embedding=True, n_threads=1, verbose=False)) as encoder:
        for text in ("the cat", "the dog"):
            found.append(np.asarray(encoder.embed(text)))
    assert found[0].shape == (64,)
    assert np.isfinite(found).all()
    assert np.abs(found[0] - found[1]).max() > 0.1 * found[0].std()


def tensors(path: Path) -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def test_optional_tensors_are_made_unless_they_are_dropped() -> None:
    plain = tensors(model_file("llama"))
    full = tensors(model_file("llama tied, biases, frequency factors"))
    optional = {"rope_freqs.weight", "blk.0.attn_q.bias", "blk.3.ffn_down.bias", "blk.1.attn_output.bias"}
    assert optional <= set(full)
    assert not optional & set(plain)
    assert ("output.weight" in plain, "output.weight" in full) == (True, False)
    assert not [name for name in full if re.search(r"scale", name)]


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    model = ROWS["gemma3"].model
    again = write_model(model, tmp_path / "again.gguf").read_bytes()
    assert again == model_file("gemma3").read_bytes()


def test_matrices_are_stored_in_the_types_asked_for_where_rows_allow() -> None:
    found = {name: tensor.tensor_type.name for name, tensor in tensors(model_file("llama heads of 32, q4_0")).items()}
    assert found["blk.0.attn_q.weight"] == found["token_embd.weight"] == "Q4_0"
    assert found["blk.0.attn_norm.weight"] == "F32"
    found = {name: tensor.tensor_type.name for name, tensor in tensors(model_file("gpt-oss mxfp4")).items()}
    assert found["blk.0.ffn_up_exps.weight"] == "MXFP4"
    assert found["blk.0.attn_q.weight"] == "F32"


def test_fused_weights_are_the_rows_of_q_k_and_v() -> None:
    found = tensors(model_file("gpt2"))
    assert tuple(found["blk.0.attn_qkv.weight"].data.shape) == (3 * 64, 64)
    assert tuple(found["blk.0.attn_qkv.bias"].data.shape) == (3 * 64,)
    assert "blk.0.attn_q.weight" not in found


def test_what_libllama_cannot_make_is_an_error_and_not_the_end_of_the_process(tmp_path: Path) -> None:
    ends = SavedModel("llama", {**ROWS["llama"].model.metadata, "block_count": 0})  # an assertion of libllama
    refuses = SavedModel("llama", {})  # an exception
    for model in (ends, refuses):
        with pytest.raises(MakerError, match="libllama makes no llama"):
            write_model(model, tmp_path / "no.gguf")
    assert not list(tmp_path.glob("*.gguf"))


@pytest.mark.parametrize("name", ["llama yarn", "gemma3"])
def test_the_file_of_libllamas_saver_is_the_same_model(name: str, tmp_path: Path) -> None:
    model = ROWS[name].model
    everything = SavedModel(model.architecture, model.metadata, keep=(r"scale",))
    written = write_model(everything, tmp_path / "ours.gguf")
    saved = write_model(everything, tmp_path / "saved.gguf", saver=True)
    found = []
    for path in (written, saved):
        with Oracle(path) as oracle:
            found.append(oracle.forward(TOKENS))
    assert found[0].tobytes() == found[1].tobytes()
