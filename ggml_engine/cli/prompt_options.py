"""The options that say what becomes of a prompt: a chat with a system message, or the text as it is."""

from __future__ import annotations

from typing import Final

import click

from ggml_engine.cli.options import exclude
from ggml_engine.cli.sections import option, together
from ggml_engine.cli.text_input import from_argument

PROMPT: Final = "Prompt"

template_options = together(
    option(
        "--system",
        section=PROMPT,
        metavar="TEXT",
        callback=lambda _ctx, _param, text: None if text is None else from_argument(text),
        help="System message of the chat.",
    ),
    option("--raw", section=PROMPT, is_flag=True, help="Continue the prompt as it is: no chat template."),
    option(
        "--parse-special", section=PROMPT, is_flag=True, help="With --raw: read control tokens that the prompt spells."
    ),
)


def check_template_options(ctx: click.Context) -> None:
    """Raise click.UsageError for options that do not go together."""
    if ctx.params["raw"]:
        exclude(ctx, "raw", "system")
    elif ctx.params["parse_special"]:
        raise click.UsageError("--parse-special needs --raw: a chat template decides by itself", ctx)
