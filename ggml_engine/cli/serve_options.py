"""The options of `serve`: made from the fields of `ServerOptions` and `ServingOptions`, so that none can differ.

Owns their help. Imports nothing of the server that is not needed to know its options.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Final

import click

from ggml_engine.cli.sections import Decorated, option, together
from ggml_engine.errors import OptionError
from ggml_engine.server.options import PYTHON_ONLY, ServerOptions, n_bytes_of, named_model, shown_bytes
from ggml_engine.serving.options import DEFAULT_SERVER_ENTRIES, ServingOptions

SERVER: Final = "Server"
MODELS: Final = "Models"
LIMITS: Final = "Limits"
SERVING: Final = "Sessions and prefixes"

# name -> section, metavar, help, and what help shows where the default is no plain value
_Row = tuple[str, str, str, str | None]
SERVER_HELP: Final[dict[str, _Row]] = {
    "models": (MODELS, "NAME=PATH", "A further model, loaded when it is asked for; may be repeated.", None),
    "any_model": (MODELS, "", "Requests that name a model that there is not get the first one.", None),
    "memory_budget": (
        MODELS,
        "BYTES",
        "What all loaded models may take, such as 8G: idle ones make room for others.",
        "none for one model, nine tenths of the free memory for several",
    ),
    "model_idle_s": (MODELS, "S", "Unload a model that nobody used for so long.", "never"),
    "host": (SERVER, "ADDRESS", "Where to listen; one that others can reach needs a key.", None),
    "port": (SERVER, "N", "Port; 0 lets the system choose.", None),
    "api_key_env": (SERVER, "NAME", "Environment variable with the key; several are parted by spaces.", None),
    "api_key_file": (SERVER, "FILE", "File with keys, one a line.", None),
    "allowed_hosts": (
        SERVER,
        "NAME",
        "A further name that requests may have as their Host; may be repeated.",
        "the names of loopback",
    ),
    "public_without_key": (SERVER, "", "Let others use the server without a key.", None),
    "session_directory": (SERVER, "DIR", "Where sessions are saved; without it they cannot be.", None),
    "session_quota": (SERVER, "BYTES", "What all saved sessions may take.", None),
    "max_choices": (LIMITS, "N", "Most answers (n) to one request.", None),
    "max_body_bytes": (LIMITS, "BYTES", "Longest body of a request.", None),
    "max_bodies_bytes": (
        LIMITS,
        "BYTES",
        "What the bodies of all running requests may take; one more is answered with 503.",
        "eight of --max-body-bytes",
    ),
    "max_connections": (LIMITS, "N", "Connections at once; more wait to be accepted.", None),
    "header_timeout_s": (LIMITS, "S", "Time for the headers of a request.", None),
    "body_timeout_s": (LIMITS, "S", "Time for the body of a request.", None),
    "write_timeout_s": (LIMITS, "S", "Time for a client to read what was sent; then its request is cancelled.", None),
    "keep_alive_s": (LIMITS, "S", "How long a connection stays open without a request.", None),
    "shutdown_grace_s": (LIMITS, "S", "Time for running requests to end when the server does.", None),
}
SERVING_HELP: Final[dict[str, _Row]] = {
    "prefix_cache_entries": (
        SERVING,
        "N",
        "Shared snapshots of what was read; 0 turns the prefix cache off.",
        f"{DEFAULT_SERVER_ENTRIES}; 0 with --cache-kind sequence",
    ),
    "prefix_checkpoint_prompt_end": (
        SERVING,
        "initial|every",
        "Which ends of prompts are kept: of a session's first turn, or of every one.",
        None,
    ),
    "prefix_checkpoint_interval": (SERVING, "N", "Keep a snapshot at every N tokens of a first prompt, too.", "off"),
    "prefix_capture_slots": (
        SERVING,
        "N",
        "Snapshots that may be taken at once.",
        "the lesser of --max-sessions and --max-requests; 2 with an interval",
    ),
    "max_sessions": (SERVING, "N", "Named sessions that are kept.", None),
    "max_requests": (SERVING, "N", "Requests that compute at once.", None),
    "max_queue": (SERVING, "N", "Requests that wait; one more is answered with 429 where its key has its share.", None),
    "max_session_tokens": (SERVING, "N", "Longest session.", "all that fits"),
    "session_idle_s": (SERVING, "S", "Close a named session that nobody used for so long.", None),
}
SERVE_HELP: Final = {**SERVER_HELP, **SERVING_HELP}
_TEXTS: Final = frozenset({"host", "api_key_env", "api_key_file", "allowed_hosts", "session_directory", "models"})
_BYTES: Final = frozenset({"memory_budget", "session_quota", "max_body_bytes", "max_bodies_bytes"})
DEFAULTS: Final[dict[str, Any]] = {
    field.name: field.default
    for options in (ServerOptions, ServingOptions)
    for field in dataclasses.fields(options)
    if field.name not in PYTHON_ONLY
}


def _read(name: str, value: Any) -> Any:
    """A value as the dataclasses have it. Raises OptionError."""
    if name == "models":
        return tuple(named_model(text) for text in value)
    return n_bytes_of(name, value) if name in _BYTES else value


def _convert(_ctx: click.Context, param: click.Parameter, value: Any) -> Any:
    try:
        return _read(str(param.name), value)
    except OptionError as error:
        raise click.BadParameter(str(error)) from error


def _type(name: str) -> Any:
    default = DEFAULTS[name]
    if name in _TEXTS or name in _BYTES:
        return click.STRING
    if name == "prefix_checkpoint_prompt_end":
        return click.Choice(["initial", "every"])
    return click.FLOAT if name.endswith("_s") or isinstance(default, float) else click.INT


def _shown(name: str) -> str | bool:
    section_default = SERVE_HELP[name][3]
    default = DEFAULTS[name]
    if section_default is not None:
        return section_default
    if name in _BYTES:
        return shown_bytes(default)
    return f"{default:g}" if isinstance(default, float) and math.isfinite(default) else default is not None


def _option(name: str) -> Callable[[Decorated], Decorated]:
    section, metavar, text, _ = SERVE_HELP[name]
    spelling = "--" + name.replace("_", "-")
    if DEFAULTS[name] is False:
        return option(spelling, name, section=section, is_flag=True, help=text)
    spellings = _SHORT.get(name, ())
    return option(
        *spellings,
        spelling,
        name,
        section=section,
        metavar=metavar,
        type=_type(name),
        multiple=isinstance(DEFAULTS[name], tuple),
        default=DEFAULTS[name],
        show_default=_shown(name),
        callback=_convert,
        help=text,
    )


_SHORT: Final = {"models": ("--model",), "model_idle_s": ("--model-idle",), "allowed_hosts": ("--allowed-host",)}

serve_options = together(*(_option(name) for name in SERVE_HELP))
