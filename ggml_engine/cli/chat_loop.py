"""A chat on a terminal: a line is a turn, the session is kept, Ctrl-C stops a reply and not the chat."""

from __future__ import annotations

import contextlib
import importlib
import sys
from typing import TYPE_CHECKING

import click

from ggml_engine.cli.boundary import error_line
from ggml_engine.cli.interrupts import Interrupts
from ggml_engine.cli.output import ProgressLine, TextOutput, statistics_line, tokens
from ggml_engine.cli.streaming import check_template, stream_text
from ggml_engine.errors import InputError, PoolFullError

if TYPE_CHECKING:
    from ggml_engine.control.config import GenConfig
    from ggml_engine.control.conversation import Conversation
    from ggml_engine.engine import Engine

PROMPT = "> "
EXIT = "/exit"
RESET = "/reset"


def chat(engine: Engine, config: GenConfig, system: str | None, *, quiet: bool) -> int:
    """Talk until /exit or the end of input; returns the exit code. Ctrl-C at the prompt raises KeyboardInterrupt."""
    check_template(engine)
    if sys.stdin is not None:
        sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal's
    with contextlib.suppress(ImportError):
        importlib.import_module("readline")  # gives `input` line editing and a history
    click.echo(f"{EXIT} leaves, {RESET} forgets the conversation, Ctrl-C stops a reply", err=True)
    conversation = engine.conversation(system)
    output = TextOutput()
    while (line := _ask()) is not None:
        if line == RESET:
            del conversation  # and its session: a cache may hold one only
            conversation = engine.conversation(system)
        elif line:
            _turn(engine, conversation, line, config, output, quiet=quiet)
    return 0


def _ask() -> str | None:
    """The next line, or None at the end."""
    try:
        if sys.stdout is not None and sys.stdout.isatty():
            line = input(PROMPT)
        else:
            click.echo(PROMPT, err=True, nl=False)
            line = sys.stdin.readline()
            if not line:
                raise EOFError
    except EOFError:
        click.echo(err=True)
        return None
    line = line.strip()
    return None if line == EXIT else line


def _turn(
    engine: Engine, conversation: Conversation, line: str, config: GenConfig, output: TextOutput, *, quiet: bool
) -> None:
    bar = ProgressLine("reading", tokens, above=engine.executor.options.max_batch_tokens)
    with Interrupts() as interrupts:
        try:
            reply = conversation.send(line, config)
            interrupts.on_request(reply.cancel)
            stream_text(reply, output, bar)
        except (InputError, PoolFullError) as error:
            # a bad or too long line; another one may do
            click.echo(error_line(error), err=True)
            return
    output.write("\n")
    if not quiet:
        click.echo(statistics_line(reply, engine.executor.stats()), err=True)
