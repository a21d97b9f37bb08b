"""The tokenizer's tables of a GGUF: read, checked, and written again as a small GGUF that libllama can take.

libllama trusts these tables: a repeated token aborts the process, a missing byte token throws across its C interface,
an id out of range indexes past a table. So it never sees the model's file, only one made here: nothing but the
tokenizer, the later ones of equal tokens renamed to a text that no input can spell, missing byte tokens added behind
the last id. That also saves a quarter of its load time. Knows nothing of encoding; needs no native library.
"""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from ggml_engine.errors import HyperparameterError, VocabularyError
from ggml_engine.ggml.gguf import GGUFArray, GGUFFile, GGUFType

log = logging.getLogger("ggml_engine.vocab")

MAX_TOKEN_BYTES: Final = 65_536

# What `tokenizer.ggml.model` may be. libllama knows more; how those fail is not guarded here, so they are refused.
TOKENIZERS: Final = ("gemma4", "gpt2", "llama")
UNUSED_TOKENIZERS: Final = ("bert", "hybriddna", "no_vocab", "none", "plamo2", "rwkv", "t5", "test", "whitespace")

# What `tokenizer.ggml.pre` may be for "gpt2": the names that libllama's llama-vocab.cpp compares with.
_PRE_NAMES: Final = """
    default minicpm5 llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano deepseek-llm
    deepseek-coder deepseek-v3 spark2_5 youtu falcon mpt starcoder gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es
    jina-v2-de a.x-4.0 mellum modern-bert jais-2 gemma4 granite-embed-multi-311m sarvam-moe jina-v1-en jina-v2-code
    roberta-bpe whitespace refact command-r qwen2 deepseek-r1-qwen kormo f2llmv2 qwen35 stablelm2 olmo dbrx smaug-bpe
    poro-chat chatglm-bpe glm4 glm5 viking jais tekken smollm codeshell bloom gpt3-finnish exaone exaone4 exaone-moe
    chameleon minerva-7b megrez gpt-4o llama4 kanana2 talkie granite-embed-multi-97m tiny_aya cohere2moe superbpe
    trillion granite-docling bailingmoe bailingmoe2 llada-moe seed-coder hunyuan hunyuan-dense hy_v4 joyai-llm kimi-k2
    ufakzeka grok-2 afmoe laguna minimax-m2 solar-open mellum2
"""
PRE_TOKENIZERS: Final = frozenset(_PRE_NAMES.split())

