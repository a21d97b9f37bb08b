"""From a generation to the screen; what one answer and a chat share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ggml_engine.errors import ChatTemplateError

if TYPE_CHECKING:
    from ggml_engine.cli.output import ProgressLine, TextOutput
    from ggml_engine.control.generation import Generation
    from ggml_engine.engine import Engine


def check_template(engine: Engine) -> None:
    """Raise ChatTemplateError, naming --raw, if the model has no usable chat template."""
    try:
        engine.template.check()
    except ChatTemplateError as error:
        raise ChatTemplateError(f"{error} (use --raw)") from error


def stream_text(generation: Generation, output: TextOutput | None, bar: ProgressLine) -> None:
    """Run a generation to its end, text to `output`; `bar` shows the reading of the prompt and is wiped."""
    try:
        for update in generation.updates():
            if update.prefill is not None:
                bar(update.prefill.done, update.prefill.total)
            if update.text:
                bar.clear()
                if output is not None:
                    output.write(update.text)
    finally:
        bar.clear()
