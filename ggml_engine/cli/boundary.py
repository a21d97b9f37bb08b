"""The edge of the process: every outcome of a command becomes an exit code, and every error one line on stderr.

0 done; 1 an error that the engine or the system raised on purpose; 2 a wrong use; 130 Ctrl-C; 141 nobody reads stdout
any more. Bugs are not caught: their traceback is wanted. `--debug` shows the others' too.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TextIO

import click

from ggml_engine.cli.output import one_line
from ggml_engine.cli.sections import option
from ggml_engine.errors import EngineError

ERROR: Final = 1
INTERRUPTED: Final = 130
READER_GONE: Final = 141  # as a shell reports a death by SIGPIPE


@dataclass(slots=True)
class Settings:
    """What the boundary must know of a command's options."""

    debug: bool = False


NATIVE_LOG: Final = "ggml_engine.native"


def _set_debug(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    ctx.ensure_object(Settings).debug = value
    # libllama warns of much that is no fault of the user's file, and that the engine has dealt with
    logging.getLogger(NATIVE_LOG).setLevel(logging.WARNING if value else logging.ERROR)


class _Lines(logging.Formatter):
    """Log records in the form of our own messages."""

    def format(self, record: logging.LogRecord) -> str:
        return f"ggml-engine: {record.levelname.lower()}: {one_line(record.getMessage())}"


def _show_warnings() -> None:
    if not logging.getLogger().handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(_Lines())
        logging.getLogger().addHandler(handler)


debug_option = option(
    "--debug",
    section="Output",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_set_debug,
    help="Show the traceback of an error, and what the libraries warn of.",
)


def exit_code(command: Callable[[Settings], Any]) -> int:
    """Run a command and turn whatever comes of it into an exit code. It gets the settings that --debug sets."""
    settings = Settings()
    _show_warnings()
    try:
        result = command(settings)
        if sys.stdout is not None:
            sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as end:
        return end.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        with contextlib.suppress(OSError):
            click.echo(err=True)
        return INTERRUPTED
    except BrokenPipeError:
        _silence(sys.stdout, sys.stderr)
        return READER_GONE
    except (EngineError, MemoryError, OSError) as error:
        _report(error, settings)
        return ERROR


def error_line(error: BaseException) -> str:
    """An error in one line."""
    text = str(error)
    if isinstance(error, MemoryError):
        text = f"out of memory {text}".rstrip()
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"ggml-engine: error: {one_line(text or type(error).__name__)}"


def _report(error: BaseException, settings: Settings) -> None:
    if isinstance(error, OSError):
        _silence(sys.stdout)  # a full disk, perhaps: what is held back would fail again at the exit
    with contextlib.suppress(OSError):
        if settings.debug:
            click.echo("".join(traceback.format_exception(error)), err=True, nl=False)
        click.echo(error_line(error), err=True)
    _silence(sys.stderr)


def _silence(*streams: TextIO | None) -> None:
    """Let what a stream holds back go nowhere, so that its flush at the exit of Python cannot fail."""
    for stream in streams:
        if stream is None:
            continue
        try:
            stream.flush()
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream.fileno())
                os.close(nowhere)
