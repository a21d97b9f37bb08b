"""What is printed: streams in any encoding, bars only on terminals, no control characters from a model."""

from __future__ import annotations

import io
import sys

import pytest

from ggml_engine.cli.output import ProgressLine, TextOutput, mib, one_line, tokens, visible


def stream(encoding: str, *, terminal: bool) -> io.TextIOWrapper:
    made = io.TextIOWrapper(io.BufferedWriter(io.BytesIO()), encoding=encoding, errors="strict", newline="")
    made.isatty = lambda: terminal  # type: ignore[method-assign]
    return made


def written(made: io.TextIOWrapper) -> bytes:
    """What has left all buffers."""
    assert isinstance(made.buffer, io.BufferedWriter)
    assert isinstance(made.buffer.raw, io.BytesIO)
    return made.buffer.raw.getvalue()


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "utf-16", "utf-8"])
def test_files_and_pipes_get_utf_8_at_once_whatever_the_encoding(monkeypatch, encoding: str) -> None:
    out = stream(encoding, terminal=False)
    monkeypatch.setattr(sys, "stdout", out)
    output = TextOutput()
    output.write("é🎉\x1b[0m\n")
    assert written(out) == "é🎉\x1b[0m\n".encode()
    output.write("path-\udcff\n")
    assert written(out).endswith(b"path-\xff\n")


def test_a_write_that_takes_a_part_is_gone_on_with(monkeypatch) -> None:
    class Slow(io.BytesIO):
        def write(self, data) -> int:
            return super().write(bytes(data[:3]))

    slow = Slow()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(slow, encoding="utf-8"))
    TextOutput().write("abcdefgh")
    assert slow.getvalue() == b"abcdefgh"


def test_a_terminal_gets_what_it_can_show_and_no_control_characters(monkeypatch) -> None:
    out = stream("ascii", terminal=True)
    monkeypatch.setattr(sys, "stdout", out)
    TextOutput().write("a🎉\t\x1b[2J\n")
    assert written(out) == b"a?\t\\x1b[2J\n"


def test_visible_text_keeps_line_ends_and_tabs_and_one_line_does_not() -> None:
    assert visible("a\n\tb\r\x00\x7f\x9bc") == "a\n\tb\\x0d\\x00\\x7f\\x9bc"
    assert one_line("a\n\tb\x1b  c") == "a b\\x1b c"


def test_a_bar_is_drawn_in_place_on_a_terminal_and_wiped(monkeypatch) -> None:
    err = io.StringIO()
    err.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", err)
    bar = ProgressLine("loading", mib)
    bar(0, 4 << 20)
    bar(1 << 20, 4 << 20)
    drawn = err.getvalue()
    assert drawn.count("\r") == 2
    assert "\n" not in drawn
    assert drawn.endswith("loading [######------------------]  25% of 4.0 MiB")
    bar(1 << 20, 4 << 20)
    assert err.getvalue() == drawn, "an equal bar is not drawn again"
    bar.clear()
    wiped = err.getvalue()[len(drawn) :]
    assert wiped.startswith("\r ")
    assert wiped.endswith("\r")
    bar.clear()
    assert err.getvalue() == drawn + wiped


def test_a_bar_copes_with_an_unknown_total_and_one_that_was_too_small(monkeypatch) -> None:
    err = io.StringIO()
    err.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", err)
    ProgressLine("fetching", mib)(3 << 20, None)
    assert err.getvalue() == "\rfetching 3.0 MiB"
    ProgressLine("fetching", mib)(3, 2)
    assert "100%" in err.getvalue()


def test_no_bar_is_drawn_off_a_terminal_or_for_a_prompt_of_one_step(monkeypatch, capsys) -> None:
    ProgressLine("loading", mib)(1, 2)
    assert capsys.readouterr().err == ""
    err = io.StringIO()
    err.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", err)
    bar = ProgressLine("reading", tokens, above=512)
    bar(0, 512)
    assert err.getvalue() == ""
    bar(0, 513)
    assert "of 513 tokens" in err.getvalue()
    monkeypatch.setattr(sys, "stderr", None)
    ProgressLine("loading", mib)(1, 2)
