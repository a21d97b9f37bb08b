"""`ggml-engine pull`: fetch a model file from the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from ggml_engine.cli.boundary import debug_option
from ggml_engine.cli.output import ProgressLine, TextOutput, mib
from ggml_engine.cli.sections import OTHER, SectionedCommand, option

if TYPE_CHECKING:
    from ggml_engine.hub import Progress


@click.command(cls=SectionedCommand, short_help="Fetch a model from the Hugging Face hub.")
@click.argument("source", metavar="REPO[:FILE]")
@option("--directory", section=OTHER, metavar="DIR", show_default="the user's cache", help="Where models are kept.")
@option("--revision", section=OTHER, metavar="NAME", show_default="main", help="Branch, tag or commit.")
@debug_option
def pull(source: str, directory: str | None, revision: str | None) -> None:
    """Fetch a model file and print its path, ready for `ggml-engine run`.

    FILE is a file's name or a quantisation such as Q4_K_M; without it the only model of REPO is taken, or its Q4_K_M.
    What an interrupted pull has fetched is kept, and the next one goes on from there. Needs the extra `pull`.
    """
    bar = ProgressLine("fetching", mib)
    try:
        path = fetch(source, bar, directory, revision)
    finally:
        bar.clear()
    TextOutput().write(f"{path}\n")


def fetch(source: str, progress: Progress, directory: str | None, revision: str | None) -> Path:
    """`hub.pull`, imported only now."""
    from ggml_engine import hub  # noqa: PLC0415 - the client of the hub takes a second

    return hub.pull(source, progress=progress, directory=directory, revision=revision)
