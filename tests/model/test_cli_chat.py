"""The chat on a real terminal, with a real model."""

from __future__ import annotations

import subprocess

from cli_process import TIMEOUT_S, Terminal, on_terminal
from real_models import smollm2

S = str(smollm2())
OPTIONS = ("--greedy", "--threads", "1")
STATISTICS = rb"prompt (\d+) tokens \((\d+) reused\) \| generated (\d+)[^\r]*\r\n"


def interrupted_at_prompt(child: subprocess.Popen[bytes], terminal: Terminal) -> int:
    """The exit code after Ctrl-C, which is pressed again if need be: CPython's readline does not notice one that comes
    after it has shown the prompt and before it waits for a key."""
    for _ in range(5):
        terminal.type(b"\x03")
        try:
            return child.wait(TIMEOUT_S / 10)
        except subprocess.TimeoutExpired:
            continue
    return child.wait(0)


def test_turns_keep_their_session_and_exit_ends_with_0() -> None:
    with on_terminal("run", S, *OPTIONS, "-n", "8") as (child, terminal):
        terminal.read_until(rb"> ")
        terminal.type(b"Hi, who are you?\n")
        n_first, n_reused, n_generated = map(int, terminal.read_until(STATISTICS).groups())
        assert n_reused == 0
        terminal.read_until(rb"> ")
        terminal.type(b"And where?\n")
        n_second, n_reused, _ = map(int, terminal.read_until(STATISTICS).groups())
        assert n_first <= n_reused < n_second
        assert n_second > n_first + n_generated
        terminal.read_until(rb"> ")
        terminal.type(b"/reset\n")
        terminal.read_until(rb"> ")
        terminal.type(b"Hi, who are you?\n")
        again = list(map(int, terminal.read_until(STATISTICS).groups()))
        assert again[:2] == [n_first, 0]
        terminal.read_until(rb"> ")
        terminal.type(b"/exit\n")
        assert child.wait(TIMEOUT_S) == 0


def test_ctrl_c_stops_a_reply_and_at_the_prompt_the_chat() -> None:
    with on_terminal("run", S, *OPTIONS, "--ignore-eos") as (child, terminal):
        terminal.read_until(rb"> ")
        terminal.type(b"Tell a story.\n")
        terminal.read_until(rb"Tell a story\.\r\n.*[A-Za-z]{3}")
        terminal.type(b"\x03")
        terminal.read_until(STATISTICS)
        terminal.read_until(rb"> ")
        assert interrupted_at_prompt(child, terminal) == 130


def test_ctrl_d_at_the_prompt_ends_with_0() -> None:
    with on_terminal("run", S, *OPTIONS) as (child, terminal):
        terminal.read_until(rb"> ")
        terminal.type(b"\x04")
        assert child.wait(TIMEOUT_S) == 0


def test_a_turn_that_does_not_fit_leaves_the_chat_open() -> None:
    with on_terminal("run", S, *OPTIONS, "--ctx", "64", "-n", "4") as (child, terminal):
        terminal.read_until(rb"> ")
        terminal.type(b"word " * 60 + b"\n")
        terminal.read_until(rb"ggml-engine: error: the prompt needs \d+ tokens, the context holds 64\r\n")
        terminal.read_until(rb"> ")
        terminal.type(b"Hi.\n")
        terminal.read_until(STATISTICS)
        terminal.read_until(rb"> ")
        terminal.type(b"/exit\n")
        assert child.wait(TIMEOUT_S) == 0
