"""`ggml-engine models`: which architectures run, and how."""

from __future__ import annotations

import click

from ggml_engine.cli.boundary import debug_option
from ggml_engine.cli.output import TextOutput, json_text, text_table
from ggml_engine.cli.sections import SectionedCommand, option

COLUMNS = ("architecture", "runs", "kind", "models")


@click.command(cls=SectionedCommand, short_help="List the architectures that run, and how.")
@option("--json", "as_json", section="Output", is_flag=True, help="A JSON list; engine is native, llama or null.")
@debug_option
def models(as_json: bool) -> None:
    """List the architectures (`general.architecture` of a GGUF file) that run here, and how.

    Native ones have a graph of this package; others run through libllama, as with --engine llama; what is no decoder
    of text does not run.
    """
    from ggml_engine.models.catalogue import catalogue  # noqa: PLC0415 - help needs none of it

    entries = catalogue()
    if as_json:
        plain = [
            {"architecture": entry.name, "engine": entry.engine, "kind": entry.kind.value, "models": entry.models}
            for entry in entries
        ]
        TextOutput().write(f"{json_text(plain)}\n")
        return
    runs = {"native": "native", "llama": "through libllama", None: "no"}
    rows = [(entry.name, runs[entry.engine], entry.kind.value, entry.models) for entry in entries]
    order = list(runs.values())
    rows.sort(key=lambda row: order.index(row[1]))
    TextOutput().write(text_table([COLUMNS, *rows]))
