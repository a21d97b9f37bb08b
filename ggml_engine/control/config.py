"""What one generation is asked to do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ggml_engine.errors import OptionError
from ggml_engine.ggml.sampler_config import SamplerConfig

MAX_STOP_STRINGS = 16
MAX_STOP_LENGTH = 1024
MAX_LOGPROBS = 64
MAX_SHOWN_TOKENS = 4096


@dataclass(frozen=True, slots=True)
class GenConfig:
    """Bounds and sampling of a generation.

    `max_tokens` None means until the model ends or the context is full. `stop` strings end it and are not part of the
    text; `stop_tokens` end it like the model's own end tokens, which `ignore_eos` turns off. `shown_tokens` are control
    tokens whose text is part of the output, as markup that a program reads; others have no text. A stop string may
    begin and end in theirs.

    `prefill_breakpoints` are positions of the session: no chunk of a prefill crosses one, and `on_breakpoint` is told
    when one is reached. `logprobs` asks for the natural logarithms of the model's own probabilities (before any
    sampler) of every generated token and of so many likeliest ones beside it; `prompt_logprobs` asks the same of the
    prompt's tokens that are evaluated, all but the first of them.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: frozenset[int] = frozenset()
    shown_tokens: frozenset[int] = frozenset()
    ignore_eos: bool = False
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    prefill_breakpoints: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        n = self.max_tokens
        if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
            raise OptionError(f"max_tokens must be a positive integer, is {n!r}")
        if isinstance(self.stop, str):  # type: ignore[unreachable]  # a caller without types, and a likely slip
            raise OptionError("stop is a sequence of strings, one string was given")
        object.__setattr__(self, "stop", tuple(self.stop))
        if len(self.stop) > MAX_STOP_STRINGS:
            raise OptionError(f"at most {MAX_STOP_STRINGS} stop strings are possible, {len(self.stop)} were given")
        for text in self.stop:
            if not isinstance(text, str) or not 0 < len(text) <= MAX_STOP_LENGTH:
                raise OptionError(f"a stop string has 1 to {MAX_STOP_LENGTH} characters, one is {text!r:.60}")
        object.__setattr__(self, "stop_tokens", frozenset(self.stop_tokens))
        object.__setattr__(self, "shown_tokens", _checked_ids(self.shown_tokens))
        points = tuple(sorted(set(self.prefill_breakpoints)))
        for point in points:
            if isinstance(point, bool) or not isinstance(point, int) or point < 1:
                raise OptionError(f"a prefill breakpoint is a position of at least 1, one is {point!r}")
        object.__setattr__(self, "prefill_breakpoints", points)
        for name in ("logprobs", "prompt_logprobs"):
            wanted = getattr(self, name)
            if wanted is not None and (isinstance(wanted, bool) or not isinstance(wanted, int)):
                raise OptionError(f"{name} must be a number of tokens or None, is {wanted!r}")
            if wanted is not None and not 0 <= wanted <= MAX_LOGPROBS:
                raise OptionError(f"{name} must be 0 to {MAX_LOGPROBS}, is {wanted}")


def _checked_ids(tokens: Iterable[int]) -> frozenset[int]:
    shown = frozenset(tokens)
    if len(shown) > MAX_SHOWN_TOKENS:
        raise OptionError(f"at most {MAX_SHOWN_TOKENS} tokens can be shown, {len(shown)} were given")
    for token in shown:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise OptionError(f"shown_tokens are ids of tokens, one is {token!r:.60}")
    return shown
