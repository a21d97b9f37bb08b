"""`ggml-engine bench`: measure models on this machine, also beside llama.cpp.

Owns the options, what is printed and the exit code; what is measured, and how, is `ggml_engine.bench`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ggml_engine.cli import output
from ggml_engine.cli.bench_table import HEADS, case_table, heading
from ggml_engine.cli.boundary import ERROR, INTERRUPTED, debug_option
from ggml_engine.cli.execution_options import ATTENTION_FORMS, EXECUTION, PREFILL_LAYOUTS, threads_option
from ggml_engine.cli.options import flag
from ggml_engine.cli.sections import Decorated, SectionedCommand, option, together
from ggml_engine.ggml.sampler_config import MAX_SEED

if TYPE_CHECKING:
    from ggml_engine.bench.report import Report
    from ggml_engine.bench.setting import Setting, Sizes

CASES: Final = tuple(HEADS)
_WHAT: Final = "What is measured"
_SIZES: Final = "Sizes"
_MOST: Final = 1 << 24  # tokens, sequences or steps
REPETITIONS: Final = 5
QUICK_REPETITIONS: Final = 2
_MOST_SEQUENCES: Final = 256  # of a context of libllama


Callback = Callable[[click.Context, click.Parameter, Any], Any]


def _counts(least: int, most: int = _MOST) -> Callback:
    """Numbers with commas between them, none of them out of range."""

    def convert(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
        if value is None:
            return None
        texts = [text.strip() for text in value.split(",")]
        if not all(text.isascii() and text.isdecimal() and least <= int(text[:12]) <= most for text in texts):
            raise click.BadParameter(f"{value!r} is no list of numbers from {least} to {most}, like 128,512")
        return tuple(map(int, texts))

    return convert


def _cases(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[str, ...]:
    """Names of cases with commas between them, all of them known."""
    names = CASES if value is None else tuple(name.strip() for name in value.split(","))
    if unknown := [name for name in names if name not in CASES]:
        raise click.BadParameter(f"there is no case {unknown[0]!r}; the cases are {', '.join(CASES)}")
    return names


def _size(name: str, text: str, default: str) -> Callable[[Decorated], Decorated]:
    return option(
        flag(name), section=_SIZES, type=click.IntRange(1, _MOST), metavar="N", show_default=default, help=text
    )


def _sizes(name: str, text: str, default: str, callback: Callback) -> Callable[[Decorated], Decorated]:
    return option(flag(name), section=_SIZES, metavar="N,...", callback=callback, show_default=default, help=text)


_SEQUENCES: Final = _counts(1, _MOST_SEQUENCES)
run_options = together(
    option(
        "--only",
        section=_WHAT,
        callback=_cases,
        metavar="CASE,...",
        show_default="all",
        help=f"Cases to run: {', '.join(CASES)}.",
    ),
    option(
        "--against",
        section=_WHAT,
        type=click.Choice(("llama.cpp",)),
        help="Run llama.cpp beside ours, in all its modes.",
    ),
    option(
        "--repetitions",
        section=_WHAT,
        type=click.IntRange(1, 1000),
        metavar="N",
        show_default="5; 2 with --quick",
        help="Repetitions that count, after one that does not.",
    ),
    option(
        "--quick",
        section=_WHAT,
        is_flag=True,
        help="Tiny sizes where none are given: shows that everything runs, its times say nothing.",
    ),
    option(
        "--seed",
        section=_WHAT,
        type=click.IntRange(0, MAX_SEED),
        metavar="N",
        default=0,
        show_default=True,
        help="Seed of the tokens.",
    ),
)
size_options = together(
    _sizes("prompts", "Prompts of prefill, in tokens.", "128,512,2048", _counts(1)),
    _sizes("histories", "Histories of decode.", "0,512,2048,4096", _counts(0)),
    _sizes("widths", "Sequences of separate.", "2,4,8,16,32", _SEQUENCES),
    _size("width_history", "History of each sequence of separate.", "256"),
    _sizes("shared_widths", "Sequences of shared.", "8,16", _SEQUENCES),
    _size("shared_prefix", "Prefix of shared.", "2048"),
    _size("parked", "Cells that are parked beside a sequence.", "8192"),
    _size("clone_prefix", "Prefix of clone.", "4096"),
    _size("warm_prompt", "Prompt of warm.", "2048"),
    _size("stream_prompt", "Long prompt of stream.", "6000"),
    _size("steps", "Decode steps of a repetition; fewer where a step has many sequences.", "32"),
)


@click.command(cls=SectionedCommand, short_help="Measure the speed of models, also beside llama.cpp.")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@run_options
@size_options
@threads_option(EXECUTION)
@option(
    "--capacity",
    section=EXECUTION,
    type=click.IntRange(1, _MOST),
    metavar="N",
    show_default="what a row needs",
    help="Cells of ours, at the least.",
)
@option(
    "--attention",
    section=EXECUTION,
    type=click.Choice(ATTENTION_FORMS),
    default="auto",
    show_default=True,
    help="Form of attention of ours.",
)
@option(
    "--prefill-weights",
    section=EXECUTION,
    type=click.Choice(PREFILL_LAYOUTS),
    default="off",
    show_default=True,
    help="Quantised weights of ours a second time, as this type, for steps of 8 tokens and more.",
)
@option(
    "--device",
    section=EXECUTION,
    metavar="NAME",
    default="auto",
    show_default=True,
    help="auto, cpu, metal, or a name that `ggml-engine devices` shows; llama.cpp takes all devices or none.",
)
@option("--json", "as_json", section="Output", is_flag=True, help="One JSON document in one line, in place of tables.")
@option(
    "--plot",
    section="Output",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw prefill and decode as .png or .svg; needs the extra bench.",
)
@debug_option
def bench(models: tuple[str, ...], as_json: bool, plot: Path | None, only: tuple[str, ...], **options: Any) -> int:
    """Measure MODELs (GGUF files or known names) on this machine, which should do nothing else meanwhile.

    Random tokens, no sampling, K/V in f16, one synchronisation per step, as in llama.cpp's own llama-bench and
    llama-batched-bench. With --against llama.cpp its four modes (flash attention on and off, K/V split and unified) do
    the same steps in the same run: in every repetition each takes its turn, and a ratio is formed repetition by
    repetition. Ctrl-C ends with what was measured so far.

    Exit codes: 0, 1 for an error in any case, 2 for a wrong use, 130 after Ctrl-C.
    """
    if os.environ.pop("OPENBLAS_CORETYPE", None) is not None:  # before numpy is imported, and for child processes
        click.echo("OPENBLAS_CORETYPE is ignored: numpy is measured as it is by default", err=True)
    report, settings = _prepared(models, plot, options)
    stream = output.TextOutput()
    if not as_json:
        stream.write(heading(report.machine, report.options))
    try:
        for setting, model in zip(settings, report, strict=True):
            _measure(setting, model, only, None if as_json else stream)
    except KeyboardInterrupt:
        report.interrupted = True
    if as_json:
        stream.write(f"{output.json_text(report.plain())}\n")
    if plot is not None:
        _draw(report, plot)
    if report.interrupted:
        click.echo("interrupted: what was measured is above", err=True)
        return INTERRUPTED
    return ERROR if any(model.failed for model in report) else 0


def _prepared(models: Sequence[str], plot: Path | None, options: dict[str, Any]) -> tuple[Report, list[Setting]]:
    """All that can be refused is, before anything is measured."""
    if plot is not None:
        from ggml_engine.bench.plot import check_plot  # noqa: PLC0415

        check_plot(plot)
    from ggml_engine.bench.machine import describe_machine  # noqa: PLC0415 - native
    from ggml_engine.bench.report import ModelReport, Report  # noqa: PLC0415
    from ggml_engine.bench.setting import Setting  # noqa: PLC0415
    from ggml_engine.known_models import find_model  # noqa: PLC0415

    sizes = chosen_sizes(options)
    repetitions = options["repetitions"] or (QUICK_REPETITIONS if options["quick"] else REPETITIONS)
    settings = [
        Setting(
            find_model(name), sizes, repetitions, options["against"] is not None, options["threads"],
            options["device"], options["attention"], options["capacity"] or 0, options["seed"],
            options["prefill_weights"],
        )
        for name in models
    ]  # fmt: skip
    return Report(describe_machine(), settings[0].plain(), [ModelReport(name) for name in models]), settings


def chosen_sizes(options: dict[str, Any]) -> Sizes:
    """The sizes that were asked for, and the defaults of the others."""
    import dataclasses  # noqa: PLC0415

    from ggml_engine.bench.setting import QUICK, Sizes  # noqa: PLC0415 - native

    names = {field.name for field in dataclasses.fields(Sizes)}
    given = {name: value for name, value in options.items() if name in names and value is not None}
    return dataclasses.replace(QUICK if options["quick"] else Sizes(), **given)


def _measure(setting: Setting, model: Any, names: Sequence[str], stream: output.TextOutput | None) -> None:
    """Run the cases, each with its table as soon as it is done, or is interrupted."""
    from ggml_engine.bench.cases import choose, run  # noqa: PLC0415 - native

    line = output.StatusLine()
    setting.progress = line.show
    shown: set[str] = set()

    def show(case: str) -> None:
        line.clear()
        shown.add(case)
        if stream is not None:
            stream.write(case_table(model, case))

    try:
        run(setting, model, choose(names), show)
    finally:
        line.clear()
        for case in model.cases:
            if case not in shown:
                show(case)


def _draw(report: Report, path: Path) -> None:
    from ggml_engine.bench.plot import draw  # noqa: PLC0415 - needs matplotlib

    if draw(report, path):
        click.echo(f"drawn: {path}", err=True)
    else:
        click.echo("nothing to draw: the picture shows prefill, decode, separate and shared", err=True)
