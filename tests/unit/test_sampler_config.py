"""Sampling options are refused outside their ranges, by name."""

from __future__ import annotations

import dataclasses
import math

import pytest

from ggml_engine.errors import OptionError
from ggml_engine.ggml.sampler_config import _INTEGERS, _NUMBERS, SamplerConfig


@pytest.mark.parametrize("name", _NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, True, "1", None, 1e308, 10**400, -1e9])
def test_a_number_that_is_none_or_out_of_range_is_named(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=name):
        SamplerConfig(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*_INTEGERS, "seed"])
@pytest.mark.parametrize("value", [True, 1.0, "1", -1, 2**64, math.nan])
def test_an_integer_that_is_none_or_out_of_range_is_named(name: str, value: object) -> None:
    with pytest.raises(OptionError, match=name):
        SamplerConfig(**{name: value})  # type: ignore[arg-type]


def test_the_message_gives_range_and_value() -> None:
    with pytest.raises(OptionError, match=r"top_p must be a number from 0 to 1, not 1\.5"):
        SamplerConfig(top_p=1.5)


def test_the_seed_that_means_any_to_libllama_is_refused() -> None:
    SamplerConfig(seed=2**32 - 2)
    with pytest.raises(OptionError, match="seed"):
        SamplerConfig(seed=2**32 - 1)


@pytest.mark.parametrize(
    "bias",
    [{-1: 1.0}, {True: 1.0}, {"1": 1.0}, {2**63: 1.0}, {1: math.nan}, {1: math.inf}, {1: True}, {1: 1e7}, [1], None],
)
def test_a_bad_logit_bias_is_refused(bias: object) -> None:
    with pytest.raises(OptionError, match="logit_bias"):
        SamplerConfig(logit_bias=bias)  # type: ignore[arg-type]


def test_minus_infinity_may_forbid_a_token() -> None:
    assert SamplerConfig(logit_bias={5: -math.inf}).logit_bias[5] == -math.inf


@pytest.mark.parametrize("breakers", ["ab", [1], ("",), ("x" * 41,), ("a\0",), ("\ud800",), ["a"] * 33, None])
def test_bad_sequence_breakers_are_refused(breakers: object) -> None:
    with pytest.raises(OptionError, match="dry_sequence_breaker"):
        SamplerConfig(dry_sequence_breakers=breakers)  # type: ignore[arg-type]


def test_a_config_cannot_be_changed_through_what_it_was_made_of() -> None:
    bias = {1: 1.0}
    config = SamplerConfig(logit_bias=bias)
    bias[2] = 2.0
    assert dict(config.logit_bias) == {1: 1.0}
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 3  # type: ignore[misc]


def test_grammar_and_schema_exclude_each_other() -> None:
    with pytest.raises(OptionError, match="exclude"):
        SamplerConfig(grammar="root ::= .", json_schema="{}")


def test_defaults_are_those_of_llama_cpp() -> None:
    config = SamplerConfig()
    assert (config.temperature, config.top_k, config.top_p, config.min_p) == (0.8, 40, 0.95, 0.05)
    assert SamplerConfig.greedy().is_greedy
    assert not config.is_greedy
    assert not config.has_penalties
    assert not config.has_dry
