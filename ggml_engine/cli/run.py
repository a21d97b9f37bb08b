"""`ggml-engine run`: one answer, or a chat.

Owns the choice of the prompt and the order of a run: options checked, prompt read, model loaded, text streamed.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import click

from ggml_engine.cli import output, text_input
from ggml_engine.cli.boundary import INTERRUPTED, debug_option
from ggml_engine.cli.execution_options import execution_options, load_options
from ggml_engine.cli.interrupts import Interrupts
from ggml_engine.cli.options import generation_config, generation_options, sampling_options, with_seed
from ggml_engine.cli.prompt_options import PROMPT, check_template_options, template_options
from ggml_engine.cli.sections import SectionedCommand, option, together
from ggml_engine.cli.streaming import check_template, stream_text
from ggml_engine.errors import CancelledError

if TYPE_CHECKING:
    from collections.abc import Callable

    from ggml_engine.control.config import GenConfig
    from ggml_engine.control.generation import Generation
    from ggml_engine.engine import Engine

OUTPUT = "Output"

_prompt_options = together(
    option("-f", "--file", "prompt_file", section=PROMPT, metavar="FILE", help="Prompt from a file; - is stdin."),
    template_options,
)
_output_options = together(
    option("--json", "as_json", section=OUTPUT, is_flag=True, help="One JSON object at the end instead of a stream."),
    option("--quiet", section=OUTPUT, is_flag=True, help="No line of statistics on stderr."),
    debug_option,
)


@click.command(cls=SectionedCommand, short_help="Answer a prompt, or open a chat.")
@click.argument("model")
@click.argument("prompt", required=False)
@_prompt_options
@generation_options
@sampling_options
@execution_options
@_output_options
@click.pass_context
def run(ctx: click.Context, /, **values: Any) -> int:
    """Stream MODEL's answer to PROMPT to stdout.

    MODEL is a GGUF file, or a known name: smollm2, gemma3-270m. The prompt comes from the argument, from --file, or
    from stdin where that is no terminal. Without a prompt, on a terminal, a chat opens: a line is a turn, /reset
    forgets the conversation, /exit or Ctrl-D leaves.

    One line end at the end of a file or of stdin is not part of the prompt. Text goes to stdout (to files and pipes in
    UTF-8, with one line end after it), everything else to stderr. Exit codes: 0, 1 for an error, 2 for a wrong use,
    130 for Ctrl-C.
    """
    check_template_options(ctx)
    config = generation_config(ctx)
    prompt = _prompt(ctx)
    if prompt is None:
        from ggml_engine.cli.chat_loop import chat  # noqa: PLC0415 - most runs do not chat

        with loaded(values["model"], load_options(values)) as engine:
            tell_engine(engine, values)
            return chat(engine, config, values["system"], quiet=values["quiet"])
    if not config.sampler.is_greedy:
        config = with_seed(config)
    begun = time.perf_counter()
    with Interrupts() as interrupts:
        try:
            with loaded(values["model"], load_options(values), lambda: interrupts.requested) as engine:
                load_s = time.perf_counter() - begun
                return _answer(engine, prompt, config, values, interrupts, load_s)
        except CancelledError:
            if not interrupts.requested:
                raise
            click.echo(err=True)
            return INTERRUPTED


def load_engine(model: str, **options: Any) -> Engine:
    """`Engine.load`; imports native code only now."""
    from ggml_engine.engine import Engine  # noqa: PLC0415

    return Engine.load(model, **options)


def loaded(model: str, options: dict[str, Any], cancel: Callable[[], bool] | None = None) -> Engine:
    """`load_engine` with a bar."""
    bar = output.ProgressLine("loading", output.mib)
    try:
        return load_engine(model, progress=bar, cancel=cancel, **options)
    finally:
        bar.clear()


def tell_engine(engine: Engine, values: dict[str, Any]) -> None:
    """One line on which engine was taken and why, where the user did not name it."""
    if values["engine"] == "auto" and not values["quiet"]:
        click.echo(f"engine {engine.kind}: {engine.reason}", err=True)


def _prompt(ctx: click.Context) -> str | None:
    """The prompt, or None for a chat."""
    argument, path = ctx.params["prompt"], ctx.params["prompt_file"]
    if argument is not None and path is not None:
        raise click.UsageError("PROMPT and --file exclude each other", ctx)
    if argument is not None:
        return text_input.from_argument(argument)
    if path is not None and path != "-":
        return text_input.read_file(path)
    if path == "-" or not text_input.stdin_is_terminal():
        text = text_input.read_stdin()
        if not text:
            raise click.UsageError("there is no prompt: give it as an argument, with --file, or on stdin", ctx)
        return text
    for name in ("raw", "as_json"):
        if ctx.params[name]:
            raise click.UsageError(f"--{name.removeprefix('as_')} needs a prompt: it cannot go with a chat", ctx)
    return None


def _answer(
    engine: Engine, prompt: str, config: GenConfig, values: dict[str, Any], interrupts: Interrupts, load_s: float
) -> int:
    bar = output.ProgressLine("reading", output.tokens, above=values["max_batch_tokens"])
    generation = _begin(engine, prompt, config, values)
    interrupts.on_request(generation.cancel)
    stream = output.TextOutput()
    shown = None if values["as_json"] else stream
    stream_text(generation, shown, bar)
    executor = _executor_stats(engine)
    if values["as_json"]:
        stream.write(output.json_text(_result(engine, generation, config, values, load_s)))
    stream.write("\n")
    tell_engine(engine, values)
    if not values["quiet"]:
        click.echo(output.statistics_line(generation, executor), err=True)
    return INTERRUPTED if interrupts.requested else 0


def _executor_stats(engine: Engine) -> dict[str, Any]:
    """The executor's, with the cells that the answer took: its session has ended with it."""
    stats = engine.executor.stats()
    return {**stats, "cells_used": stats["cells_peak"]}


def _begin(engine: Engine, prompt: str, config: GenConfig, values: dict[str, Any]) -> Generation:
    if values["raw"]:
        return engine.generate(prompt, config, parse_special=values["parse_special"])
    system = values["system"]
    messages = [] if system is None else [{"role": "system", "content": system}]
    check_template(engine)
    return engine.chat([*messages, {"role": "user", "content": prompt}], config)


def _result(
    engine: Engine, generation: Generation, config: GenConfig, values: dict[str, Any], load_s: float
) -> dict[str, Any]:
    metadata = engine.file.metadata
    return {
        "text": generation.text,
        "tokens": generation.tokens,
        "reason": None if generation.reason is None else generation.reason.value,
        "stats": {"load_s": load_s, **output.statistics(generation, _executor_stats(engine))},
        "model": {
            "path": engine.file.path,
            "name": metadata.get("general.name"),
            "architecture": metadata.get("general.architecture"),
            "engine": engine.kind,
        },
        "options": {
            **output.plain_options(config),
            **load_options(values),
            **{name: values[name] for name in ("raw", "parse_special", "system")},
        },
    }
