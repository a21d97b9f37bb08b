"""The bound on a text's bytes is never too low: on vocabularies of each kind, whole and with what makes bytes vanish."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from vocab_files import BYTE_TOKENS, CONTROL, NORMAL, bpe, spm, write

from ggml_engine.errors import InputError
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.token_bytes import TokenBytes, token_bytes
from ggml_engine.ggml.vocab import Vocabulary

WORDS = ["hello", " hello", "world", "<s>", "<tag>", "<|user|>", "<|endoftext|>", " ", "   ", "\n", "▁", "\u20ac", "é",
         "\U00040000", "\x04", "x", "~", "h", "\u00a0", "Ġ", "<0x41>", "hell", " wo", "aaaa"]  # fmt: skip


def without(parts: dict[str, Any], *texts: str) -> dict[str, Any]:
    """The parts without some tokens."""
    kept = [i for i, text in enumerate(parts["tokens"]) if text.decode() not in texts]
    assert len(kept) == len(parts["tokens"]) - len(texts)
    return parts | {"tokens": [parts["tokens"][i] for i in kept], "types": [parts["types"][i] for i in kept]}


def raw_bpe(**changes: Any) -> dict[str, Any]:
    """A byte-pair vocabulary over the text as it is."""
    pairs = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello")]
    texts = [b"<bos>", b"<eos>", *BYTE_TOKENS, *(c.encode() for c in "helo▁"), *("".join(p).encode() for p in pairs)]
    parts = bpe(tokens=texts, types=[CONTROL, CONTROL, *[NORMAL] * (len(texts) - 2)], bos=0, eos=1)
    return parts | {"merges": [" ".join(pair) for pair in pairs], "pre": "gemma4"} | changes


def phi3() -> dict[str, Any]:
    """One whose special tokens eat the white space after them."""
    parts = spm()
    tokens = [*parts["tokens"], b"<|endoftext|>"]
    return parts | {"tokens": tokens, "types": [*parts["types"], CONTROL], "scores": [*parts["scores"], 0.0]}


def named(path: Path, parts: dict[str, Any], name: str | None) -> Path:
    """The file, with a name that libllama reads."""
    import gguf

    if name is None:
        return write(path, parts)
    original = gguf.GGUFWriter.write_header_to_file

    def write_header(self: Any, *arguments: Any, **options: Any) -> None:
        self.add_string("general.name", name)
        original(self, *arguments, **options)

    gguf.GGUFWriter.write_header_to_file = write_header
    try:
        return write(path, parts)
    finally:
        gguf.GGUFWriter.write_header_to_file = original


CASES: dict[str, tuple[dict[str, Any], TokenBytes | None]] = {
    "sentencepiece": (spm(), TokenBytes(8, b"", ("<s>",))),
    "sentencepiece without a beginning": (spm(add_bos=False), TokenBytes(8)),
    "sentencepiece whose tokens strip": (phi3(), TokenBytes(13, b" \t\n\v\f\r", ("<s>",))),
    "letters": (bpe(), TokenBytes(13)),
    "letters with some missing": (without(bpe(), "~", "Ą"), TokenBytes(13, b"\x04~")),
    "letters whose merges are no tokens": (without(bpe(), "Ġwo"), None),
    "letters and a beginning": (bpe(add_bos=True), TokenBytes(13, b"", ("<|endoftext|>",))),
    "words apart": (bpe(pre="whitespace"), None),
    "text as it is": (raw_bpe(), TokenBytes(8, b"", ("<bos>",))),
    "text as it is with bytes missing": (
        without(raw_bpe(), "<0x20>", "<0x96>", "<0x78>"),
        TokenBytes(8, b" x\x96 \t\n\v\f\r", ("<bos>",)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_bound_is_never_too_low(name: str, tmp_path: Path) -> None:
    parts, expected = CASES[name]
    path = named(tmp_path / "v.gguf", parts, "Phi-3" if "strip" in name else None)
    with GGUFFile.open(path) as file:
        vocabulary = Vocabulary.load(file)
        found = token_bytes(file, vocabulary)
    assert found == expected
    if found is None:  # a text's tokens leave something out
        text = " wo "
        assert vocabulary.decode(vocabulary.encode(text, add_special=False, parse_special=False)) != text
        return
    rng = random.Random(7)
    texts = [word * n for word in WORDS for n in (1, 7, 60)]
    texts += ["".join(rng.choices(WORDS, k=rng.randrange(1, 12))) for _ in range(600)]
    least = 1.0
    for text in texts:
        for parse_special in (True, False):
            try:
                n = len(vocabulary.encode(text, add_special=True, parse_special=parse_special))
            except InputError:
                continue
            assert found.count(text) <= n * found.longest, (text, parse_special, n)
            least = min(least, n / len(text.encode()))
    assert least < 0.3, "no text had long tokens"


def test_bytes_that_may_be_lost_do_not_count() -> None:
    known = TokenBytes(8, b"~ ", ("<s>", "<"))
    assert [known.count(text) for text in ("", "ab", "a~ b", "<s><s>ab", "<<s>a<s>", "\u20ac~")] == [0, 2, 2, 2, 4, 3]
