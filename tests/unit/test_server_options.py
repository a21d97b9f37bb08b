"""Options of a server: one name, one default and one value from Python, the command line and a file; refused pairs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import click
import pytest

from ggml_engine.cli.execution_options import LOAD_OPTIONS
from ggml_engine.cli.main import cli, main
from ggml_engine.cli.reference import shown_default
from ggml_engine.cli.serve import given_options
from ggml_engine.cli.serve_options import SERVE_HELP
from ggml_engine.errors import OptionError
from ggml_engine.server.options import (
    LOAD_NAMES,
    PYTHON_ONLY,
    SERVER_NAMES,
    SERVING_NAMES,
    ServeOptions,
    ServerOptions,
    named_models,
    read_config,
    resolve,
    shown_bytes,
)
from ggml_engine.serving.options import ServingOptions

SERVE = cli.commands["serve"]
PARAMS = {param.name: param for param in SERVE.params}
ALL_NAMES = (*SERVER_NAMES, *SERVING_NAMES, *LOAD_NAMES)

# name -> its value in Python, as TOML, and on the command line
SOURCES: dict[str, tuple[Any, str, list[str]]] = {
    "models": ([("m", "x"), ("n", "y.gguf")], '["m=x", "n=y.gguf"]', ["--model", "m=x", "--models", "n=y.gguf"]),
    "host": ("localhost", '"localhost"', ["--host", "localhost"]),
    "port": (99, "99", ["--port", "99"]),
    "api_key_env": ("MY", '"MY"', ["--api-key-env", "MY"]),
    "api_key_file": ("f", '"f"', ["--api-key-file", "f"]),
    "allowed_hosts": (["a", "b"], '["a", "b"]', ["--allowed-host", "a", "--allowed-hosts", "b"]),
    "public_without_key": (True, "true", ["--public-without-key"]),
    "any_model": (True, "true", ["--any-model"]),
    "memory_budget": (3 << 29, '"1.5G"', ["--memory-budget", "1.5 GiB"]),
    "model_idle_s": (60, "60", ["--model-idle", "60"]),
    "session_directory": ("d", '"d"', ["--session-directory", "d"]),
    "session_quota": (5000, "5000", ["--session-quota", "5000"]),
    "max_choices": (3, "3", ["--max-choices", "3"]),
    "max_body_bytes": (1 << 20, '"1M"', ["--max-body-bytes", "1048576"]),
    "max_bodies_bytes": (1 << 24, '"16M"', ["--max-bodies-bytes", "16 MiB"]),
    "max_connections": (7, "7", ["--max-connections", "7"]),
    **{
        name: (1.5, "1.5", ["--" + name.replace("_", "-"), "1.5"])
        for name in ("header_timeout_s", "body_timeout_s", "write_timeout_s", "keep_alive_s", "shutdown_grace_s")
    },
    "prefix_cache_entries": (9, "9", ["--prefix-cache-entries", "9"]),
    "prefix_checkpoint_prompt_end": ("every", '"every"', ["--prefix-checkpoint-prompt-end", "every"]),
    **{
        name: (8, "8", ["--" + name.replace("_", "-"), "8"])
        for name in ("prefix_checkpoint_interval", "prefix_capture_slots", "max_sessions", "max_requests", "max_queue",
                     "max_session_tokens")
    },
    "session_idle_s": (30, "30", ["--session-idle-s", "30"]),
    "engine": ("native", '"native"', ["--engine", "native"]),
    **{
        name: (2, "2", ["--" + name.replace("_", "-"), "2"])
        for name in ("ctx", "threads", "threads_batch", "leave_cores", "gpu_layers", "max_batch_tokens")
    },
    "device": ("cpu", '"cpu"', ["--device", "cpu"]),
    "mmap": (False, "false", ["--no-mmap"]),
    "kv_type": ("q8_0", '"q8_0"', ["--kv-type", "q8_0"]),
    "cache_kind": ("sequence", '"sequence"', ["--cache-kind", "sequence"]),
    "attention": ("flash", '"flash"', ["--attention", "flash"]),
    "deterministic": (True, "true", ["--deterministic"]),
    "adapters": ((("a.gguf", 0.5),), '["a.gguf:0.5"]', ["--lora", "a.gguf:0.5"]),
    "prefill_weights": ("bf16", '"bf16"', ["--prefill-weights", "bf16"]),
    "calibrate": (True, "true", ["--calibrate"]),
}  # fmt: skip


def from_command_line(*arguments: str, config: Path | None = None) -> ServeOptions:
    ctx = SERVE.make_context("serve", list(arguments))
    return resolve(given_options(ctx), config)


def needed(name: str) -> dict[str, Any]:
    """What an option cannot do without."""
    return {"session_directory": "d"} if name == "session_quota" else {}


@pytest.mark.parametrize("name", [name for name in ALL_NAMES if name not in PYTHON_ONLY])
def test_three_sources_give_one_value(name: str, tmp_path: Path) -> None:  # R90
    python, toml, arguments = SOURCES[name]
    others = {} if name == "models" else {"models": ["m=x"]}
    expected = resolve({**others, **needed(name), name: python})
    file = tmp_path / "serve.toml"
    lines = [f"{name} = {toml}", *(f'{key} = "{value}"' for key, value in needed(name).items())]
    file.write_text("\n".join(lines), encoding="utf-8")
    more = [part for key, value in needed(name).items() for part in ("--" + key.replace("_", "-"), value)]
    model = [] if name == "models" else ["m=x"]
    assert from_command_line(*model, *arguments, *more) == expected
    assert from_command_line(*model, config=file) == expected
    assert resolve(others, file) == expected
    assert expected != resolve({"models": ["m=x"], **needed(name)}), "the value is the default: the test shows nothing"


def test_every_option_is_one_of_the_command_and_the_other_way_round() -> None:  # R90
    spelled = {str(name) for name in PARAMS} - {"model", "config", "quiet", "debug", "help"}
    assert spelled == set(ALL_NAMES) - PYTHON_ONLY
    assert set(SERVE_HELP) == {*SERVER_NAMES, *SERVING_NAMES} - PYTHON_ONLY
    assert set(LOAD_NAMES) == set(LOAD_OPTIONS)
    for name in SERVE_HELP:
        assert "--" + name.replace("_", "-") in PARAMS[name].opts


@pytest.mark.parametrize("name", SERVE_HELP)
def test_help_shows_the_default_that_counts(name: str) -> None:  # R90
    param = PARAMS[name]
    assert isinstance(param, click.Option)
    (default,) = (f.default for o in (ServerOptions, ServingOptions) for f in dataclasses.fields(o) if f.name == name)
    shown = shown_default(param, click.Context(SERVE))
    if name == "prefix_cache_entries":
        given = resolve({"models": ["m"]}).serving.prefix_cache_entries
        off = resolve({"models": ["m"], "cache_kind": "sequence"}).serving.prefix_cache_entries
        assert shown == f"{given}; {off} with --cache-kind sequence" == "64; 0 with --cache-kind sequence"
    elif isinstance(default, bool):
        assert not default
    elif isinstance(default, (int, float)):
        assert shown in (f"{default:g}", str(default), shown_bytes(int(default)))
    elif isinstance(default, str):
        assert shown == default


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:  # R90
    file = tmp_path / "serve.toml"
    file.write_text('port = 1\nmax_queue = 5\n[models]\n"a" = "pa"\n"b" = "pb"\n', encoding="utf-8")
    options = from_command_line("--port", "2", config=file)
    assert (options.server.port, options.serving.max_queue) == (2, 5)
    assert options.server.models == (("a", "pa"), ("b", "pb"))
    assert from_command_line("c=pc", config=file).server.models == (("c", "pc"),)


@pytest.mark.parametrize(
    "values",
    [
        {"cache_kind": "sequence", "prefix_cache_entries": 4},
        {"deterministic": True, "prefill_weights": "bf16"},
        {"engine": "llama", "deterministic": True},
        {"engine": "llama", "adapters": (("a", 1.0),)},
        {"engine": "llama", "prefill_weights": "f16"},
        {"engine": "llama", "cache_kind": "sequence"},
        {"prefix_cache_entries": 0, "prefix_checkpoint_prompt_end": "every"},
        {"prefix_cache_entries": 0, "prefix_checkpoint_interval": 5},
        {"prefix_checkpoint_prompt_end": "every", "prefix_checkpoint_interval": 5},
        {"session_quota": 5, "session_directory": None},
    ],
    ids="+".join,
)
def test_what_cannot_go_together_is_refused_naming_both(values: dict[str, Any]) -> None:  # R93
    with pytest.raises(OptionError) as caught:
        resolve({"models": ["m=x"], **values})
    for name in values:
        assert name in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("port", -1), ("port", True), ("port", "80"), ("max_body_bytes", "many"), ("memory_budget", 0), ("host", ""),
     ("header_timeout_s", 0), ("header_timeout_s", float("nan")), ("allowed_hosts", "a"), ("models", "m"),
     ("models", [("a b", "x")]), ("models", ["m=x", "m=y"]), ("models", []), ("public_without_key", 1),
    ("any_model", "yes"),
     ("shutdown_grace_s", 60), ("max_choices", 0), ("nothing", 1), ("max_queue", -1)],
)  # fmt: skip
def test_a_value_that_cannot_be_is_refused_naming_its_option(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name.removesuffix("s")):
        resolve({"models": ["m=x"], name: value})


def test_names_of_models() -> None:
    assert named_models(["smollm2", "dir/llama-3.gguf", "a=b.gguf"]) == (
        ("smollm2", "smollm2"),
        ("llama-3", "dir/llama-3.gguf"),
        ("a", "b.gguf"),
    )


@pytest.mark.parametrize("text", ["port = ", "prefix_checkpoint_policy = 1", "models = 3"])
def test_a_file_that_cannot_be_read_is_an_error(text: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.toml"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(OptionError):
        resolve({"models": ["m"], **read_config(file)} if "models" not in text else {}, file)


def test_a_wrong_use_ends_before_anything_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 1
    assert "no model to serve" in capsys.readouterr().err
    assert main(["serve", "m=/nowhere", "--host", "0.0.0.0"]) == 1
    assert "public_without_key" in capsys.readouterr().err
    assert main(["serve", "m", "--memory-budget", "lots"]) == 2


def test_without_the_extra_the_command_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ggml_engine.cli.serve.NEEDED", ("starlette", "no_such_package"))
    assert main(["serve", "m"]) == 1
    assert "ggml-engine[server]" in capsys.readouterr().err
