"""The options of a generation: their one spelling, their help, and the `GenConfig` that they make.

Names and defaults are those of `SamplerConfig` and `GenConfig`. A value that its dataclass refuses is a usage error
that names the option. Imports nothing native.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
from collections.abc import Callable
from typing import Any, Final

import click
from click.core import ParameterSource

from ggml_engine.cli.sections import Decorated, option, together
from ggml_engine.cli.text_input import read_file
from ggml_engine.control.config import GenConfig
from ggml_engine.errors import OptionError
from ggml_engine.ggml.sampler_config import MAX_SEED, SamplerConfig

GENERATION: Final = "Generation"
SAMPLING: Final = "Sampling"

# the numbers of SamplerConfig, in the order of the help
SAMPLER_HELP: Final[dict[str, str]] = {
    "temperature": "Spread of the draw; 0 always takes the likeliest token.",
    "top_k": "Draw from the K likeliest tokens; 0 is off.",
    "top_p": "Draw from the likeliest tokens that make up this probability; 1 is off.",
    "min_p": "Drop tokens below this share of the likeliest one's probability; 0 is off.",
    "typical_p": "Locally typical sampling to this probability; 1 is off.",
    "top_n_sigma": "Keep logits within this many standard deviations of the highest; 0 is off.",
    "repeat_penalty": "Divide logits of recent tokens by this; 1 is off.",
    "repeat_last_n": "How many recent tokens the penalties see; 0 is off.",
    "presence_penalty": "Subtract this once from logits of recent tokens.",
    "frequency_penalty": "Subtract this for each time that a recent token occurred.",
    "dry_multiplier": "Strength of the DRY penalty for repeated sequences; 0 is off.",
    "dry_base": "How fast the DRY penalty grows with the length of a repetition.",
    "dry_allowed_length": "Repetitions up to this length are not penalised by DRY.",
    "dry_penalty_last_n": "How many recent tokens DRY sees; 0 is off.",
    "xtc_probability": "Chance that XTC removes the likeliest tokens; 0 is off.",
    "xtc_threshold": "Tokens must be at least this probable for XTC to remove them.",
    "dynatemp_range": "Temperature varies by this much with the entropy; 0 is off.",
    "dynatemp_exponent": "How the entropy bends the dynamic temperature.",
    "mirostat": "Mirostat version 1 or 2 in place of the other samplers; 0 is off.",
    "mirostat_tau": "Surprise that mirostat aims at.",
    "mirostat_eta": "How fast mirostat learns.",
}
_DEFAULTS: Final = {field.name: field.default for field in dataclasses.fields(SamplerConfig)}
_BIAS: Final = re.compile(r"([0-9]{1,10})=(.+)", re.DOTALL)


def flag(name: str) -> str:
    """The spelling of an option: `top_k` is `--top-k`."""
    return "--" + name.replace("_", "-")


def _checked_by(config: Callable[..., object]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """A callback that lets the dataclass refuse the value, naming the option."""

    def check(_ctx: click.Context, param: click.Parameter, value: Any) -> Any:
        try:
            config(**{str(param.name): value})
        except OptionError as error:
            raise click.BadParameter(str(error)) from error
        return value

    return check


def _number(name: str) -> Callable[[Decorated], Decorated]:
    default = _DEFAULTS[name]
    is_integer = isinstance(default, int)
    return option(
        flag(name),
        section=SAMPLING,
        type=click.INT if is_integer else click.FLOAT,
        metavar="N" if is_integer else "X",
        default=default,
        show_default=True,
        callback=_checked_by(SamplerConfig),
        help=SAMPLER_HELP[name],
    )


def _biases(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[int, float]:
    biases: dict[int, float] = {}
    for text in values:
        match = _BIAS.fullmatch(text)
        try:
            token, bias = (int(match[1]), float(match[2])) if match else (0, float("nan"))
            SamplerConfig(logit_bias={token: bias})
        except (ValueError, OptionError) as error:
            raise click.BadParameter(f"{text!r} is not ID=BIAS, such as 15=-2.5 or 15=-inf") from error
        if token in biases:
            raise click.BadParameter(f"token {token} is given twice")
        biases[token] = bias
    return biases


def _text(name: str, metavar: str, help_text: str) -> Callable[[Decorated], Decorated]:
    return together(
        option(flag(name), section=SAMPLING, metavar=metavar, help=help_text),
        option(f"{flag(name)}-file", section=SAMPLING, metavar="FILE", help="The same, from a file."),
    )


sampling_options = together(
    option("--greedy", section=SAMPLING, is_flag=True, help="Short for --temperature 0."),
    *(_number(name) for name in SAMPLER_HELP),
    option(
        "--dry-sequence-breaker",
        "dry_sequence_breakers",
        section=SAMPLING,
        multiple=True,
        metavar="TEXT",
        show_default=" ".join(repr(text) for text in SamplerConfig().dry_sequence_breakers),
        callback=lambda ctx, param, value: _checked_by(SamplerConfig)(ctx, param, value) if value else value,
        help="A text that ends what DRY compares; may be repeated.",
    ),
    option(
        "--logit-bias",
        section=SAMPLING,
        multiple=True,
        metavar="ID=BIAS",
        callback=_biases,
        help="Add BIAS to the logit of token ID; -inf forbids it. May be repeated.",
    ),
    option(
        "--seed",
        section=SAMPLING,
        type=click.IntRange(0, MAX_SEED),
        metavar="N",
        show_default="random",
        help="Seed of the draw.",
    ),
    _text("grammar", "GBNF", "A grammar that the answer follows, from its rule `root`."),
    _text("json_schema", "JSON", "A JSON schema that the answer follows."),
)

generation_options = together(
    option(
        "-n",
        "--max-tokens",
        section=GENERATION,
        type=click.INT,
        metavar="N",
        show_default="until the model ends or the context is full",
        callback=_checked_by(GenConfig),
        help="Most tokens to generate.",
    ),
    option(
        "--stop",
        section=GENERATION,
        multiple=True,
        metavar="TEXT",
        callback=_checked_by(GenConfig),
        help="End before this text; may be repeated.",
    ),
    option("--ignore-eos", section=GENERATION, is_flag=True, help="Go on after the model's end tokens."),
)


def generation_config(ctx: click.Context) -> GenConfig:
    """The `GenConfig` of a command's values. Raises click.UsageError for options that exclude each other."""
    values = ctx.params
    chosen = {name: values[name] for name in (*SAMPLER_HELP, "logit_bias", "seed")}
    if values["greedy"]:
        exclude(ctx, "greedy", "temperature")
        chosen["temperature"] = 0.0
    if values["dry_sequence_breakers"]:
        chosen["dry_sequence_breakers"] = values["dry_sequence_breakers"]
    sources = [name for name in _GUIDES if values[name] is not None]
    if len(sources) > 1:
        exclude(ctx, *sources[:2])
    for name in sources:
        is_file = name.endswith("_file")
        chosen[name.removesuffix("_file")] = read_file(values[name]) if is_file else values[name]
    sampler = SamplerConfig(**chosen)
    return GenConfig(values["max_tokens"], values["stop"], ignore_eos=values["ignore_eos"], sampler=sampler)


_GUIDES: Final = ("grammar", "grammar_file", "json_schema", "json_schema_file")


def exclude(ctx: click.Context, first: str, second: str) -> None:
    """A usage error if both options were given."""
    if all(ctx.get_parameter_source(name) is not ParameterSource.DEFAULT for name in (first, second)):
        raise click.UsageError(f"{flag(first)} and {flag(second)} exclude each other", ctx)


def with_seed(config: GenConfig) -> GenConfig:
    """With a seed drawn where there is none: before a run, so that it can be told what it was."""
    if config.sampler.seed is not None:
        return config
    return dataclasses.replace(
        config, sampler=dataclasses.replace(config.sampler, seed=secrets.randbelow(MAX_SEED + 1))
    )
