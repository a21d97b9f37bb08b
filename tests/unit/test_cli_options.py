"""Options have one spelling and one default, those of the dataclasses, and a bad value is a usage error that names it."""

from __future__ import annotations

import dataclasses
import inspect
import re
import typing
from pathlib import Path
from typing import Any

import click
import pytest
from fake_engine import FakeEngine

import ggml_engine.cli.run as run_module
from ggml_engine.cli import execution_options, options
from ggml_engine.cli.main import cli, main
from ggml_engine.cli.reference import reference, shown_default
from ggml_engine.control.config import GenConfig
from ggml_engine.ggml.sampler_config import SamplerConfig

RUN = cli.commands["run"]
SAMPLER_FIELDS = {field.name: field for field in dataclasses.fields(SamplerConfig)}
GEN_FIELDS = {field.name: field for field in dataclasses.fields(GenConfig)}
PARAMS = {param.name: param for param in RUN.params}

# fields without a plain default: what their help shows
SPELLED = {
    "seed": "random",
    "logit_bias": "",
    "grammar": "",
    "json_schema": "",
    "dry_sequence_breakers": r"""'\n' ':' '"' '*'""",
}


def config_of(monkeypatch: pytest.MonkeyPatch, *args: str) -> GenConfig:
    engine = FakeEngine()
    monkeypatch.setattr(run_module, "load_engine", engine.load)
    assert main(["run", "m", "hello", *args]) == 0
    return engine.config


@pytest.mark.parametrize("name", SAMPLER_FIELDS)
def test_every_field_of_the_sampler_is_an_option_whose_help_shows_the_default_of_the_field(name: str) -> None:
    param = PARAMS[name]
    assert isinstance(param, click.Option)
    ctx = click.Context(RUN)
    default = SAMPLER_FIELDS[name].default
    wanted = SPELLED.get(name, str(default))
    assert shown_default(param, ctx) == wanted
    record = param.get_help_record(ctx)
    assert record is not None
    assert (f"default: {wanted}" in record[1]) or (f"default: ({wanted})" in record[1]) or not wanted


def test_without_options_a_generation_has_the_defaults_of_the_dataclasses_but_a_drawn_seed(monkeypatch) -> None:
    config = config_of(monkeypatch)
    assert type(config.sampler.seed) is int
    assert dataclasses.replace(config, sampler=dataclasses.replace(config.sampler, seed=None)) == GenConfig()


@pytest.mark.parametrize("name", options.SAMPLER_HELP)
def test_every_number_reaches_its_field(monkeypatch, name: str) -> None:
    value = {"mirostat": 2, "typical_p": 0.25}.get(name, 3 if isinstance(SAMPLER_FIELDS[name].default, int) else 0.75)
    if name == "dry_base":
        value = 2.5
    assert getattr(config_of(monkeypatch, f"--{name.replace('_', '-')}", str(value)).sampler, name) == value


def test_the_other_options_reach_their_fields(monkeypatch, tmp_path: Path) -> None:
    config = config_of(
        monkeypatch, "-n", "5", "--stop", "a", "--stop", "b", "--ignore-eos", "--seed", "11", "--logit-bias", "3=-inf",
        "--logit-bias", "4=2.5", "--dry-sequence-breaker", "x", "--dry-sequence-breaker", "y", "--grammar", 'root ::= "a"',
    )  # fmt: skip
    assert (config.max_tokens, config.stop, config.ignore_eos) == (5, ("a", "b"), True)
    assert dict(config.sampler.logit_bias) == {3: float("-inf"), 4: 2.5}
    assert config.sampler.seed == 11
    assert config.sampler.dry_sequence_breakers == ("x", "y")
    assert config.sampler.grammar == 'root ::= "a"'
    file = tmp_path / "schema.json"
    file.write_text('{"type": "integer"}\n')
    assert config_of(monkeypatch, "--json-schema-file", str(file)).sampler.json_schema == '{"type": "integer"}'
    assert config_of(monkeypatch, "--greedy").sampler == SamplerConfig.greedy()


def test_fields_of_a_generation_have_options_too() -> None:
    for_programs = {"logprobs", "prompt_logprobs", "prefill_breakpoints"}  # nothing that a terminal shows
    assert set(GEN_FIELDS) - {"sampler", "stop_tokens", "shown_tokens"} - for_programs <= set(PARAMS)


