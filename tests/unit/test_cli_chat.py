"""The chat on a terminal, with an engine that is none."""

from __future__ import annotations

import builtins
import io
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from fake_engine import FakeEngine

import ggml_engine.cli.run as run_module
from ggml_engine.cli.main import main
from ggml_engine.errors import ComputeError, ContextLengthError


class Terminal:
    """Types `lines`; an exception among them is raised at the prompt. After them the input ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, lines: list[str | type[BaseException]]) -> None:
        self.prompts: list[str] = []
        self._lines: Iterator[str | type[BaseException]] = iter(lines)
        self.out = io.StringIO()
        stdin = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
        for stream in (stdin, self.out):
            stream.isatty = lambda: True  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stdin", stdin)
        monkeypatch.setattr(sys, "stdout", self.out)
        monkeypatch.setattr(builtins, "input", self._input)

    def _input(self, prompt: str) -> str:
        self.prompts.append(prompt)
        line = next(self._lines, EOFError)
        if isinstance(line, str):
            return line
        raise line


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    engine = FakeEngine()
    monkeypatch.setattr(run_module, "load_engine", engine.load)
    return engine


def test_a_line_is_a_turn_of_one_conversation_and_the_end_of_input_ends_with_0(monkeypatch, engine, capsys) -> None:
    terminal = Terminal(monkeypatch, ["hello", "  ", "and you?"])
    assert main(["run", "m", "--system", "s"]) == 0
    assert engine.asked[1:] == [("conversation", "s"), ("send", "hello"), ("send", "and you?")]
    assert terminal.out.getvalue() == "Hello there\nHello there\n"
    assert capsys.readouterr().err.count("prompt 7 tokens (2 reused)") == 2
    assert engine.closed


def test_exit_ends_with_0_and_reset_begins_a_new_conversation(monkeypatch, engine) -> None:
    Terminal(monkeypatch, ["hello", "/reset", "again", "/exit", "never"])
    assert main(["run", "m", "--quiet"]) == 0
    assert [asked for asked in engine.asked if asked[0] != "load"] == [
        ("conversation", None), ("send", "hello"), ("conversation", None), ("send", "again"),
    ]  # fmt: skip


def test_ctrl_c_at_the_prompt_ends_with_130(monkeypatch, engine, capsys) -> None:
    Terminal(monkeypatch, [KeyboardInterrupt])
    assert main(["run", "m"]) == 130
    assert capsys.readouterr().err.endswith("reply\n\n")
    assert engine.closed


def test_ctrl_c_in_a_reply_stops_the_reply_and_gives_the_prompt_back(monkeypatch, engine) -> None:
    engine.pieces = ["Hel", lambda: signal.raise_signal(signal.SIGINT), "never"]
    terminal = Terminal(monkeypatch, ["hello", "again"])
    assert main(["run", "m", "--quiet"]) == 0
    assert terminal.out.getvalue() == "Hel\nHel\n"
    assert len(terminal.prompts) == 3


def test_a_turn_that_does_not_fit_is_told_and_the_chat_goes_on(monkeypatch, engine, capsys) -> None:
    def too_long() -> None:
        engine.pieces = ["ok"]
        raise ContextLengthError(90, 64)

    engine.pieces = [too_long]
    terminal = Terminal(monkeypatch, ["hello", "short"])
    assert main(["run", "m", "--quiet"]) == 0
    assert "error: the prompt needs 90 tokens, the context holds 64" in capsys.readouterr().err
    assert terminal.out.getvalue() == "ok\n"


def test_an_engine_that_broke_ends_the_chat(monkeypatch, engine) -> None:
    def fail() -> Any:
        raise ComputeError("it broke")

    engine.pieces = [fail]
    Terminal(monkeypatch, ["hello", "again"])
    assert main(["run", "m"]) == 1


def test_a_chat_with_a_model_without_a_template_does_not_open(monkeypatch, engine, capsys) -> None:
    engine.has_template = False
    terminal = Terminal(monkeypatch, ["hello"])
    assert main(["run", "m"]) == 1
    assert "--raw" in capsys.readouterr().err
    assert terminal.prompts == []


def test_where_stdout_is_no_terminal_the_prompt_goes_to_stderr(monkeypatch, engine, capsys) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"hello\n\xff\n"), encoding="utf-8")
    stdin.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stdin", stdin)
    assert main(["run", "m", "--quiet"]) == 0
    out, err = capsys.readouterr()
    assert out == "Hello there\nHello there\n"
    assert err.count("> ") == 3
    assert engine.asked[-1] == ("send", "\ufffd")
