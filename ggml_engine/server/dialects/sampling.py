"""Fields that the dialects share: how tokens are chosen, what ends an answer, and the name of its session."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, Any, Final

from pydantic import AfterValidator, Field

from ggml_engine.errors import InputError, OptionError
from ggml_engine.ggml.sampler_config import MAX_SEED, SamplerConfig
from ggml_engine.server.errors import HttpProblem
from ggml_engine.server.jobs import MAX_CHOICES
from ggml_engine.server.sessions import NAME_RULE, SESSION_NAME
from ggml_engine.server.validation import Many, RequestModel, invalid, only

MAX_STOPS: Final = 16
MAX_STOP_BYTES: Final = 256
MAX_BIAS: Final = 100.0
SESSION_HEADER: Final = "X-Session-ID"
_TOKEN_ID: Final = re.compile(r"0|[1-9][0-9]{0,9}")


def _stops(value: str | list[str] | None) -> list[str]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if len(stops) > MAX_STOPS:
        raise invalid(f"at most {MAX_STOPS} stop strings are possible, {len(stops)} were given")
    for stop in stops:
        if not 0 < len(stop.encode()) <= MAX_STOP_BYTES:
            raise invalid(f"a stop string has 1 to {MAX_STOP_BYTES} bytes, one has {len(stop.encode())}")
    return stops


def _biases(value: dict[str, float] | None) -> dict[int, float]:
    biases = {}
    for token, bias in (value or {}).items():
        if not _TOKEN_ID.fullmatch(token):
            raise invalid(f"a token id must be an integer of at least 0 in decimal, is {token!r:.40}")
        if not -MAX_BIAS <= bias <= MAX_BIAS:
            raise invalid(f"the bias of token {token} must be -100 to 100, is {bias}")
        biases[int(token)] = bias
    return biases


def _none_of_minus_one(value: int | None) -> int | None:
    return None if value == -1 else value


def _seed(value: int | None) -> int | None:
    if value is not None and not 0 <= value <= MAX_SEED - MAX_CHOICES:
        raise invalid(f"a seed is 0 to {MAX_SEED - MAX_CHOICES}, or -1 for a random one; it is {value}")
    return value


def _count(value: int | None) -> int | None:
    if value is not None and not 1 <= value < 1 << 31:
        raise invalid(f"a number of tokens is 1 to {(1 << 31) - 1}, or -1 for no bound; it is {value}")
    return value


def _session_name(value: str | None) -> str | None:
    if value is not None and not SESSION_NAME.fullmatch(value):
        raise invalid(NAME_RULE)
    return value


StopField = Annotated[str | Many[str] | None, AfterValidator(_stops)]
BiasField = Annotated[dict[str, float] | None, AfterValidator(_biases)]
SessionField = Annotated[str | None, AfterValidator(_session_name)]
CountField = Annotated[int | None, Field(ge=1, le=2**31 - 1)]
OpenCountField = Annotated[int | None, AfterValidator(_none_of_minus_one), AfterValidator(_count)]
"""A number of tokens, or llama.cpp's -1: no bound."""
SeedField = Annotated[int | None, AfterValidator(_none_of_minus_one), AfterValidator(_seed)]
"""A seed, or llama.cpp's -1: a random one."""
ChoicesField = Annotated[int | None, Field(ge=1, le=MAX_CHOICES)]


class SamplingFields(RequestModel):
    """How the next token is chosen. What is left out is the engine's default, `SamplerConfig` has the ranges."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: Many[str] | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    top_n_sigma: float | None = None
    dynatemp_range: float | None = None
    dynatemp_exponent: float | None = None
    seed: SeedField = None
    logit_bias: BiasField = None
    grammar: Annotated[str | None, Field(min_length=1)] = None
    ignore_eos: bool | None = None
    session_id: SessionField = None
    cache_prompt: bool | None = None

    # llama.cpp's, with the value that asks for what is done anyway
    id_slot: Annotated[Any, AfterValidator(only(-1))] = None

    @property
    def reads_cache(self) -> bool:
        """Whether what is cached of the prompt is read: where nothing is said of it, too."""
        return self.cache_prompt is not False

    def sampler(self, json_schema: dict[str, Any] | None = None) -> SamplerConfig:
        """The sampler that was asked for. Raises HttpProblem (400) that names the field."""
        given = {name: getattr(self, name) for name in SamplingFields.model_fields if name in SAMPLER_FIELDS}
        return make_sampler({**given, "json_schema": json_schema})


SAMPLER_FIELDS: Final = frozenset(SamplerConfig.__dataclass_fields__)


def make_sampler(given: dict[str, Any]) -> SamplerConfig:
    """A sampler of the values that are not None. Raises HttpProblem (400)."""
    try:
        return SamplerConfig(**{name: value for name, value in given.items() if value is not None})
    except (OptionError, InputError) as error:
        raise HttpProblem(400, "invalid_value", str(error), _named(str(error), SAMPLER_FIELDS)) from None


def _named(message: str, names: Iterable[str]) -> str | None:
    """The field that a message begins with."""
    first = re.match(r"[a-z_]+", message)
    return first[0] if first and first[0] in names else None


def session_of(field: str | None, headers: Any) -> str | None:
    """The session's name, from the body or from the header. Raises HttpProblem (400) where these differ."""
    header = headers.get(SESSION_HEADER)
    if header is not None and not SESSION_NAME.fullmatch(header):
        raise HttpProblem(400, "invalid_value", f"{SESSION_HEADER}: {NAME_RULE}", "session_id")
    if None not in (field, header) and field != header:
        raise HttpProblem(400, "invalid_value", f"session_id and the header {SESSION_HEADER} differ", "session_id")
    return header if field is None else field
