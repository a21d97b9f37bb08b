"""The tokenizers of the two real models agree with llama-cpp-python's."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_models import gemma3_270m, smollm2

from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.vocab import StreamDecoder, Vocabulary

TEXTS = [
    *("", " ", "  ", "\n", "\n\n\n", "\t", "\r\n", " a", "a ", "a\0b", "\0", "\ufeffx", "\u200b", "\u2028x", "x\u00a0y"),
    "Hello, world! It's 1234567890 o'clock; I'll don't we've",
    "日本語のテキスト。中文字符，繁體字！한국어 텍스트",
    "😀😃👨‍👩‍👧‍👦🏳️‍🌈🇩🇪👍🏽",
    "Ελληνικά кириллица עברית العربية हिन्दी ไทย ქართული 𝔘𝔫𝔦𝔠𝔬𝔡𝔢 é é",
    "def f(x):\n    return x**2  # comment\n\n\n\n\tfoo\r\n",
    "<|im_start|>user\nhi<|im_end|>\n<bos><start_of_turn>user\nhi<end_of_turn>\n</s><eos><unk><pad>",
    "<|im_start", "im_start|>", "<<|im_end|>>", "<table><td>x</td></table>", "▁▁ ▁", "<0x41><0x0A>", "[multimodal]",
    "Ġhello Ċ ĉ", "a" * 3000, " " * 3000, "." * 3000, "ab " * 2000, "\n" * 500, "0" * 500, "\U0010ffff\ue000\ufffd",
    "The quick brown fox jumps over the lazy dog. " * 20,
]  # fmt: skip


class Reference:
    """llama-cpp-python's tokenizer over the model's own file."""

    def __init__(self, path: Path) -> None:
        import llama_cpp

        from ggml_engine.ggml.library import restore_log

        self.api: Any = llama_cpp
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), params)
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        restore_log()

    def encode(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        data = text.encode()
        found = (ctypes.c_int32 * (len(data) + 8))()
        n = self.api.llama_tokenize(self.vocab, data, len(data), found, len(found), add_special, parse_special)
        return list(found[:n])


@pytest.fixture(scope="module", params=[smollm2, gemma3_270m], ids=["S", "G"])
def both(request: pytest.FixtureRequest) -> Iterator[tuple[Vocabulary, Reference]]:
    path = request.param()
    with GGUFFile.open(path) as file:
        vocabulary = Vocabulary.load(file)
    reference = Reference(path)
    yield vocabulary, reference
    reference.api.llama_model_free(reference.model)


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_tokens_equal_llama_cpps(both: tuple[Vocabulary, Reference], text: str) -> None:
    vocabulary, reference = both
    for parse_special in (False, True):
        ids = vocabulary.encode(text, add_special=False, parse_special=parse_special)
        assert ids.tolist() == reference.encode(text, False, parse_special)
    if not text.startswith("<bos>"):
        assert vocabulary.encode(text, add_special=True, parse_special=True).tolist() == reference.encode(
            text, True, True
        )


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_text_comes_back_whole_and_in_pieces(both: tuple[Vocabulary, Reference], text: str) -> None:
    vocabulary, _ = both
    ids = vocabulary.encode(text, add_special=True, parse_special=False).tolist()
    stream = StreamDecoder(vocabulary)
    pieces = [stream.push(token) for token in ids]
    if vocabulary.tokenizer == "llama":
        text = text.replace("▁", " ")  # its sign for a space
    assert vocabulary.decode(ids) == "".join(pieces) == text
    assert stream.finish() == ""


def test_every_piece_equals_llama_cpps(both: tuple[Vocabulary, Reference]) -> None:
    vocabulary, reference = both
    buffer = ctypes.create_string_buffer(512)
    for token in range(0, vocabulary.n_tokens, 7):
        n = reference.api.llama_token_to_piece(reference.vocab, token, buffer, 512, 0, False)
        assert vocabulary.piece(token) == buffer.raw[:n]


def test_end_tokens_are_all_that_libllama_knows(both: tuple[Vocabulary, Reference]) -> None:
    vocabulary, reference = both
    is_end = reference.api.llama_vocab_is_eog
    assert vocabulary.end_tokens == {t for t in range(vocabulary.n_tokens) if is_end(reference.vocab, t)}


def test_s_adds_no_bos_and_g_exactly_one() -> None:
    for path, bos in ((smollm2(), None), (gemma3_270m(), 2)):
        with GGUFFile.open(path) as file:
            vocabulary = Vocabulary.load(file)
        for text in ("Hi", "<bos>Hi", "<bos><bos>Hi", ""):
            ids = vocabulary.encode(text, add_special=True, parse_special=True).tolist()
            assert ids.count(vocabulary.bos) == (bos is not None)
            assert vocabulary.encode_segments([(text, True)], add_special=True).tolist() == ids
            if bos is not None:
                assert ids[0] == bos


def test_text_that_spells_control_tokens_stays_text(both: tuple[Vocabulary, Reference]) -> None:
    vocabulary, _ = both
    control = {t for t in vocabulary.special_tokens.values() if not vocabulary.piece(t)}
    for text in ("<|im_start|>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<|im_end|>", "<eos>"):
        ids = vocabulary.encode(f"a{text}b", add_special=False, parse_special=False).tolist()
        assert not control.intersection(ids)
        assert vocabulary.decode(ids) == f"a{text}b"


def test_a_long_text_in_blocks_gives_the_same_tokens(both: tuple[Vocabulary, Reference]) -> None:
    vocabulary, reference = both
    text = "\n\n".join(text for text in TEXTS if "\0" not in text) * 12
    assert len(text) > 200_000
    ids = vocabulary.encode(text, add_special=False, parse_special=False)
    assert ids.tolist() == reference.encode(text, False, False)


def test_memory_comes_back() -> None:
    code = """
import gc, resource, sys
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.vocab import Vocabulary
def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 2**20
sizes = []
for _ in range(8):
    with GGUFFile.open(sys.argv[1]) as file:
        Vocabulary.load(file)
    gc.collect()
    sizes.append(resident())
print(max(sizes[3:]) - sizes[2])
"""
    gc.collect()
    child = subprocess.run([sys.executable, "-c", code, str(smollm2())], capture_output=True, text=True, check=True)
    assert float(child.stdout) < 8  # MiB; one vocabulary takes about 20
