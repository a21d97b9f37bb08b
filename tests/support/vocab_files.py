"""Small vocabulary-only GGUFs, right and wrong ones, written with gguf-py."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
BYTE_TOKENS = [b"<0x%02X>" % byte for byte in range(256)]
WORDS = ["▁", "h", "e", "l", "o", "w", "r", "d", "he", "ll", "hell", "hello", "▁hello", "▁w", "or", "▁wor", "ld"]


def spm(**changes: Any) -> dict[str, Any]:
    """The parts of a SentencePiece vocabulary: unk, bos, eos, 256 bytes, some words, two special tokens."""
    texts = [b"<unk>", b"<s>", b"</s>", *BYTE_TOKENS, *(word.encode() for word in WORDS), b"<|user|>", b"<tag>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(WORDS), CONTROL, USER_DEFINED]
    scores = [0.0] * 259 + [-float(i) for i in range(len(WORDS))] + [0.0, 0.0]
    parts: dict[str, Any] = {"model": "llama", "tokens": texts, "types": types, "scores": scores}
    parts |= {"bos": 1, "eos": 2, "unknown": 0, "add_bos": True}
    return parts | changes


def bpe(**changes: Any) -> dict[str, Any]:
    """The parts of a byte-pair vocabulary: the 256 letters of bytes, some merges, two control tokens."""
    from ggml_engine.ggml.vocab_tables import BYTE_OF

    letters = sorted(BYTE_OF, key=lambda letter: BYTE_OF[letter])
    pairs = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello"), ("w", "o"), ("Ġ", "wo")]
    texts = [*letters, *("".join(pair) for pair in pairs), "<|endoftext|>", "<|im_start|>"]
    types = [NORMAL] * (len(texts) - 2) + [CONTROL] * 2
    parts: dict[str, Any] = {
        "model": "gpt2",
        "pre": "gpt-2",
        "tokens": [text.encode() for text in texts],
        "types": types,
    }
    parts |= {"merges": [" ".join(pair) for pair in pairs], "eos": len(texts) - 2, "bos": len(texts) - 2}
    return parts | {"add_bos": False} | changes


def write(path: Path, parts: dict[str, Any], *, n_rows: int | None = None) -> Path:
    """Write the parts; a value None leaves a key out, and an unusual type is written as it is."""
    writer = gguf.GGUFWriter(path, "llama")
    names = {"model": "model", "pre": "pre", "tokens": "tokens", "scores": "scores", "types": "token_type"}
    names |= {
        "merges": "merges",
        "add_bos": "add_bos_token",
        "add_eos": "add_eos_token",
        "add_space": "add_space_prefix",
    }
    names |= {name: f"{name}_token_id" for name in ("bos", "eos", "eot", "unknown", "padding", "fim_pad")}
    for name, value in parts.items():
        key = "tokenizer.ggml." + names.get(name, name)
        if isinstance(value, np.ndarray):
            kind = {"f4": "FLOAT32", "i4": "INT32", "u1": "UINT8", "u4": "UINT32"}[value.dtype.str[1:]]
            writer.add_key_value(key, value.tolist(), gguf.GGUFValueType.ARRAY, sub_type=gguf.GGUFValueType[kind])
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_key_value(key, value, gguf.GGUFValueType.INT64 if value < 0 else gguf.GGUFValueType.UINT32)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    if n_rows is not None:
        writer.add_tensor("token_embd.weight", np.zeros((n_rows, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def replaced(parts: dict[str, Any], name: str, changes: dict[int, Any]) -> dict[str, Any]:
    """`parts` with some elements of one list changed; negative indices count from the end."""
    values = list(parts[name])
    for index, value in changes.items():
        values[index] = value
    return parts | {name: values}


def in_child(code: str, *arguments: str | Path, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
    """Run Python code in a process of its own, where a death is only a return code."""
    command: Sequence[str] = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)


# Prints a line for each file before and after it was used, so that a death names its file.
LOAD_AND_USE = """
import sys
from ggml_engine.errors import EngineError
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.vocab import Vocabulary
text = "hello world \\U0001f600 \\u65e5\\u672c <s><|user|><tag> \\0 x" + "." * 2_000
for path in sys.argv[1:]:
    print(path, end=" ", flush=True)
    try:
        vocabulary = Vocabulary.load(GGUFFile.open(path))
        for token in range(vocabulary.n_tokens):
            vocabulary.piece(token), vocabulary.text(token), vocabulary.is_end(token)
        for parse_special in (False, True):
            ids = vocabulary.encode(text, add_special=True, parse_special=parse_special)
            vocabulary.decode(ids)
        print("loaded", len(vocabulary.warnings), flush=True)
    except EngineError as error:
        print(type(error).__name__, error, flush=True)
"""
