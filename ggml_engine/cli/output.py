"""What a command prints: streamed text and JSON on stdout, progress and statistics on stderr.

Nothing but a model's text or the asked-for result goes to stdout. Files and pipes get UTF-8 whatever the locale says;
a terminal gets what it can show, and no control characters that a model could move its cursor with.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TextIO

if TYPE_CHECKING:
    from collections.abc import Callable

    from ggml_engine.control.config import GenConfig
    from ggml_engine.control.generation import Generation

MIB: Final = 2**20
_CONTROLS: Final = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_BAR_WIDTH: Final = 24


def visible(text: str) -> str:
    """The text with control characters escaped, line ends and tabs excepted."""
    return _CONTROLS.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def one_line(text: str) -> str:
    """The text in one line without control characters."""
    return visible(" ".join(text.split()))


class TextOutput:
    """Streams text to stdout, every piece at once."""

    def __init__(self) -> None:
        self._stream: TextIO | None = sys.stdout  # None where stdout was closed before the start
        self._is_terminal = self._stream is not None and self._stream.isatty()
        self._bytes = None if self._is_terminal else getattr(self._stream, "buffer", None)
        if self._is_terminal and isinstance(self._stream, io.TextIOWrapper):
            self._stream.reconfigure(errors="replace")

    def write(self, text: str) -> None:
        """Show a piece now. Raises BrokenPipeError when the reader is gone."""
        if self._stream is None:
            return
        if self._bytes is not None:
            rest = memoryview(text.encode("utf-8", "surrogateescape"))  # paths may hold bytes that are no text
            while rest:
                rest = rest[self._bytes.write(rest) :]  # with PYTHONUNBUFFERED it may write a part
            self._bytes.flush()
            return
        self._stream.write(visible(text) if self._is_terminal else text)
        self._stream.flush()


class ProgressLine:
    """A bar on stderr, drawn in place and wiped at the end; nothing where stderr is no terminal.

    `amount` prints a count. A total that is not `above` is too little for a bar.
    """

    def __init__(self, label: str, amount: Callable[[int], str], *, above: int = 0) -> None:
        self._label = label
        self._amount = amount
        self._above = above
        self._stream = sys.stderr if sys.stderr is not None and sys.stderr.isatty() else None
        self._shown = ""

    def __call__(self, done: int, total: int | None) -> None:
        """Draw the bar if it looks different now; a total of None is unknown."""
        if self._stream is None or (total is not None and total <= self._above):
            return
        line = f"{self._label} {self._amount(done)}"
        if total:
            share = min(done / total, 1.0)
            bar = "#" * int(share * _BAR_WIDTH)
            line = f"{self._label} [{bar:-<{_BAR_WIDTH}}] {share:4.0%} of {self._amount(total)}"
        if line != self._shown:
            self._stream.write("\r" + line.ljust(len(self._shown)))
            self._stream.flush()
            self._shown = line

    def clear(self) -> None:
        """Wipe it, if it is there."""
        if self._stream is not None and self._shown:
            self._stream.write("\r" + " " * len(self._shown) + "\r")
            self._stream.flush()
            self._shown = ""


class StatusLine:
    """What is being done, on stderr, drawn in place and wiped at the end; nothing where stderr is no terminal."""

    def __init__(self) -> None:
        self._stream = sys.stderr if sys.stderr is not None and sys.stderr.isatty() else None
        self._shown = ""

    def show(self, text: str) -> None:
        """Draw it in the place of what is there."""
        line = one_line(text)
        if self._stream is not None and line != self._shown:
            self._stream.write("\r" + line.ljust(len(self._shown)))
            self._stream.flush()
            self._shown = line

    def clear(self) -> None:
        """Wipe it, if it is there."""
        if self._stream is not None and self._shown:
            self._stream.write("\r" + " " * len(self._shown) + "\r")
            self._stream.flush()
            self._shown = ""


def mib(n_bytes: int) -> str:
    """Bytes as MiB."""
    return f"{n_bytes / MIB:.1f} MiB"


def tokens(n: int) -> str:
    """A count of tokens."""
    return f"{n} tokens"


def statistics_line(generation: Generation, executor: Mapping[str, Any]) -> str:
    """One line about a generation and the cells that it left used."""
    stats = generation.stats
    first = "none" if stats.first_token_s is None else f"{stats.first_token_s:.2f} s"
    parts = [
        f"prompt {stats.prompt_tokens} tokens ({stats.reused_tokens} reused)",
        f"generated {stats.generated_tokens}",
        f"first token {first}",
        f"prefill {stats.prefill_tokens_per_s:.1f} tokens/s",
        f"decode {stats.decode_tokens_per_s:.1f} tokens/s",
        f"cells {executor['cells_used']}/{executor['cells_capacity']}",
    ]
    if executor["kv_capacity_bytes"]:  # 0 where the executor does not know
        parts.append(f"K/V {executor['kv_bytes'] / MIB:.1f} of {mib(executor['kv_capacity_bytes'])}")
    return " | ".join(parts)


def statistics(generation: Generation, executor: Mapping[str, Any]) -> dict[str, Any]:
    """The same for machines; times in seconds."""
    stats = generation.stats
    names = ("prompt_tokens", "reused_tokens", "evaluated_tokens", "generated_tokens", "first_token_s", "prefill_s",
             "decode_s", "prefill_tokens_per_s", "decode_tokens_per_s")  # fmt: skip
    cells = ("cells_used", "cells_capacity", "kv_bytes", "kv_capacity_bytes")
    return {**{name: getattr(stats, name) for name in names}, **{name: executor[name] for name in cells}}


def json_text(value: object) -> str:
    """JSON in one line; plain ASCII, so that every encoding can carry it."""
    return json.dumps(value, allow_nan=False)


def plain_options(config: GenConfig) -> dict[str, Any]:
    """All options of a generation as plain values; a bias of minus infinity, which JSON has not, is "-inf"."""
    sampler = config.sampler
    plain: dict[str, Any] = {field.name: getattr(sampler, field.name) for field in dataclasses.fields(sampler)}
    plain["logit_bias"] = {
        str(token): bias if math.isfinite(bias) else str(bias) for token, bias in sampler.logit_bias.items()
    }
    return {**plain, "max_tokens": config.max_tokens, "stop": config.stop, "ignore_eos": config.ignore_eos}


def text_table(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> str:
    """Rows, the first being the heads, as lines of columns equally wide; cells of the columns `right` end together."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip() + "\n")
    return "".join(lines)
