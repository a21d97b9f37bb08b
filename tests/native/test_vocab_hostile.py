"""No vocabulary kills the process: what libllama would die of never reaches it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from vocab_files import LOAD_AND_USE, bpe, in_child, replaced, spm, write

from ggml_engine.errors import InputError
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.vocab import Vocabulary
from ggml_engine.ggml.vocab_tables import PRE_TOKENIZERS

N, M = len(spm()["tokens"]), len(bpe()["tokens"])
WORDS_ONLY: dict[str, Any] = {name: spm()[name][:3] + spm()[name][259:] for name in ("tokens", "types", "scores")}

HOSTILE: dict[str, dict[str, Any]] = {
    "spm": spm(),
    "bpe": bpe(),
    "duplicates": replaced(spm(), "tokens", {-5: b"<unk>", -4: b"hello", -3: b"", -2: b"</s>", -1: b""}),
    "bpe duplicates": replaced(bpe(), "tokens", {-4: b"h", -3: b"", -1: b"<|endoftext|>"}),
    "duplicate of a name that is made": replaced(spm(), "tokens", {-2: b"\xff[%d]" % (N - 1), -1: b"hello"}),
    "empty beside the name that libllama makes": replaced(spm(), "tokens", {-2: b"[EMPTY_%d]" % (N - 1), -1: b""}),
    "all equal": spm(tokens=[b"a"] * N),
    "no scores": spm(scores=None),
    "no types": spm(types=None),
    "type 99": replaced(spm(), "types", {-1: 99, -2: -5}),
    "all control": spm(types=[3] * N),
    "all byte": spm(types=[6] * N),
    "bpe all byte": bpe(types=[6] * M),
    "no byte tokens": spm(**WORDS_ONLY),
    "no byte tokens, no unknown": spm(**WORDS_ONLY, unknown=None),
    "bad byte tokens": replaced(spm(), "tokens", {3: b"<0x-1>", 4: b"<0xZZ>", 5: b"<", 6: b"<0x"}),
    "bpe without ids": bpe(bos=None, eos=None, add_bos=True, add_eos=True),
    "one token": spm(tokens=[b"a"], types=[1], scores=[0.0]),
    "one bpe token": bpe(tokens=[b"a"], types=[1]),
    "no pre": bpe(pre=None),
    "merges of nothing": bpe(merges=["", " ", "he", "h e", "  "]),
    "merges of unknown tokens": bpe(merges=["foo bar", "h q"]),
    "long token": replaced(spm(), "tokens", {-1: b"a" * 65_536}),
    "NUL in a token": replaced(spm(), "tokens", {-1: b"a\0b"}),
    "no UTF-8": replaced(spm(), "tokens", {-1: b"\xff\xfe"}),
    "bpe no UTF-8": replaced(bpe(), "tokens", {-1: b"\xff\xfe"}),
    "suppressed out of range": spm(suppress_tokens=np.array([3, 99_999, -1], "i4")),
    "phi-3 without its tokens": spm(**{"general.name": "phi-3"}),
    "adds both ends": spm(add_eos=True),
    "huge scores": spm(scores=[3e38] * N),
}
for _value in (-1, N, 2**31, 2**32 - 1):
    HOSTILE[f"ids {_value}"] = spm(bos=_value, eos=_value, unknown=_value, padding=_value, eot=_value, fim_pad=_value)
    HOSTILE[f"bpe ids {_value}"] = bpe(bos=_value, eos=_value, add_bos=True, add_eos=True)
for _pre in sorted(PRE_TOKENIZERS):
    HOSTILE[f"pre {_pre}"] = bpe(pre=_pre)


def test_no_hostile_vocabulary_kills_the_process(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.gguf", parts) for name, parts in HOSTILE.items()]
    child = in_child(LOAD_AND_USE, *paths, timeout_s=240)
    lines = child.stdout.splitlines()
    assert child.returncode == 0, (child.returncode, lines[-1:], child.stderr[-500:])
    assert len(lines) == len(paths)
    refused = [line for line in lines if "Error" in line]
    # without byte tokens and without an unknown one, some texts have no tokens
    assert [Path(line.partition(".gguf")[0]).name for line in refused] == ["no byte tokens, no unknown"]


def test_no_long_run_kills_the_process(tmp_path: Path) -> None:
    names = ("default", "deepseek-llm", "gpt-4o", "viking", "superbpe", "whitespace", "gpt-2")
    code = LOAD_AND_USE.replace("2_000", "120_000")
    child = in_child(code, *(write(tmp_path / f"{name}.gguf", bpe(pre=name)) for name in names), timeout_s=240)
    assert child.returncode == 0, (child.returncode, child.stdout.splitlines()[-1:])
    assert child.stdout.count("loaded 0") == len(names)


def load(path: Path, parts: dict[str, Any]) -> Vocabulary:
    with GGUFFile.open(write(path / "v.gguf", parts)) as file:
        return Vocabulary.load(file)


def test_a_renamed_token_decodes_to_its_bytes_and_is_never_produced(tmp_path: Path) -> None:
    vocabulary = load(tmp_path, replaced(spm(), "tokens", {-4: "▁hello".encode()}))
    assert vocabulary.piece(N - 4) == b" hello"
    assert vocabulary.text(N - 4) == "▁hello"
    assert vocabulary.encode("hello", add_special=False, parse_special=False).tolist() == [259 + 12]
    assert vocabulary.warnings


def test_ids_out_of_range_are_none(tmp_path: Path) -> None:
    vocabulary = load(tmp_path, bpe(bos=10**6, eos=10**6, add_bos=True, add_eos=True))
    assert (vocabulary.bos, vocabulary.eos, vocabulary.adds_bos, vocabulary.adds_eos) == (None, None, False, False)
    assert vocabulary.end_tokens == {M - 2}  # <|endoftext|>, by its text; not libllama's default, token 11
    assert vocabulary.encode("a", add_special=True, parse_special=False).tolist() == [ord("a") - ord("a") + 0x61]


def test_a_bos_out_of_range_is_not_replaced_by_libllamas_guess(tmp_path: Path) -> None:
    vocabulary = load(tmp_path, spm(bos=10**6, eos=2**32 - 1))
    assert (vocabulary.bos, vocabulary.eos, vocabulary.adds_bos) == (None, None, False)
    assert load(tmp_path, spm(bos=None, eos=None)).bos == 1


def test_bytes_without_a_token_become_unknown(tmp_path: Path) -> None:
    vocabulary = load(tmp_path, spm(**WORDS_ONLY))
    ids = vocabulary.encode("hello é", add_special=False, parse_special=False)
    assert ids.max() < vocabulary.n_tokens
    assert ids.tolist()[-2:] == [0, 0]
    with pytest.raises(InputError, match="no token for"):
        load(tmp_path, spm(**WORDS_ONLY, unknown=None)).encode("é", add_special=False, parse_special=False)
