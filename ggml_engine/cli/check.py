"""`ggml-engine check`: run a model in several ways and compare.

Owns the options, the table and the exit code; the check itself is `ggml_engine.reference.check`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Final

import click

from ggml_engine.cli import output
from ggml_engine.cli.boundary import ERROR, debug_option
from ggml_engine.cli.execution_options import KV_TYPES, threads_option
from ggml_engine.cli.sections import OTHER, SectionedCommand, option
from ggml_engine.ggml.sampler_config import MAX_SEED

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ggml_engine.reference.check import CheckRow

COLUMNS: Final = ("mode", "way", "compared with", "largest difference", "error", "bound", "result")


@click.command(cls=SectionedCommand, short_help="Compare a model's logits with libllama's and with numpy's.")
@click.argument("model")
@option(
    "--tokens",
    "n_tokens",
    section=OTHER,
    type=click.IntRange(min=1),
    metavar="N",
    default=96,
    show_default=True,
    help="Length of the sequence; past a model's window its layers with a window are checked.",
)
@option(
    "--seed",
    section=OTHER,
    type=click.IntRange(0, MAX_SEED),
    metavar="N",
    default=0,
    show_default=True,
    help="Seed of the tokens.",
)
@option(
    "--attention",
    section=OTHER,
    type=click.Choice(("both", "matmul", "flash")),
    default="both",
    show_default=True,
    help="Forms of attention to check; deterministic mode goes with matmul.",
)
@option(
    "--kv-type",
    section=OTHER,
    type=click.Choice(KV_TYPES),
    default="f16",
    show_default=True,
    help="Number type of K and V.",
)
@threads_option(OTHER)
@option("--json", "as_json", section="Output", is_flag=True, help="A JSON list in place of the table.")
@debug_option
def check(model: str, as_json: bool, **options: Any) -> int:
    """Run MODEL in several ways on random tokens and compare the logits.

    Alone in one step and in others, batched, cloned, rewound and around its window, in each form of attention and in
    deterministic mode: with libllama always, and with attention written out in numpy where the model is small enough.
    The error is the mean squared difference over the variance of the logits, of the worst token; a bound of 0 asks for
    equal bits. Runs on the CPU.

    Exit codes: 0 when all is within its bound, 1 when something is not (or for an error), 2 for a wrong use.
    """
    bar = output.ProgressLine("checking", lambda n: f"{n} runs")
    try:
        rows = check_rows(model, progress=bar, **options)
    finally:
        bar.clear()
    output.TextOutput().write(f"{output.json_text([_plain(row) for row in rows])}\n" if as_json else _table(rows))
    n_failed = sum(not row.ok for row in rows)
    if n_failed:
        click.echo(
            f"{n_failed} of {sum(row.bound is not None for row in rows)} comparisons are past their bound", err=True
        )
    return ERROR if n_failed else 0


def check_rows(model: str, **options: Any) -> list[CheckRow]:
    """`check_model` of a file or a known name, imported only now."""
    from ggml_engine.known_models import find_model  # noqa: PLC0415
    from ggml_engine.reference.check import check_model  # noqa: PLC0415 - native

    return check_model(find_model(model), **options)


def _plain(row: CheckRow) -> dict[str, Any]:
    """For JSON, which has no infinity: null, and `ok` says that it is past the bound."""
    values = dataclasses.asdict(row)
    return {
        key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in values.items()
    }


def _table(rows: Sequence[CheckRow]) -> str:
    cells = [COLUMNS, *(_cells(row) for row in rows if row.bound is not None)]
    notes = [
        f"not compared: {row.mode}, {row.way}, with {row.against}: {output.one_line(row.note)}"
        for row in rows
        if row.note
    ]
    return output.text_table(cells) + "".join(f"{note}\n" for note in notes)


def _cells(row: CheckRow) -> tuple[str, ...]:
    return (
        row.mode,
        row.way,
        row.against,
        _number(row.difference),
        _number(row.error),
        _number(row.bound),
        "ok" if row.ok else "FAIL",
    )


def _number(value: float | None) -> str:
    return "0" if value == 0 else f"{value:.2g}"