# The values of `tokenizer.ggml.token_type` (enum llama_token_type).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_SPECIAL_NAMES: Final = (
    *("bos", "eos", "eot", "eom", "unknown", "seperator", "padding", "mask"),
    *("fim_pre", "fim_suf", "fim_mid", "fim_pad", "fim_rep", "fim_sep", "prefix", "suffix", "middle"),
)
_FLAGS: Final = tuple(
    f"tokenizer.ggml.{name}" for name in ("add_bos_token", "add_eos_token", "remove_extra_whitespaces")
)
_BYTE_TEXT: Final = re.compile(rb"<0x[0-9A-Fa-f]{2}>")
# Texts that libllama takes for ends of a turn, whatever the type of their token (llama-vocab.cpp).
_TURN_ENDS: Final = frozenset(
    text.encode()
    for text in (
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
        *("<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
        *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
    )
)
# Texts that give a token a role when the file names none for it. Unless the role is given, libllama compares all tokens
# with all of them, an eighth of its load time. Role: its older name in files, and its texts, likeliest first.
_ROLES: Final[dict[str, tuple[str | None, str]]] = {
    "eot": (
        None,
        "<|eot_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|> <EOT> _<EOT> [EOT] "
        "<｜end▁of▁sentence｜> <end_of_utterance>",
    ),
    "eom": (None, "<|eom_id|>"),
    "fim_pre": (
        "prefix",
        "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> <|prefix|>",
    ),
    "fim_suf": (
        "suffix",
        "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>",
    ),
    "fim_mid": (
        "middle",
        "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>",
    ),
    "fim_pad": (None, "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]"),
    "fim_rep": (None, "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>"),
    "fim_sep": (None, "<|file_sep|>"),
}
# Tokens that libllama looks up without checking when the model's name says phi-3.
_PHI3_TOKENS: Final = frozenset((b"</s>", b"<unk>", b"<s>", b"<|endoftext|>"))


@dataclass(frozen=True, slots=True)
class Tables:
    """What was read. `gguf` is the file for libllama, in pieces, with `n_added` tokens behind the file's own."""

    tokenizer: str
    pre: str
    n_tokens: int
    texts: dict[int, bytes]  # of tokens whose text libllama does not have: renamed, or cut at a NUL as C strings are
    types: NDArray[np.int32]  # [n_tokens]
    n_rows: int
    special: dict[str, int]  # "bos" -> id, for those in range that the file names or that a text implies
    dropped: frozenset[str]  # names whose id was out of range
    turn_ends: list[int]  # tokens whose text ends a turn
    adds_space: bool  # whether a text gets a space before its first word
    pieces: dict[int, bytes]  # the bytes of tokens that had to be renamed
    n_added: int
    gguf: list[bytes | memoryview]
    warnings: tuple[str, ...]


def read_tables(file: GGUFFile) -> Tables:
    """The checked tables of `file`; VocabularyError when there is no vocabulary in them to use."""
    try:
        return _Reader(file).read()
    except HyperparameterError as error:
        raise VocabularyError(f"{file.path}: {error}") from error


class _Reader:
    def __init__(self, file: GGUFFile) -> None:
        self.file = file
        self.metadata = file.metadata
        self.warnings: list[str] = []

    def read(self) -> Tables:
        tokenizer, pre = self.read_names()
        texts, raw, with_nul = self.read_texts()
        n_rows = self.read_rows(len(texts))
        types = self.read_types(texts)
        known = set(texts)
        new_texts = texts if len(known) == len(texts) and b"" not in known else self.rename(texts)
        pieces = {i: self.piece(tokenizer, texts, types, i) for i in _changed(texts, new_texts)}
        added = self.missing_bytes(known) if tokenizer == "llama" else []
        turn_ends = [texts.index(text) for text in _TURN_ENDS & known]
        special, dropped = self.special_ids(len(texts))
        roles = self.roles(special, texts, known)
        new_types = np.append(types, np.full(len(added), BYTE, "<i4"))
        new_types[[*turn_ends, *roles.values()]] = CONTROL  # libllama makes them so, with a warning for each

        entries = self.name_entries(tokenizer, pre, known)
        if new_texts is texts and not added:
            entries += [_array_head("tokenizer.ggml.tokens", GGUFType.STRING, len(texts)), raw]
        else:
            entries.append(_texts("tokenizer.ggml.tokens", [*new_texts, *added]))
        entries.append(_numbers("tokenizer.ggml.token_type", new_types))
        entries += [self.scores(len(texts), len(added))] if tokenizer == "llama" else self.merges()
        special |= roles
        entries += [*_ids(special), *self.flag_entries()]
        n_entries = sum(isinstance(entry, bytes) for entry in entries)  # a view is the rest of the entry before it
        for warning in self.warnings:
            log.warning("%s: %s", self.file.path, warning)
        return Tables(
            tokenizer=tokenizer,
            pre=pre,
            n_tokens=len(texts),
            texts={i: texts[i] for i in (*pieces, *with_nul)},
            types=types,
            n_rows=n_rows,
            special=special,
            dropped=dropped,
            turn_ends=turn_ends,
            adds_space=tokenizer == "llama" and self.metadata.find_flag("tokenizer.ggml.add_space_prefix") is not False,
            pieces=pieces,
            n_added=len(added),
            gguf=[struct.pack("<4sIQQ", b"GGUF", 3, 0, n_entries), *entries],
            warnings=tuple(self.warnings),
        )

    def error(self, reason: str) -> VocabularyError:
        return VocabularyError(f"{self.file.path}: {reason}")

    def read_names(self) -> tuple[str, str]:
        tokenizer = self.metadata.text("tokenizer.ggml.model")
        if tokenizer not in TOKENIZERS:
            known = "is not used by this engine" if tokenizer in UNUSED_TOKENIZERS else "is unknown"
            raise self.error(f"the tokenizer {tokenizer[:80]!r} {known}; supported are {', '.join(TOKENIZERS)}")
        pre = self.metadata.find_text("tokenizer.ggml.pre") or ""
        if tokenizer == "gpt2" and pre and pre not in PRE_TOKENIZERS:
            raise self.error(
                f"the pre-tokenizer {pre[:80]!r} is unknown; known are {', '.join(sorted(PRE_TOKENIZERS))}"
            )
        return tokenizer, pre

    def read_texts(self) -> tuple[list[bytes], memoryview, list[int]]:
        """The tokens' texts, the same as the array's bytes in the file, and the tokens with a NUL in their text."""
        tokens = self.metadata.array("tokenizer.ggml.tokens", GGUFType.STRING)
        if not len(tokens):
            raise self.error("tokenizer.ggml.tokens is empty")
        begins, ends = tokens.bounds()
        sizes = ends - begins
        if sizes.max() > MAX_TOKEN_BYTES:
            longest = int(sizes.argmax())
            raise self.error(f"token {longest} takes {sizes[longest]} bytes, the limit is {MAX_TOKEN_BYTES}")
        texts, raw = tokens.strings(), self.raw(tokens, int(sizes.sum()))
        n_zeros = len(raw) - np.count_nonzero(np.frombuffer(raw, np.uint8))
        n_in_lengths = 8 * len(texts) - np.count_nonzero(sizes.astype("<i8").view(np.uint8))
        has_nul = n_zeros > n_in_lengths
        return texts, raw, [i for i, text in enumerate(texts) if b"\0" in text] if has_nul else []

    def read_rows(self, n_tokens: int) -> int:
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None or len(embedding.shape) != 2:
            return n_tokens  # a vocabulary-only file, or a fault that the weights will report
        n_rows = int(embedding.shape[1])
        if n_rows < n_tokens:
            raise self.error(f"the tokenizer has {n_tokens} tokens, token_embd.weight only {n_rows} rows")
        return n_rows

    def read_types(self, texts: list[bytes]) -> NDArray[np.int32]:
        found = self.metadata.find_array("tokenizer.ggml.token_type", GGUFType.INT32)
        if found is None:
            return np.full(len(texts), NORMAL, np.int32)
        self.check_length("tokenizer.ggml.token_type", found, len(texts))
        types = found.numpy().astype(np.int32)
        strange = np.flatnonzero((types < 0) | (types > BYTE))
        if len(strange):
            first = int(strange[0])
            self.warnings.append(
                f"{len(strange)} tokens have an unknown type (token {first}: {types[first]}): normal now"
            )
            types[strange] = NORMAL
        bad = [i for i in np.flatnonzero(types == BYTE).tolist() if not _BYTE_TEXT.fullmatch(texts[i])]
        if bad:
            self.warnings.append(
                f"{len(bad)} byte tokens name no byte (token {bad[0]}: {texts[bad[0]][:40]!r}): text now"
            )
            types[bad] = NORMAL
        return types

    def check_length(self, key: str, found: GGUFArray, n_tokens: int) -> None:
        if len(found) != n_tokens:
            raise self.error(f"{key} has {len(found)} elements for {n_tokens} tokens")

    def rename(self, texts: list[bytes]) -> list[bytes]:
        """Unique texts. The new ones hold a byte that no UTF-8 text has, so that no input can be tokenised to them."""
        first: dict[bytes, int] = {}
        renamed = list(texts)
        repeated = []
        for i, text in enumerate(texts):
            if not text or first.setdefault(text, i) != i:
                renamed[i] = b"\xff[%d]" % i
                repeated.append(i)
        while len(set(renamed)) != len(renamed):  # the file may hold such texts itself
            for i in repeated:
                renamed[i] += b"\xff"
        i = repeated[0]
        what = f"repeats token {first[texts[i]]}, {texts[i][:40]!r}" if texts[i] else "is empty"
        self.warnings.append(f"{len(repeated)} tokens are empty or repeat an earlier one (token {i} {what})")
        return renamed

    @staticmethod
    def piece(tokenizer: str, texts: list[bytes], types: NDArray[np.int32], token: int) -> bytes:
        """What libllama would give for the token had it kept its name (`llama_token_to_piece`)."""
        text, kind = texts[token], types[token]
        if kind in (NORMAL, BYTE, USER_DEFINED):
            if kind == USER_DEFINED:
                return text
            if kind == BYTE:
                return bytes([int(text[3:5], 16)])
            if tokenizer != "gpt2":
                return text.replace("▁".encode(), b" ")
            return b"".join(BYTE_OF.get(c) or c.encode() for c in text.decode("utf-8", "replace"))
        return b""

    def missing_bytes(self, known: set[bytes]) -> list[bytes]:
        names = [(b"<0x%02X>" % byte, bytes([byte])) for byte in range(256)]
        missing = [name for name, byte in names if name not in known and byte not in known]
        if missing:
            self.warnings.append(
                f"{len(missing)} bytes have no token ({missing[0].decode()} first): they become unknown"
            )
        return missing

    def scores(self, n_tokens: int, n_added: int) -> bytes:
        key = "tokenizer.ggml.scores"
        found = self.metadata.find_array(key, GGUFType.FLOAT32, GGUFType.INT32)
        values = np.zeros(n_tokens, "<f4")
        if found is not None:
            self.check_length(key, found, n_tokens)
            values = found.numpy().astype("<f4")
        if not np.isfinite(values).all():
            raise self.error(f"{key} holds NaN or infinity")
        values = np.append(values, np.zeros(n_added, "<f4"))
        # libllama prints every number of an array to make its log line; integers print five times faster
        whole = bool((np.abs(values) < 2**24).all() and (values == np.rint(values)).all())
        return _numbers(key, values.astype("<i4") if whole else values)

    def merges(self) -> list[bytes | memoryview]:
        key = "tokenizer.ggml.merges"
        found = self.metadata.find_array(key, GGUFType.STRING)
        if found is None or not len(found):
            raise self.error(f"{key} is missing or empty; a byte-pair tokenizer cannot work without")
        # a merge of unknown tokens is harmless: libllama falls back to the tokens of the bytes
        begins, ends = found.bounds()
        whole = np.frombuffer(self.file.parts[0].buffer, np.uint8)[found.offset : int(ends[-1])]
        spaces = np.append(np.flatnonzero(whole == ord(" ")) + found.offset, ends[-1] + 1)
        is_pair = spaces[np.searchsorted(spaces, begins + 1)] < ends  # a space, and something before it
        if is_pair.all():
            return [_array_head(key, GGUFType.STRING, len(found)), self.raw(found, int((ends - begins).sum()))]
        merges = found.strings()
        good = [merges[i] for i in np.flatnonzero(is_pair).tolist()]
        self.warnings.append(f"{len(merges) - len(good)} of {len(merges)} merges hold no pair: left out")
        return [_texts(key, good)]

    def raw(self, array: GGUFArray, n_text_bytes: int) -> memoryview:
        """A text array's bytes in the file: each text behind its length of 8 bytes."""
        return self.file.parts[0].buffer[array.offset : array.offset + n_text_bytes + 8 * len(array)]

    def special_ids(self, n_tokens: int) -> tuple[dict[str, int], frozenset[str]]:
        """The ids that the file names, and the names of those that are out of range."""
        special, dropped = {}, []
        for name in _SPECIAL_NAMES:
            key = f"tokenizer.ggml.{name}_token_id"
            value = self.metadata.find_integer(key)
            if value is None:
                continue
            if 0 <= value < n_tokens:
                special[name] = value
            else:
                dropped.append(name)
                self.warnings.append(f"{key} is {value}, the vocabulary has {n_tokens} tokens: ignored")
        return special, frozenset(dropped)

    @staticmethod
    def roles(special: dict[str, int], texts: list[bytes], known: set[bytes]) -> dict[str, int]:
        """The roles that tokens have by their text, where the file names none."""
        found = {}
        for role, (older, names) in _ROLES.items():
            if role not in special and older not in special:
                text = next((name for name in names.encode().split() if name in known), None)
                if text is not None:
                    found[role] = texts.index(text)
        return found

    def name_entries(self, tokenizer: str, pre: str, known: set[bytes]) -> list[bytes | memoryview]:
        entries: list[bytes | memoryview] = [_text("general.architecture", b"llama")]
        entries.append(_text("tokenizer.ggml.model", tokenizer.encode()))
        if tokenizer == "gpt2" and pre:
            entries.append(_text("tokenizer.ggml.pre", pre.encode()))
        if (name := self.metadata.find_text("general.name")) and "phi" in name.lower() and known >= _PHI3_TOKENS:
            entries.append(_text("general.name", name.encode()))
        return entries

    def flag_entries(self) -> list[bytes]:
        # a space is put before words by Vocabulary, which knows where one text ends and another begins
        entries = [_string("tokenizer.ggml.add_space_prefix") + struct.pack("<I?", GGUFType.BOOL, False)]
        for key in _FLAGS:
            value = self.metadata.find_flag(key)
            if value is not None:
                entries.append(_string(key) + struct.pack("<I?", GGUFType.BOOL, value))
        key = "tokenizer.ggml.suppress_tokens"
        if (found := self.metadata.find_array(key, GGUFType.INT32)) is not None:
            entries.append(_numbers(key, found.numpy()))
        return entries


def _ids(special: dict[str, int]) -> list[bytes]:
    ids = dict(special)
    if "eos" in special:
        # a role that no token has goes to the end token, which ends a generation as it is: libllama stops looking
        ids = {role: special["eos"] for role, (older, _) in _ROLES.items() if older not in special} | special
    entries = []
    for name, token in ids.items():
        entries.append(_string(f"tokenizer.ggml.{name}_token_id") + struct.pack("<II", GGUFType.UINT32, token))
    return entries


def _changed(old: list[bytes], new: list[bytes]) -> list[int]:
    return [] if old is new else [i for i, (a, b) in enumerate(zip(old, new, strict=True)) if a != b]


def _string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def _text(key: str, value: bytes) -> bytes:
    return _string(key) + struct.pack("<I", GGUFType.STRING) + _string(value)


def _array_head(key: str, kind: GGUFType, n: int) -> bytes:
    return _string(key) + struct.pack("<IIQ", GGUFType.ARRAY, kind, n)


def _texts(key: str, values: Sequence[bytes]) -> bytes:
    return _array_head(key, GGUFType.STRING, len(values)) + b"".join(map(_string, values))


def _numbers(key: str, values: NDArray[Any]) -> bytes:
    kind = GGUFType.INT32 if values.dtype.kind == "i" else GGUFType.FLOAT32
    return _array_head(key, kind, len(values)) + values.tobytes()


def _byte_alphabet() -> dict[str, bytes]:
    """GPT-2's letters for bytes: printable ones stand for themselves, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    letters = {chr(byte): bytes([byte]) for byte in printable}
    letters.update((chr(0x100 + i), bytes([byte])) for i, byte in enumerate(others))
    return letters


BYTE_OF: Final = _byte_alphabet()