def test_execution_options_have_the_names_and_defaults_of_engine_load() -> None:
    from ggml_engine.engine import Engine

    parameters = inspect.signature(Engine.load).parameters
    ctx = click.Context(RUN)
    assert set(execution_options.LOAD_OPTIONS) == set(parameters) - {"path", "progress", "cancel"}
    for name in execution_options.LOAD_OPTIONS:
        assert RUN.make_context("run", ["m", "p"]).params[name] == parameters[name].default, name
        shown = shown_default(PARAMS[name], ctx)
        default = parameters[name].default
        assert (
            shown
            == {
                "mmap": "--mmap", "deterministic": "--no-deterministic", "calibrate": "--no-calibrate", "adapters": "",
            }.get(name, str(default))
            or default is None
        ), name  # fmt: skip


def test_choices_are_those_of_the_parts_that_take_them() -> None:
    from ggml_engine.ggml import threads
    from ggml_engine.loading import load_executor
    from ggml_engine.models.prefill_weights import PrefillLayout
    from ggml_engine.pool.kv_types import KV_TYPES
    from ggml_engine.pool.registry import cache_kinds

    assert set(execution_options.CACHE_KINDS) == set(cache_kinds()) - {"batched"}  # a second name of the first
    assert tuple(KV_TYPES) == execution_options.KV_TYPES
    assert typing.get_args(typing.get_type_hints(load_executor)["attention"]) == execution_options.ATTENTION_FORMS
    assert typing.get_args(typing.get_type_hints(load_executor)["engine"]) == execution_options.ENGINES
    assert threads.MAX_THREADS == execution_options.MAX_THREADS
    assert typing.get_args(PrefillLayout) == execution_options.PREFILL_LAYOUTS


def test_execution_options_reach_engine_load(monkeypatch) -> None:
    engine = FakeEngine()
    monkeypatch.setattr(run_module, "load_engine", engine.load)
    args = ["--ctx", "99", "--threads", "3", "--device", "cpu", "--gpu-layers", "4", "--no-mmap", "--kv-type", "f32"]
    args += ["--engine", "llama", "--cache-kind", "sequence", "--threads-batch", "4", "--leave-cores", "2"]
    args += ["--prefill-weights", "bf16", "--calibrate"]
    assert main(["run", "m", "p", *args, "--attention", "flash", "--batch-tokens", "16", "--deterministic"]) == 0
    given = {name: engine.load_options[name] for name in execution_options.LOAD_OPTIONS}
    assert given == {
        "engine": "llama", "ctx": 99, "threads": 3, "device": "cpu", "gpu_layers": 4, "mmap": False, "kv_type": "f32",
        "threads_batch": 4, "leave_cores": 2, "cache_kind": "sequence", "attention": "flash", "max_batch_tokens": 16,
        "deterministic": True, "adapters": (), "prefill_weights": "bf16", "calibrate": True,
    }  # fmt: skip


def test_adapters_have_a_scale_after_the_last_colon_that_is_no_part_of_a_files_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    engine = FakeEngine()
    monkeypatch.setattr(run_module, "load_engine", engine.load)
    named = tmp_path / "a:2"
    named.touch()
    given = ["a.gguf", "a.gguf:0.5", "a.gguf:-1", "C:\\a.gguf", "b:c:2e0", str(named), f"{named}:3"]
    assert main(["run", "m", "p", *(part for text in given for part in ("--lora", text))]) == 0
    assert engine.load_options["adapters"] == (
        ("a.gguf", 1.0), ("a.gguf", 0.5), ("a.gguf", -1.0), ("C:\\a.gguf", 1.0), ("b:c", 2.0), (str(named), 1.0),
        (str(named), 3.0),
    )  # fmt: skip


