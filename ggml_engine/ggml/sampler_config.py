"""`SamplerConfig`: how the next token is chosen. Values only, checked when made; `sampler` does the choosing.

Names and defaults are those of llama.cpp's command line (common.h, `common_params_sampling`), except that here no value
stands for another: nothing is switched off by -1, and temperature 0 is greedy whatever the other options say.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from ggml_engine.errors import OptionError
from ggml_engine.ggml.lazy_grammar import LazyGrammar

__all__ = ["SamplerConfig"]

MAX_HISTORY: Final = 1_048_576
MAX_BIASES: Final = 4_096
MAX_BREAKERS: Final = 32
MAX_BREAKER_BYTES: Final = 40  # libllama cuts longer ones
# libllama takes 2^32 - 1 for "any"
MAX_SEED: Final = 2**32 - 2

# option -> least, most; those that may not be negative say so by 0
_NUMBERS: Final = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "typical_p": (0.0, 1.0),
    "repeat_penalty": (0.01, 100.0),
    "presence_penalty": (-100.0, 100.0),
    "frequency_penalty": (-100.0, 100.0),
    "dry_multiplier": (0.0, 100.0),
    "dry_base": (1.0, 100.0),
    "xtc_probability": (0.0, 1.0),
    "xtc_threshold": (0.0, 1.0),
    "mirostat_tau": (0.0, 100.0),
    "mirostat_eta": (0.0, 1.0),
    "top_n_sigma": (0.0, 100.0),
    "dynatemp_range": (0.0, 100.0),
    "dynatemp_exponent": (0.0, 100.0),
}
_INTEGERS: Final = {
    "top_k": (0, 2**31 - 1),
    "repeat_last_n": (0, MAX_HISTORY),
    "dry_allowed_length": (0, MAX_HISTORY),
    "dry_penalty_last_n": (0, MAX_HISTORY),
    "mirostat": (0, 2),
}


@dataclass(frozen=True, slots=True)
class SamplerConfig:
    """How the next token is chosen; a value out of its range raises OptionError.

    The samplers run in llama.cpp's order: logit bias, repetition penalties, DRY, top-n-sigma, top-k, typical, top-p,
    min-p, XTC, temperature. With mirostat 1 or 2, temperature and mirostat replace all but the logit bias.
    0 switches off `top_k`, `top_n_sigma`, `min_p`, `dry_multiplier`, `xtc_probability`, `dynatemp_range`, `mirostat`
    and both history lengths (in tokens); 1 switches off `top_p`, `typical_p` and `repeat_penalty`.

    `temperature` 0 is greedy: the likeliest token after bias, penalties and DRY; nothing random runs.
    `logit_bias` adds to a token's logit; minus infinity forbids it. `seed` None draws one (`Sampler.seed` has it).
    `grammar` is GBNF text whose rule `root` the output follows, or a `LazyGrammar`, which holds from a trigger on;
    `json_schema` a schema, as text or as a dict.
    """

    temperature: float = 0.8
    top_k: int = 40
    top_p: float = 0.95
    min_p: float = 0.05
    typical_p: float = 1.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_penalty_last_n: int = 64
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    xtc_probability: float = 0.0
    xtc_threshold: float = 0.1
    mirostat: int = 0
    mirostat_tau: float = 5.0
    mirostat_eta: float = 0.1
    top_n_sigma: float = 0.0
    dynatemp_range: float = 0.0
    dynatemp_exponent: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    grammar: str | LazyGrammar | None = None
    json_schema: str | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        for name, (low, high) in _NUMBERS.items():
            value = getattr(self, name)
            if not _is_number(value) or not low <= value <= high:
                raise OptionError(f"{name} must be a number from {low:g} to {high:g}, not {value!r}")
            object.__setattr__(self, name, float(value))
        for name, (least, most) in _INTEGERS.items():
            value = getattr(self, name)
            if type(value) is not int or not least <= value <= most:
                raise OptionError(f"{name} must be an integer from {least} to {most}, not {value!r}")
        if self.seed is not None and (type(self.seed) is not int or not 0 <= self.seed <= MAX_SEED):
            raise OptionError(f"seed must be None or an integer from 0 to {MAX_SEED}, not {self.seed!r}")
        self._check_breakers()
        self._check_biases()
        if self.grammar is not None and not isinstance(self.grammar, (str, LazyGrammar)):
            raise OptionError(f"grammar must be GBNF text, a LazyGrammar or None, not {type(self.grammar).__name__}")
        if self.json_schema is not None and not isinstance(self.json_schema, (str, dict)):
            raise OptionError(f"json_schema must be text, a dict or None, not {type(self.json_schema).__name__}")
        if self.grammar is not None and self.json_schema is not None:
            raise OptionError("grammar and json_schema exclude each other")

    @classmethod
    def greedy(cls) -> SamplerConfig:
        """Always the likeliest token."""
        return cls(temperature=0.0)

    @property
    def is_greedy(self) -> bool:
        """Whether nothing random runs (a temperature that divides any logit to infinity counts as 0)."""
        return self.temperature < 1e-30

    @property
    def has_penalties(self) -> bool:
        """Whether repetition, frequency or presence of earlier tokens changes anything."""
        return self.repeat_last_n > 0 and (
            self.repeat_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        )

    @property
    def has_dry(self) -> bool:
        """Whether DRY penalties change anything."""
        return self.dry_multiplier > 0.0 and self.dry_penalty_last_n > 0

    def _check_breakers(self) -> None:
        breakers: Any = self.dry_sequence_breakers
        if (
            isinstance(breakers, str)
            or not isinstance(breakers, Sequence)
            or not all(isinstance(text, str) for text in breakers)
        ):
            raise OptionError("dry_sequence_breakers must be texts")
        object.__setattr__(self, "dry_sequence_breakers", tuple(breakers))
        if len(breakers) > MAX_BREAKERS:
            raise OptionError(f"dry_sequence_breakers may be at most {MAX_BREAKERS}, not {len(breakers)}")
        for text in breakers:
            n_bytes = len(text.encode("utf-8", "surrogatepass"))
            if not 0 < n_bytes <= MAX_BREAKER_BYTES or any(c == "\0" or "\ud800" <= c <= "\udfff" for c in text):
                raise OptionError(
                    f"a dry_sequence_breaker must be 1 to {MAX_BREAKER_BYTES} bytes of UTF-8 without NUL, not {text!r}"
                )

    def _check_biases(self) -> None:
        if not isinstance(self.logit_bias, Mapping) or len(self.logit_bias) > MAX_BIASES:
            raise OptionError(f"logit_bias must be a mapping of at most {MAX_BIASES} token ids to numbers")
        biases = {}
        for token, bias in self.logit_bias.items():
            if type(token) is not int or not 0 <= token < 2**31:
                raise OptionError(f"logit_bias: a token id must be an integer from 0 to {2**31 - 1}, not {token!r}")
            is_forbidden = isinstance(bias, float) and bias == -math.inf
            if not is_forbidden and (not _is_number(bias) or not -1e6 <= bias <= 1e6):
                raise OptionError(f"logit_bias of token {token} must be -1e6 to 1e6 or minus infinity, not {bias!r}")
            biases[token] = float(bias)
        object.__setattr__(self, "logit_bias", MappingProxyType(biases))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and -1e300 < value < 1e300
