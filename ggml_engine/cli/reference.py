"""`docs/cli.md` from the commands themselves: `python -m ggml_engine.cli.reference > docs/cli.md`.

Made of click's parameters and not of its formatted help, which differs between versions of click and widths of
terminals. A test regenerates the page and compares.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator

import click

from ggml_engine.cli.main import PROGRAM, cli
from ggml_engine.cli.sections import SectionedCommand

_FIRST_LINES = f"""\
# The command line

Made by `python -m ggml_engine.cli.reference`; change the commands, not this page.
`{PROGRAM} COMMAND --help` shows the same on a terminal.
"""


def reference() -> str:
    """The page, in Markdown."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield _FIRST_LINES
    yield f"{_text(cli.help)}\n"
    yield from _table([param for param in cli.params if isinstance(param, click.Option)], click.Context(cli))
    for name, command in cli.commands.items():
        yield from _command(name, command)


def _command(name: str, command: click.Command) -> Iterator[str]:
    ctx = click.Context(command, info_name=name)
    arguments = [param for param in command.params if isinstance(param, click.Argument)]
    usage = " ".join(_argument(argument) for argument in arguments)
    yield f"## {PROGRAM} {name}\n"
    yield f"```\n{' '.join(filter(None, (PROGRAM, name, '[OPTIONS]', usage)))}\n```\n"
    yield f"{_text(command.help)}\n"
    if isinstance(command, SectionedCommand):
        for section, options in command.sections(ctx).items():
            shown = [option for option in options if "--help" not in option.opts]
            if shown:
                yield f"### {section}\n"
                yield from _table(shown, ctx)


def _argument(argument: click.Argument) -> str:
    name = argument.metavar or str(argument.name).upper()
    return name if argument.required else f"[{name}]"


def _table(options: list[click.Option], ctx: click.Context) -> Iterator[str]:
    yield "| option | meaning | default |\n| --- | --- | --- |"
    for option in options:
        spelling = ", ".join(option.opts)
        if option.secondary_opts:
            spelling += " / " + ", ".join(option.secondary_opts)
        cells = (f"`{spelling} {_metavar(option)}".rstrip() + "`", option.help or "", shown_default(option, ctx))
        yield f"| {' | '.join(map(_cell, cells))} |"
    yield ""


def _metavar(option: click.Option) -> str:
    if option.is_flag:
        return ""
    if isinstance(option.type, click.Choice):
        return "|".join(option.type.choices)
    return option.metavar or "VALUE"


def shown_default(option: click.Option, ctx: click.Context) -> str:
    """The default as help shows it; empty where there is none to show."""
    if isinstance(option.show_default, str):
        return option.show_default
    default = option.get_default(ctx) if option.show_default else None
    if isinstance(default, bool):
        return (option.opts if default else option.secondary_opts)[0]
    return "" if default is None else str(default)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _text(text: str | None) -> str:
    return inspect.cleandoc(text or "")


if __name__ == "__main__":
    sys.stdout.write(reference())
