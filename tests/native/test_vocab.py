"""Text to tokens and back, on small vocabularies."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vocab_files import bpe, spm, write

from ggml_engine.errors import InputError
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.library import ffi, load
from ggml_engine.ggml.vocab import Detokenizer, StreamDecoder, Vocabulary

N = len(spm()["tokens"])
HELLO, USER, TAG = 259 + 12, N - 2, N - 1


def make(folder: Path, parts: dict[str, object]) -> Vocabulary:
    with GGUFFile.open(write(folder / "v.gguf", parts)) as file:
        return Vocabulary.load(file)


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return make(tmp_path_factory.mktemp("spm"), spm())


@pytest.fixture(scope="module")
def letters(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    return make(tmp_path_factory.mktemp("bpe"), bpe())


def encode(vocabulary: Vocabulary, text: str, add_special: bool = False, parse_special: bool = False) -> list[int]:
    return vocabulary.encode(text, add_special=add_special, parse_special=parse_special).tolist()


def test_facts(vocabulary: Vocabulary) -> None:
    assert (vocabulary.n_tokens, vocabulary.n_rows, vocabulary.bos, vocabulary.eos) == (N, N, 1, 2)
    assert vocabulary.adds_bos
    assert vocabulary.adds_space
    assert vocabulary.is_end(2)
    assert not vocabulary.is_end(1)
    assert not vocabulary.is_end(10**9)
    assert vocabulary.end_tokens == {2}
    assert vocabulary.special_tokens == {"<s>": 1, "</s>": 2, "<|user|>": USER, "<tag>": TAG}


@pytest.mark.parametrize("text", ["hello", "<s>hello", "<s><s>hello", "", "<s>"])
def test_exactly_one_bos_also_when_the_text_begins_with_it(vocabulary: Vocabulary, text: str) -> None:
    ids = encode(vocabulary, text, add_special=True, parse_special=True)
    assert ids == [1, *[HELLO] * ("hello" in text)]


def test_no_bos_unless_asked_for(vocabulary: Vocabulary, letters: Vocabulary) -> None:
    assert encode(vocabulary, "hello") == [HELLO]
    assert letters.bos is not None
    assert letters.bos not in encode(letters, "hello", add_special=True)


def test_text_that_spells_a_control_token_stays_text(vocabulary: Vocabulary, letters: Vocabulary) -> None:
    for vocab, text in ((vocabulary, "<|user|>"), (vocabulary, "<s>"), (letters, "<|im_start|>")):
        plain = encode(vocab, text)
        assert not set(plain) & set(vocab.special_tokens.values())
        assert vocab.decode(plain) == text
        assert encode(vocab, text, parse_special=True) == [vocab.special_tokens[text]]


def test_segments_are_parsed_each_in_its_way(vocabulary: Vocabulary) -> None:
    segments = [("<|user|>", True), ("<|user|>", False), ("</s>", True)]
    ids = vocabulary.encode_segments(segments, add_special=True).tolist()
    assert ids[:2] == [1, USER]
    assert ids[-1] == 2
    assert USER not in ids[2:]
    assert vocabulary.decode(ids) == "<|user|>"


def test_segments_get_the_space_that_the_joined_text_would(vocabulary: Vocabulary) -> None:
    def joined(*texts: str) -> tuple[list[int], list[int]]:
        segments = [(text, True) for text in texts]
        return vocabulary.encode_segments(segments, add_special=False).tolist(), encode(
            vocabulary, "".join(texts), parse_special=True
        )

    for texts in (
        ["<|user|>", "hello"],
        ["<|user|>hello", "</s>", "<|user|>", "hello"],
        ["", "hello"],
        ["<tag>", "he"],
    ):
        apart, together = joined(*texts)
        assert apart == together
    # inside a word there is none
    assert vocabulary.decode(vocabulary.encode_segments([("he", False), ("llo", False)], add_special=False)) == "hello"


def test_spaces_around_special_tokens_are_libllamas(vocabulary: Vocabulary, tmp_path: Path) -> None:
    """Texts are cut at special tokens here when the tokenizer adds spaces: compare with libllama doing it all."""
    path = write(tmp_path / "v.gguf", spm())
    llama = load().llama
    params = llama.llama_model_default_params()
    params.vocab_only = True
    model = ffi.gc(llama.llama_model_load_from_file(str(path).encode(), params), llama.llama_model_free)

    def native(text: str, parse_special: bool) -> list[int]:
        data, found = text.encode(), ffi.new("llama_token[]", 100)
        vocab = llama.llama_model_get_vocab(model)
        n = llama.llama_tokenize(vocab, data, len(data), found, 100, False, parse_special)
        return list(found[0:n])

    for parse_special in (False, True):
        for text in ("hello<|user|>hello", " hello", "<tag>hello", "a<tag><tag> b</s>", "<|user|><s>", "<unk>x", "\n"):
            assert encode(vocabulary, text, parse_special=parse_special) == native(text, parse_special), text


@given(st.text(max_size=40))
def test_any_text_comes_back(vocabulary: Vocabulary, letters: Vocabulary, text: str) -> None:
    for vocab in (vocabulary, letters):
        try:
            ids = vocab.encode(text, add_special=False, parse_special=False)
        except InputError:
            text.encode("utf-8", "surrogatepass").decode("utf-8", "ignore")
            return
        assert vocab.decode(ids) == text
        stream = StreamDecoder(vocab)
        pieces = [stream.push(token) for token in ids.tolist()]
        assert "".join(pieces) + stream.finish() == text


@given(st.lists(st.integers(0, N - 1), max_size=30))
def test_a_stream_joined_is_the_whole_text_for_any_tokens(vocabulary: Vocabulary, tokens: list[int]) -> None:
    stream = StreamDecoder(vocabulary)
    assert "".join(map(stream.push, tokens)) + stream.finish() == vocabulary.decode(tokens)


def test_a_character_waits_for_its_last_byte(vocabulary: Vocabulary) -> None:
    stream = Detokenizer(vocabulary)
    ids = encode(vocabulary, "😀é")
    assert [stream.push(token) for token in ids][-6:] == ["", "", "", "😀", "", "é"]
    assert stream.finish() == ""


def test_bytes_that_are_no_text_become_replacement_characters(vocabulary: Vocabulary) -> None:
    stream = StreamDecoder(vocabulary)
    lead = 3 + 0xF0
    assert [stream.push(token) for token in (lead, 259 + 1, lead)] == ["", "\ufffdh", ""]
    assert stream.finish() == "\ufffd"


def test_control_tokens_are_hidden_and_the_first_space_is_taken_once(vocabulary: Vocabulary) -> None:
    assert vocabulary.decode([1, HELLO, 2, HELLO]) == "hello hello"
    assert vocabulary.decode([HELLO], continues=True) == " hello"
    stream = StreamDecoder(vocabulary, continues=True)
    assert stream.push(HELLO) == " hello"


def test_a_stream_shows_the_control_tokens_that_it_is_asked_to(vocabulary: Vocabulary) -> None:
    stream = StreamDecoder(vocabulary, shown=frozenset({USER, HELLO}))
    assert [stream.push(token) for token in (1, USER, HELLO, TAG, USER)] == [
        "",
        "<|user|>",
        "hello",
        "<tag>",
        "<|user|>",
    ]
    assert stream.finish() == ""


def test_a_shown_token_ends_a_character_that_stayed_incomplete(vocabulary: Vocabulary) -> None:
    stream = StreamDecoder(vocabulary, shown=frozenset({USER}))
    assert [stream.push(token) for token in (3 + 0xF0, USER)] == ["", "\ufffd<|user|>"]


@pytest.mark.parametrize("bad", [True, 1.0, "1", None, -1, N, 2**31, 2**63, np.float32(1), np.bool_(True)])
def test_ids_that_are_none_are_refused(vocabulary: Vocabulary, bad: object) -> None:
    for ids in ([bad], [1, bad], (bad, 1)):
        with pytest.raises(InputError, match="token id"):
            vocabulary.check_tokens(ids)  # type: ignore[arg-type]
        with pytest.raises(InputError, match="token id"):
            vocabulary.decode(ids)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="token id"):
        vocabulary.piece(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", ["12", b"12", 5, None, {1}, np.array([1.0]), np.array([[1]]), np.array([True])])
def test_only_rows_of_integers_are_ids(vocabulary: Vocabulary, bad: object) -> None:
    with pytest.raises(InputError, match="token ids"):
        vocabulary.check_tokens(bad)  # type: ignore[arg-type]


def test_the_message_names_value_and_range(vocabulary: Vocabulary) -> None:
    with pytest.raises(InputError, match=rf"token id {2**63} is out of range: the vocabulary has 0 to {N - 1}"):
        vocabulary.check_tokens([0, 2**63])
    with pytest.raises(InputError, match=f"token id {2**64 - 1}"):
        vocabulary.check_tokens(np.array([2**64 - 1], np.uint64))
    assert vocabulary.check_tokens(np.array([0, N - 1], np.uint8 if N < 256 else np.int64)).dtype == np.int32
    assert vocabulary.check_tokens([]).tolist() == []


def test_text_that_is_none_is_refused(vocabulary: Vocabulary) -> None:
    with pytest.raises(InputError, match=r"character 1 .* surrogate"):
        encode(vocabulary, "a\ud800")
    with pytest.raises(InputError, match="str"):
        encode(vocabulary, b"a")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="limit"):
        encode(vocabulary, "a" * (2**25 + 1))
    assert vocabulary.decode(encode(vocabulary, "a\0b")) == "a\0b"


def test_long_texts_take_time_in_proportion(vocabulary: Vocabulary, letters: Vocabulary, tmp_path: Path) -> None:
    whole = make(tmp_path, spm(add_space=False))  # otherwise texts are cut at special tokens here

    def seconds(n: int) -> float:
        begin = time.process_time()
        assert encode(whole, "<tag>" * n) == [TAG] * n
        return time.process_time() - begin

    # libllama's own time is quadratic: 64 times
    assert seconds(80_000) < 24 * seconds(10_000)
    lines = "hello world\n" * 20_000
    for vocab in (vocabulary, letters):
        assert vocab.decode(encode(vocab, lines)) == lines


def test_a_run_that_would_overflow_the_stack_is_cut(tmp_path: Path) -> None:
    vocab = make(tmp_path, bpe(pre="deepseek-llm"))
    for text in ("a" * 20_000, " " * 20_000, "日，" * 10_000):
        assert vocab.decode(encode(vocab, text)) == text


def test_a_vocabulary_outlives_its_file_and_serves_many_threads(tmp_path: Path) -> None:
    vocab = make(tmp_path, spm())
    (tmp_path / "v.gguf").unlink()
    gc.collect()
    found: list[list[int]] = []
    threads = [threading.Thread(target=lambda: found.append(encode(vocab, "hello world " * 200))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({tuple(ids) for ids in found}) == 1
    assert len(found) == 8


def test_a_temporary_file_works_where_memory_files_do_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import tempfile

    monkeypatch.delattr(os, "memfd_create", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    vocab = make(tmp_path, spm())
    assert encode(vocab, "hello") == [HELLO]
    assert [path.name for path in tmp_path.iterdir()] == ["v.gguf"]


def test_roles_and_ends_are_those_that_libllama_finds_in_the_whole_file(tmp_path: Path) -> None:
    from ggml_engine.ggml.vocab_tables import _ROLES, _TURN_ENDS

    llama = load().llama
    params = llama.llama_model_default_params()
    params.vocab_only = True
    sets: list[list[bytes]] = [[name.encode()] for _, names in _ROLES.values() for name in names.split()]
    sets += [[name] for name in sorted(_TURN_ENDS)]
    sets += [[b"<|return|>", b"<|call|>", b"<|end|>"], [b"<|tool_response>", b"<turn|>"], [b"<|im_end|>", b"<fim_pad>"]]
    for names in sets:
        for eos in (2, None):
            tokens = [*spm()["tokens"], *(name for name in names if name != b"</s>")]
            parts = spm(tokens=tokens, types=[*spm()["types"], *[1] * (len(tokens) - N)], scores=None, eos=eos)
            vocab = make(tmp_path, parts)
            model = ffi.gc(
                llama.llama_model_load_from_file(str(tmp_path / "v.gguf").encode(), params), llama.llama_model_free
            )
            theirs = llama.llama_model_get_vocab(model)
            assert vocab.end_tokens == {t for t in range(len(tokens)) if llama.llama_vocab_is_eog(theirs, t)}, names
            assert (vocab.eot if vocab.eot is not None else -1) == llama.llama_vocab_eot(theirs)
            for token in range(N - 2, len(tokens)):
                assert llama.llama_vocab_is_control(vocab.native, token) == llama.llama_vocab_is_control(theirs, token)
