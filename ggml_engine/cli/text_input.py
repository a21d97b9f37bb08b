"""Text from files and from standard input: UTF-8, bounded, with errors in one line."""

from __future__ import annotations

import os
import sys
from typing import BinaryIO, Final

from ggml_engine.errors import InputError

MAX_BYTES: Final = 32 * 2**20  # as much as a vocabulary takes


def stdin_is_terminal() -> bool:
    """Whether somebody could type there; a closed stdin is no terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


def read_file(path: str) -> str:
    """The text of a file, without the line end that editors put last.

    InputError for what is not UTF-8 or is over 32 MiB, OSError where nothing can be read.
    """
    with open(path, "rb") as file:
        return _decoded(file, path)


def read_stdin() -> str:
    """The text of standard input to its end; as `read_file`."""
    return "" if sys.stdin is None else _decoded(sys.stdin.buffer, "standard input")


def from_argument(text: str) -> str:
    """A text from the command line, whose bytes are read as UTF-8 also where the locale is plain ASCII."""
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError as error:
        raise InputError(f"an argument is not UTF-8: {text!r:.60}") from error


def _decoded(file: BinaryIO, name: str) -> str:
    data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise InputError(f"{name} has more than {MAX_BYTES} bytes, the limit for a text")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"{name} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x}") from error
    return text.removesuffix("\n").removesuffix("\r")
