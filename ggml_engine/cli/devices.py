"""`ggml-engine devices`: what a model can run on."""

from __future__ import annotations

from typing import Any

import click

from ggml_engine.cli.boundary import debug_option
from ggml_engine.cli.output import TextOutput, json_text, mib, one_line, text_table
from ggml_engine.cli.sections import SectionedCommand, option

COLUMNS = ("name", "kind", "description", "memory free", "memory total")


@click.command(cls=SectionedCommand, short_help="List the devices that a model can run on.")
@option("--json", "as_json", section="Output", is_flag=True, help="A JSON list; memory in bytes.")
@debug_option
def devices(as_json: bool) -> None:
    """List the devices that the installed ggml libraries know; any of the names can follow --device."""
    found = find_devices()
    if as_json:
        TextOutput().write(f"{json_text(found)}\n")
        return
    rows = [
        (
            one_line(device["name"]),
            device["kind"],
            one_line(device["description"]),
            mib(device["memory_free"]),
            mib(device["memory_total"]),
        )
        for device in found
    ]
    TextOutput().write(text_table([COLUMNS, *rows]))


def find_devices() -> list[dict[str, Any]]:
    """Name, kind, description and memory in bytes of every device."""
    from ggml_engine.ggml.backends import devices as all_devices  # noqa: PLC0415 - native
    from ggml_engine.ggml.library import load  # noqa: PLC0415

    return [
        {
            "name": device.name,
            "kind": device.kind,
            "description": device.description,
            "memory_free": device.memory_free,
            "memory_total": device.memory_total,
        }
        for device in all_devices(load())
    ]
