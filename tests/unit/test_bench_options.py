"""The options of `ggml-engine bench`: names and defaults are those of what they become; what cannot be is refused."""

from __future__ import annotations

import dataclasses
import os

import click
import pytest

import ggml_engine.cli.bench as command
from ggml_engine.bench.cases import CASES, choose
from ggml_engine.bench.setting import QUICK, Setting, Sizes, fitting
from ggml_engine.cli.main import main
from ggml_engine.errors import OptionError
from ggml_engine.executor.options import ExecutorOptions


def options_of_sizes() -> dict[str, click.Option]:
    names = {field.name for field in dataclasses.fields(Sizes)}
    return {str(param.name): param for param in command.bench.params if param.name in names}  # type: ignore[misc]


def parsed(*arguments: str) -> dict[str, object]:
    return command.bench.make_context("bench", ["model", *arguments]).params


def test_the_command_has_the_cases_that_there_are() -> None:
    assert list(command.CASES) == list(CASES)


def test_the_defaults_that_help_shows_are_those_of_the_sizes() -> None:
    for name, option in options_of_sizes().items():
        default = getattr(Sizes(), name)
        assert option.show_default == (",".join(map(str, default)) if isinstance(default, tuple) else str(default))
    assert {"prompts", "histories", "widths", "shared_widths", "parked", "steps"} <= set(options_of_sizes())


def test_the_forms_of_attention_are_those_of_the_executor() -> None:
    (option,) = (param for param in command.bench.params if param.name == "attention")
    assert isinstance(option.type, click.Choice)
    for form in option.type.choices:
        ExecutorOptions(attention=form)


def test_sizes_that_are_given_stand_and_others_are_quick_or_not() -> None:
    given = parsed("--prompts", "7, 9", "--steps", "3")
    assert command.chosen_sizes(given) == dataclasses.replace(Sizes(), prompts=(7, 9), steps=3)
    assert command.chosen_sizes({**given, "quick": True}) == dataclasses.replace(QUICK, prompts=(7, 9), steps=3)


def test_no_case_is_all_of_them_and_some_run_in_their_order() -> None:
    assert parsed()["only"] == tuple(CASES)
    assert choose(parsed("--only", "start, decode")["only"]) == ["decode", "start"]  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="no case warp"):
        choose(["warp"])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--only", "decode,warp"],
        ["--only", ""],
        ["--prompts", "0"],
        ["--prompts", "128,"],
        ["--prompts", "1e3"],
        ["--histories", "-1"],
        ["--widths", "257"],
        ["--widths", "99999999999999999999999"],
        ["--steps", "0"],
        ["--repetitions", "0"],
        ["--against", "vllm"],
        ["--threads", "0"],
        ["--capacity", "0"],
        ["--attention", "none"],
        ["--prefill-weights", "q4_0"],
    ],
    ids=" ".join,
)
def test_a_wrong_option_is_code_2_and_nothing_is_measured(capsys, arguments: list[str]) -> None:
    assert main(["bench", "no-such-model", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"Invalid value for '{arguments[0]}'" in err


def test_a_model_that_is_not_there_is_code_1_before_anything_is_measured(capsys) -> None:
    assert main(["bench", "no-such-model"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "no-such-model" in err


def test_a_blas_that_was_told_its_processor_is_not_measured(monkeypatch, capsys) -> None:
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Prescott")
    main(["bench", "no-such-model"])
    assert "OPENBLAS_CORETYPE" not in os.environ
    assert "OPENBLAS_CORETYPE is ignored" in capsys.readouterr().err


@pytest.mark.parametrize(("width", "steps"), [(1, 32), (2, 32), (4, 32), (8, 16), (16, 8), (64, 8)])
def test_wide_steps_are_fewer_in_a_repetition_but_not_less_than_eight(width: int, steps: int) -> None:
    assert Sizes().steps_of(width) == steps


def test_sizes_past_a_limit_are_left_out() -> None:
    assert fitting((512, 0, 4096, 512), 512) == [0, 512]


def test_no_repetitions_are_refused(tmp_path) -> None:
    with pytest.raises(OptionError, match="at least 1"):
        Setting(tmp_path, repetitions=0)
