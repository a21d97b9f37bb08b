"""The tokenizer's tables are checked without libllama; what can be repaired is, with a warning."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vocab_files import bpe, replaced, spm, write

from ggml_engine.errors import VocabularyError
from ggml_engine.ggml.gguf import GGUFFile, GGUFType
from ggml_engine.ggml.vocab_tables import BYTE, NORMAL, Tables, _array_head, read_tables

N = len(spm()["tokens"])


def tables(path: Path, parts: dict[str, Any], n_rows: int | None = None) -> Tables:
    with GGUFFile.open(write(path / "v.gguf", parts, n_rows=n_rows)) as file:
        read = read_tables(file)
        (path / "made.gguf").write_bytes(b"".join(read.gguf))
        return read


REFUSED = {
    "no tokens": (spm(tokens=None), "tokens: is missing"),
    "tokens are numbers": (spm(tokens=np.arange(5, dtype="u4")), "array of STRING"),
    "tokens are a text": (spm(tokens="x"), "array of STRING"),
    "scores short": (spm(scores=spm()["scores"][:-1]), f"{N - 1} elements for {N} tokens"),
    "scores u8": (spm(scores=np.zeros(N, "u1")), "UINT8"),
    "scores not finite": (replaced(spm(), "scores", {5: float("nan")}), "NaN"),
    "types short": (spm(types=spm()["types"][:-1]), f"{N - 1} elements for {N} tokens"),
    "types u8": (spm(types=np.array(spm()["types"], "u1")), "UINT8"),
    "unknown model": (spm(model="x"), "supported are gemma4, gpt2, llama"),
    "model not used": (spm(model="bert"), "not used by this engine"),
    "no model": (spm(model=None), "model: is missing"),
    "unknown pre": (bpe(pre="x"), "known are .*smollm"),
    "no merges": (bpe(merges=None), "merges is missing"),
    "long token": (replaced(spm(), "tokens", {-1: b"a" * 2**20}), "1048576 bytes"),
    "id of a wrong type": (spm(bos="x"), "must be an integer"),
    "flag of a wrong type": (spm(add_bos="yes"), "must be a bool"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_unusable_table_is_a_vocabulary_error(name: str, tmp_path: Path) -> None:
    parts, reason = REFUSED[name]
    with pytest.raises(VocabularyError, match=reason):
        tables(tmp_path, parts)


def test_an_empty_token_list_is_a_vocabulary_error(tmp_path: Path) -> None:
    path = write(tmp_path / "v.gguf", spm(tokens=["x"]))
    head = _array_head("tokenizer.ggml.tokens", GGUFType.STRING, 1)
    data = path.read_bytes().replace(head + b"\1\0\0\0\0\0\0\0x", head[:-8] + bytes(8))
    path.write_bytes(data)
    with GGUFFile.open(path) as file, pytest.raises(VocabularyError, match="tokens is empty"):
        read_tables(file)


def test_fewer_embedding_rows_than_tokens_are_refused_and_more_are_padding(tmp_path: Path) -> None:
    with pytest.raises(VocabularyError, match=f"{N} tokens.*{N - 1} rows"):
        tables(tmp_path, spm(), n_rows=N - 1)
    assert tables(tmp_path, spm(), n_rows=N + 58).n_rows == N + 58
    assert tables(tmp_path, spm()).n_rows == N


def test_a_clean_vocabulary_has_no_warnings_and_keeps_its_bytes(tmp_path: Path) -> None:
    for parts in (spm(), bpe()):
        read = tables(tmp_path, parts)
        assert read.warnings == ()
        assert read.pieces == {}
        with GGUFFile.open(tmp_path / "made.gguf") as made:
            assert made.metadata.array("tokenizer.ggml.tokens").strings() == parts["tokens"]
            assert made.metadata.array("tokenizer.ggml.token_type").numpy().tolist() == parts["types"]


def test_later_equal_tokens_are_renamed_and_keep_their_bytes(tmp_path: Path) -> None:
    read = tables(tmp_path, replaced(spm(), "tokens", {-4: "▁hello".encode(), -3: b"", -1: b"\xff[273]"}))
    assert len(read.warnings) == 1
    assert read.pieces == {N - 4: b" hello", N - 3: b""}
    with GGUFFile.open(tmp_path / "made.gguf") as made:
        texts = made.metadata.array("tokenizer.ggml.tokens").strings()
    assert len(set(texts)) == len(texts) == N
    assert texts[259 + 12] == "▁hello".encode()
    assert not any(text.decode("utf-8", "ignore").encode() == text for text in (texts[-4], texts[-3]))


@pytest.mark.parametrize("value", [-1, N, 2**31, 2**32 - 1])
def test_special_ids_out_of_range_are_left_out(value: int, tmp_path: Path) -> None:
    read = tables(tmp_path, spm(bos=value, eos=value, unknown=value, padding=value, eot=value))
    assert read.special == {}
    assert read.dropped == {"bos", "eos", "unknown", "padding", "eot"}
    assert len(read.warnings) == 5
    with GGUFFile.open(tmp_path / "made.gguf") as made:
        assert not [key for key in made.metadata if key.endswith("_token_id")]


def test_unknown_types_and_malformed_byte_tokens_become_normal(tmp_path: Path) -> None:
    parts = replaced(replaced(spm(), "types", {-1: 99}), "tokens", {3: b"<0x-1>", 4: b"<0xZZ>", 5: b"<"})
    read = tables(tmp_path, parts)
    assert [read.types[i] for i in (N - 1, 3, 4, 5, 6)] == [NORMAL] * 4 + [BYTE]
    assert read.n_added == 3
    assert len(read.warnings) == 3


def test_merges_without_a_pair_are_left_out(tmp_path: Path) -> None:
    read = tables(tmp_path, bpe(merges=["he", " x", "h e", "", "foo bar", " " * 33, ""]))
    assert len(read.warnings) == 1
    with GGUFFile.open(tmp_path / "made.gguf") as made:
        assert made.metadata.array("tokenizer.ggml.merges").strings() == [b"h e", b"foo bar", b" " * 33]
