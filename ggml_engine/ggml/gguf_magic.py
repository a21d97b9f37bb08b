"""Says what a file that is not a GGUF looks like, so that the message helps: people hand over the page of a failed
download, the pointer of a missing git-lfs checkout, or weights in another format.

Knows only first bytes; never reads a file.
"""

from __future__ import annotations

from typing import Final

_HEADS: Final = (
    (b"FUGG", "a GGUF with its bytes swapped (big-endian magic)"),
    (b"lmgg", "an old GGML model (before GGUF); it must be converted again"),
    (b"fmgg", "an old GGMF model (before GGUF); it must be converted again"),
    (b"tjgg", "an old GGJT model (before GGUF); it must be converted again"),
    (b"algg", "an old GGLA adapter (before GGUF); it must be converted again"),
    (b"GGML", "an old GGML model (before GGUF); it must be converted again"),
    (b"gguf", "a file with the magic in lower case"),
    (b"GGSN", "a saved llama.cpp session"),
    (b"GGSQ", "a saved llama.cpp sequence"),
    (b"version https://git-lfs", "a git-lfs pointer: the model itself was not downloaded (git lfs pull)"),
    (b"PK\x03\x04", "a ZIP archive, as PyTorch checkpoints are"),
    (b"\x80\x02", "a Python pickle, as old PyTorch checkpoints are"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ\x00", "an xz archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7z archive"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x89HDF\r\n\x1a\n", "an HDF5 file, as Keras models are"),
    (b"\x7fELF", "a program or library"),
    (b"#!", "a script"),
)


_HTML: Final = "an HTML page, perhaps the error page of a failed download"

# After white space, in lower case.
_TEXTS: Final = (
    (b"<!doctype html", _HTML),
    (b"<html", _HTML),
    (b"<head", _HTML),
    (b"<?xml", "an XML document, perhaps the error of a failed download"),
    (b"{", "a JSON document"),
    (b"[", "a JSON document"),
)


def describe_head(head: bytes) -> str:
    """What the file with these first bytes (some hundreds, if it has them) seems to be, with its article."""
    # safetensors: the length of a JSON header as a u64, then that header.
    if head[8:9] == b"{" and not any(head[5:8]):
        return "a safetensors file"
    if head and not any(head):
        return "zeros, perhaps an unfinished download"
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for beginning, table in ((head, _HEADS), (text, _TEXTS)):
        for magic, description in table:
            if beginning.startswith(magic):
                return description
    return f"something that starts with {head[:4]!r}"
