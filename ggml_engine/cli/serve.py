"""`ggml-engine serve`: an HTTP server that OpenAI's and Anthropic's clients can talk to."""

from __future__ import annotations

import importlib.util
import logging
from typing import Any, Final

import click
from click.core import ParameterSource

from ggml_engine.cli.boundary import debug_option
from ggml_engine.cli.execution_options import execution_options
from ggml_engine.cli.sections import SectionedCommand, option
from ggml_engine.cli.serve_options import SERVER, serve_options
from ggml_engine.errors import EngineError
from ggml_engine.server.options import named_model, resolve

NEEDED: Final = ("starlette", "uvicorn", "pydantic", "prometheus_client")


@click.command(cls=SectionedCommand, short_help="Serve models over HTTP.")
@click.argument("model", required=False)
@option("--config", section=SERVER, metavar="FILE", help="TOML file with any of these options, spelled with _ for -.")
@serve_options
@execution_options
@option("--quiet", section="Output", is_flag=True, help="No line for each request.")
@debug_option
@click.pass_context
def serve(ctx: click.Context, /, **values: Any) -> int:
    """Answer HTTP requests with MODEL, and with every --model, until Ctrl-C.

    MODEL is NAME=PATH, a GGUF file, or a known name: smollm2, gemma3-270m. It is loaded at once; others are loaded
    when a request names them. The server listens at http://127.0.0.1:8080 and speaks OpenAI's /v1/chat/completions,
    /v1/completions, /v1/responses, /v1/embeddings and /v1/models, and Anthropic's /v1/messages. docs/server.md has all
    of it. It needs the extra `server`.

    A key is taken from the environment variable GGML_ENGINE_API_KEY, or from --api-key-file. Exit codes: 0 after Ctrl-C
    or SIGTERM, 1 for an error, 2 for a wrong use, 130 when a second Ctrl-C ended it at once.
    """
    options = resolve(given_options(ctx), values["config"])
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise EngineError(f"the server needs {', '.join(missing)}: pip install 'ggml-engine[server]'")
    from ggml_engine.server.run import Server, leave  # noqa: PLC0415 - needs the extra

    logging.getLogger("ggml_engine.server").setLevel(logging.WARNING if values["quiet"] else logging.INFO)

    def tell(url: str) -> None:
        names = ", ".join(name for name, _ in options.server.models)
        click.echo(f"serving {names} at {url} (Ctrl-C ends it)", err=True)

    server = Server(options, on_listening=tell)
    server.serve_until_told()
    if not server.is_whole:
        leave(0)  # a step of an engine, or a load, that does not end must not keep the process
    return 0


def given_options(ctx: click.Context) -> dict[str, Any]:
    """What the command line gives, by name. The argument is the first of the models."""
    given = {
        name: value
        for name, value in ctx.params.items()
        if name not in {"model", "config", "quiet"}
        and ctx.get_parameter_source(name) not in {ParameterSource.DEFAULT, ParameterSource.DEFAULT_MAP}
    }
    if ctx.params["model"] is not None:
        given["models"] = (named_model(ctx.params["model"]), *given.get("models", ()))
    return given
