"""Options in sections, so that fifty of them can be read: a click option knows its section, a command prints by it.

Knows no option of its own. Sections appear in the order in which their first options were declared.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
Decorator = Callable[[Decorated], Decorated]

OTHER = "Options"


class SectionOption(click.Option):
    """An option of a section."""

    def __init__(self, *arguments: Any, section: str = OTHER, **attributes: Any) -> None:
        self.section = section
        super().__init__(*arguments, **attributes)


class SectionedCommand(click.Command):
    """A command whose help shows its options section by section."""

    def sections(self, ctx: click.Context) -> dict[str, list[click.Option]]:
        """The visible options by section, click's own `--help` last."""
        found: dict[str, list[click.Option]] = {}
        others = []
        for param in self.get_params(ctx):
            if isinstance(param, SectionOption) and not param.hidden:
                found.setdefault(param.section, []).append(param)
            elif isinstance(param, click.Option) and not param.hidden:
                others.append(param)
        if others:
            found.setdefault(OTHER, []).extend(others)
        return found

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options into the formatter."""
        for section, options in self.sections(ctx).items():
            with formatter.section(section):
                records = [option.get_help_record(ctx) for option in options]
                formatter.write_dl([record for record in records if record is not None])


def option(*declarations: str, section: str, **attributes: Any) -> Callable[[Decorated], Decorated]:
    """`click.option` with a section."""
    return click.option(*declarations, cls=SectionOption, section=section, **attributes)


def together(*decorators: Callable[[Decorated], Decorated]) -> Callable[[Decorated], Decorated]:
    """One decorator that declares the options of all, in this order."""

    def decorate(function: Decorated) -> Decorated:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return decorate
