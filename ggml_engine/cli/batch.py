"""`ggml-engine batch`: many prompts in one runner.

Owns the options and the order of a batch: all checked, model loaded, rounds run, results handed on as they come.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import click

from ggml_engine.cli import text_input
from ggml_engine.cli.batch_input import BatchPrompt, Defaults, from_arguments, from_lines
from ggml_engine.cli.batch_output import OrderedTexts, Report, TextFiles, check_places, result_name, row
from ggml_engine.cli.batch_table import table
from ggml_engine.cli.boundary import ERROR, INTERRUPTED, debug_option, error_line
from ggml_engine.cli.execution_options import execution_options, load_options
from ggml_engine.cli.interrupts import Interrupts
from ggml_engine.cli.options import generation_config, generation_options, sampling_options, with_seed
from ggml_engine.cli.output import ProgressLine
from ggml_engine.cli.prompt_options import PROMPT, check_template_options, template_options
from ggml_engine.cli.run import loaded, tell_engine
from ggml_engine.cli.sections import SectionedCommand, option, together
from ggml_engine.cli.streaming import check_template
from ggml_engine.errors import CancelledError, EngineError

if TYPE_CHECKING:
    from ggml_engine.control.config import GenConfig
    from ggml_engine.control.rounds import PromptRounds, RoundPrompt, RoundResult
    from ggml_engine.engine import Engine

BATCH = "Batch"
OUTPUT = "Output"

_prompt_options = together(
    option(
        "--prompts-file",
        section=PROMPT,
        metavar="FILE",
        help="Prompts from a file, one JSON object a line; - is stdin.",
    ),
    template_options,
)
_batch_options = together(
    option(
        "--prefix-cache-entries",
        section=BATCH,
        type=click.IntRange(min=0),
        metavar="N",
        default=0,
        show_default=True,
        help="Keep the K and V of the first N prompts for later rounds; 0 keeps none.",
    ),
    option(
        "--prompt-rounds",
        section=BATCH,
        type=click.IntRange(min=1),
        metavar="N",
        default=1,
        show_default=True,
        help="Run all prompts so many times, one round after the other.",
    ),
    option(
        "--max-decode-sequences",
        section=BATCH,
        type=click.IntRange(min=1),
        metavar="N",
        show_default="all",
        help="Most answers that get their next token in one step; more take turns.",
    ),
)
_output_options = together(
    option(
        "--out-prefix",
        section=OUTPUT,
        metavar="PREFIX",
        help="Texts to files PREFIX-PROMPT-ROUND.txt, not to stdout.",
    ),
    option("--report", section=OUTPUT, metavar="FILE", help="A line of JSON for each prompt and round to a file."),
    option("--overwrite", section=OUTPUT, is_flag=True, help="Replace files that are there."),
    option("--json", "as_json", section=OUTPUT, is_flag=True, help="Lines of JSON with the texts on stdout."),
    option("--quiet", section=OUTPUT, is_flag=True, help="No line on the engine and no table on stderr."),
    debug_option,
)


@click.command(cls=SectionedCommand, short_help="Answer many prompts together.")
@click.argument("model")
@click.argument("prompts", nargs=-1, metavar="PROMPT...")
@_prompt_options
@_batch_options
@generation_options
@sampling_options
@execution_options
@_output_options
@click.pass_context
def batch(ctx: click.Context, /, **values: Any) -> int:
    """Answer all PROMPTs with MODEL, in one runner: what runs together shares steps.

    MODEL is a GGUF file, or a known name: smollm2, gemma3-270m. The prompts are arguments, or come from a file with one
    JSON object a line: {"prompt": TEXT} or {"messages": [{"role": "user", "content": TEXT}, ...]}, and with it any of
    "id", "system", "max_tokens", "temperature" and "seed", which go before the command's options. All is checked before
    the model is loaded.

    Each prompt samples by itself, with the seed of --seed or of its object: the order of answers plays no part. With
    --prefix-cache-entries, the first N prompts of a round are kept for the rounds after it, which begin behind what
    they share with one of these; in memory, while the command runs. Prompts that find no room in --ctx wait; one whose
    cells were given to others starts again.

    Texts go to stdout in the order of the prompts, where there are several each after a line "==> prompt 1 <==". A
    table goes to stderr. A report's lines come as prompts end. With --cache-kind sequence one prompt runs after the
    other, and none can be kept.

    One prompt that fails does not end the others. Exit codes: 0, 1 for an error or where a prompt failed, 2 for a
    wrong use, 130 for Ctrl-C, which ends all that runs and writes what is there.
    """
    check_template_options(ctx)
    if values["prefix_cache_entries"] and values["cache_kind"] == "sequence":
        raise click.UsageError(
            "--prefix-cache-entries needs --cache-kind batched_cell: a sequence cannot be shared", ctx
        )
    prompts = _prompts(ctx, with_seed(generation_config(ctx)))
    files = None
    if values["out_prefix"] is not None:
        files = TextFiles(values["out_prefix"], len(prompts), values["prompt_rounds"])
    check_places(_places(files, values["report"]), overwrite=values["overwrite"])
    with Interrupts() as interrupts:
        try:
            with loaded(values["model"], load_options(values), lambda: interrupts.requested) as engine:
                tell_engine(engine, values)
                n_failed = _run(engine, prompts, values, files, interrupts)
        except CancelledError:
            if not interrupts.requested:
                raise
            click.echo(err=True)
        if interrupts.requested:
            return INTERRUPTED
    return ERROR if n_failed else 0


def _prompts(ctx: click.Context, config: GenConfig) -> list[BatchPrompt]:
    values = ctx.params
    path, defaults = values["prompts_file"], Defaults(config, values["system"], values["raw"])
    if values["prompts"] and path is not None:
        raise click.UsageError("PROMPT and --prompts-file exclude each other", ctx)
    if values["prompts"]:
        return from_arguments(values["prompts"], defaults)
    if path is None:
        raise click.UsageError("there are no prompts: give them as arguments, or with --prompts-file", ctx)
    if path == "-":
        return from_lines(text_input.read_stdin(), "standard input", defaults)
    return from_lines(text_input.read_file(path), path, defaults)


def _places(files: TextFiles | None, report: str | None) -> Iterator[str]:
    if report is not None:
        yield report
    if files is not None:
        yield from files.paths


def _run(
    engine: Engine, prompts: list[BatchPrompt], values: dict[str, Any], files: TextFiles | None, interrupts: Interrupts
) -> int:
    """All rounds; how many results are failures."""
    if not values["raw"]:
        check_template(engine)
    rounds = _rounds(engine, prompts, values)
    interrupts.on_request(rounds.cancel)
    n_rounds, begun = values["prompt_rounds"], time.perf_counter()
    bar = ProgressLine("answered", lambda n: f"{n} prompts")
    texts = OrderedTexts(prompts, n_rounds, as_json=values["as_json"])
    results: list[RoundResult] = []
    with ExitStack() as undo:
        undo.callback(bar.clear)
        report = None if values["report"] is None else undo.enter_context(closing(Report(values["report"])))
        for result in _all_results(rounds, n_rounds):
            results.append(result)
            if report is not None:
                report.write(row(prompts[result.index], result))
            if files is not None:
                files.write(result)
            if files is None or values["as_json"]:
                bar.clear()
                texts.add(result)
            bar(len(results), len(prompts) * n_rounds)
    _tell(prompts, results, n_rounds, None if values["quiet"] else time.perf_counter() - begun)
    return sum(result.has_failed for result in results)


def _rounds(engine: Engine, prompts: list[BatchPrompt], values: dict[str, Any]) -> PromptRounds:
    from ggml_engine.control.options import RunnerOptions  # noqa: PLC0415 - these load numpy
    from ggml_engine.control.rounds import PromptRounds, reserved_sessions  # noqa: PLC0415

    n_entries = values["prefix_cache_entries"]
    options = RunnerOptions(
        max_sessions=reserved_sessions(len(prompts), n_entries), max_decode_sequences=values["max_decode_sequences"]
    )
    return PromptRounds(
        engine.runner(options),
        [_encoded(engine, prompt, parse_special=values["parse_special"]) for prompt in prompts],
        n_entries,
        max_running=1 if values["cache_kind"] == "sequence" else None,
    )


def _encoded(engine: Engine, prompt: BatchPrompt, *, parse_special: bool) -> RoundPrompt:
    """The tokens of a prompt, or why there are none."""
    from ggml_engine.control.rounds import RoundPrompt  # noqa: PLC0415 - loads numpy

    try:
        if prompt.messages is not None:
            return RoundPrompt(engine.encode_chat(prompt.messages), prompt.config)
        ids = engine.vocabulary.encode(prompt.text or "", add_special=True, parse_special=parse_special)
        return RoundPrompt(ids.tolist(), prompt.config)
    except EngineError as error:
        return RoundPrompt((), prompt.config, error)


def _all_results(rounds: PromptRounds, n_rounds: int) -> Iterator[RoundResult]:
    for _ in range(n_rounds):
        with closing(rounds.run_round()) as results:
            yield from results


def _tell(prompts: list[BatchPrompt], results: list[RoundResult], n_rounds: int, elapsed_s: float | None) -> None:
    """The table, where there is an elapsed time to tell, and what failed."""
    if elapsed_s is not None:
        labels = [str(n + 1 if prompt.id is None else prompt.id) for n, prompt in enumerate(prompts)]
        click.echo(table(labels, results, elapsed_s), err=True, nl=False)
    for result in results:
        if result.has_failed:
            name = result_name(prompts[result.index], result, n_rounds)
            click.echo(error_line(EngineError(f"{name}: {result.error or 'the engine was closed'}")), err=True)