BAD: list[tuple[list[str], str]] = [
    (["--lora", "a.gguf:nan"], "--lora"),
    (["--lora", "a.gguf:-inf"], "--lora"),
    (["--lora", ":1"], "--lora"),
    (["--temperature", "-1"], "--temperature"),
    (["--temperature", "nan"], "--temperature"),
    (["--temperature", "warm"], "--temperature"),
    (["--top-k", "-1"], "--top-k"),
    (["--top-k", "2.5"], "--top-k"),
    (["--top-p", "1.5"], "--top-p"),
    (["--repeat-penalty", "1e308"], "--repeat-penalty"),
    (["--mirostat", "3"], "--mirostat"),
    (["--seed", "-1"], "--seed"),
    (["--seed", str(2**64)], "--seed"),
    (["--max-tokens", "0"], "--max-tokens"),
    (["--stop", ""], "--stop"),
    (["--stop", "x"] * 17, "--stop"),
    (["--logit-bias", "3"], "--logit-bias"),
    (["--logit-bias", "-3=1"], "--logit-bias"),
    (["--logit-bias", "3=nan"], "--logit-bias"),
    (["--logit-bias", "3=1", "--logit-bias", "3=2"], "--logit-bias"),
    (["--dry-sequence-breaker", ""], "--dry-sequence-breaker"),
    (["--ctx", "0"], "--ctx"),
    (["--ctx", "-1"], "--ctx"),
    (["--threads", "0"], "--threads"),
    (["--threads", "100000"], "--threads"),
    (["--gpu-layers", "-1"], "--gpu-layers"),
    (["--batch-tokens", "0"], "--batch-tokens"),
    (["--kv-type", "q5_9"], "--kv-type"),
    (["--cache-kind", "batched"], "--cache-kind"),
    (["--attention", "fast"], "--attention"),
    (["--no-such-option"], "--no-such-option"),
]


@pytest.mark.parametrize(("args", "name"), BAD, ids=[" ".join(args[:2]) for args, _ in BAD])
def test_a_bad_value_is_a_usage_error_that_names_the_option(monkeypatch, capsys, args: list[str], name: str) -> None:
    monkeypatch.setattr(run_module, "load_engine", pytest.fail)
    assert main(["run", "m", "p", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert name in err.splitlines()[-1]


EXCLUDED = [
    (["--greedy", "--temperature", "1"], ("--greedy", "--temperature")),
    (["--grammar", "x", "--json-schema", "{}"], ("--grammar", "--json-schema")),
    (["--grammar", "x", "--grammar-file", "y"], ("--grammar", "--grammar-file")),
    (["--raw", "--system", "x"], ("--raw", "--system")),
    (["--parse-special"], ("--parse-special", "--raw")),
    (["-f", "x"], ("PROMPT", "--file")),
]


@pytest.mark.parametrize(("args", "names"), EXCLUDED, ids=["+".join(names) for _, names in EXCLUDED])
def test_options_that_exclude_each_other_are_a_usage_error_that_names_both(
    monkeypatch, capsys, args: list[str], names: tuple[str, str]
) -> None:
    monkeypatch.setattr(run_module, "load_engine", pytest.fail)
    assert main(["run", "m", "p", *args]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert all(name in message for name in names)


@pytest.mark.parametrize("command", cli.commands.values(), ids=list(cli.commands))
def test_no_spelling_is_used_twice_and_every_option_has_a_help(command: click.Command) -> None:
    found: list[str] = []
    for param in command.params:
        if isinstance(param, click.Option):
            found += [*param.opts, *param.secondary_opts]
            assert param.help, param.name
            assert param.help.endswith("."), param.name
    assert len(found) == len(set(found))


def test_help_lists_every_option_once_under_its_section(capsys) -> None:
    assert main(["run", "--help"]) == 0
    out = capsys.readouterr().out
    for param in RUN.params:
        if isinstance(param, click.Option):
            assert len(re.findall(rf"^  .*{re.escape(param.opts[-1])}\b(?!-)", out, re.MULTILINE)) >= 1, param.name
    heads = [line for line in out.splitlines() if re.fullmatch(r"[A-Z].*:", line)]
    assert heads == ["Prompt:", "Generation:", "Sampling:", "Model and execution:", "Output:", "Options:"]


def test_the_page_about_the_command_line_is_what_the_commands_say() -> None:
    page = Path(__file__).parents[2] / "docs" / "cli.md"
    assert page.read_text(encoding="utf-8") == reference(), "python -m ggml_engine.cli.reference > docs/cli.md"


def test_the_page_shows_every_option_of_every_command() -> None:
    page = reference()
    shown: dict[str, Any] = {name: page.split(f"## ggml-engine {name}")[1].split("\n## ")[0] for name in cli.commands}
    for name, command in cli.commands.items():
        for param in command.params:
            if isinstance(param, click.Option):
                assert f"{param.opts[-1]}" in shown[name]
