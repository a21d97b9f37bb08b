"""The command `ggml-engine`: the group of its commands, and its entry.

Importing this loads nothing native: each command imports what it needs when it runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

import click

from ggml_engine.cli.batch import batch
from ggml_engine.cli.bench import bench
from ggml_engine.cli.boundary import Settings, exit_code
from ggml_engine.cli.check import check
from ggml_engine.cli.devices import devices
from ggml_engine.cli.embed import embed
from ggml_engine.cli.models import models
from ggml_engine.cli.pull import pull
from ggml_engine.cli.run import run
from ggml_engine.cli.serve import serve

PROGRAM = "ggml-engine"


def _show_version(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        from ggml_engine.cli.version import version_line  # noqa: PLC0415 - opens the libraries

        click.echo(version_line())
        ctx.exit()


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the versions of ggml-engine, ggml and llama-cpp-python.",
)
def cli() -> None:
    """Run GGUF language models in a Python process."""


for _command in (run, serve, batch, embed, pull, devices, models, check, bench):
    cli.add_command(_command)


def main(args: Sequence[str] | None = None) -> int:
    """Run the command line (`sys.argv` by default) and return its exit code."""
    if "_GGML_ENGINE_COMPLETE" in os.environ:
        cli.main(prog_name=PROGRAM)  # shell completion is click's own
    given = list(sys.argv[1:] if args is None else args)

    def command(settings: Settings) -> object:
        # not `cli.main`: that swallows a broken pipe with code 1, and expands * and ~ in prompts on Windows
        with cli.make_context(PROGRAM, given, obj=settings) as ctx:
            return cli.invoke(ctx)

    return exit_code(command)
