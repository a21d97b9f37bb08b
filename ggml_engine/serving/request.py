"""`ServingRequest`: what a caller asks of a serving runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ggml_engine.control.config import GenConfig
from ggml_engine.errors import InputError, OptionError
from ggml_engine.ggml.sampler_config import MAX_SEED

MAX_NAME_LENGTH = 256


@dataclass(frozen=True, slots=True)
class ServingRequest:
    """A prompt, how to go on after it, and for whom.

    `tokens` [tokens] is the whole history. `n` choices are generated after it; choice `i` with the seed of
    `config` + i, where there is one. `session` names the session that goes on with it, None is a request of its own.
    What is of one `partition` (sessions, snapshots) is not there for another. `opening` is how many tokens at its
    beginning other prompts have too (a system prompt, say; 0: not known); only a policy of checkpoints looks at it.
    `cache_prompt` False evaluates the whole prompt: nothing is read of the shared cache, nor of what its session holds,
    which begins anew. Raises InputError and OptionError for what cannot be.
    """

    tokens: Sequence[int]
    config: GenConfig = field(default_factory=GenConfig)
    n: int = 1
    session: str | None = None
    partition: str = ""
    opening: int = 0
    cache_prompt: bool = True

    def __post_init__(self) -> None:
        if isinstance(self.n, bool) or not isinstance(self.n, int) or self.n < 1:
            raise OptionError(f"n is how many choices are wanted, at least 1, is {self.n!r}")
        if self.session is not None:
            check_name(self.session)
        if not isinstance(self.partition, str):
            raise InputError(f"a partition is a string, {self.partition!r:.60} was given")
        if isinstance(self.opening, bool) or not isinstance(self.opening, int) or self.opening < 0:
            raise InputError(f"opening is a number of tokens, is {self.opening!r}")
        if not isinstance(self.cache_prompt, bool):
            raise OptionError(f"cache_prompt is true or false, is {self.cache_prompt!r}")

    def config_of(self, index: int) -> GenConfig:
        """The configuration of one choice: those after the first have seeds of their own."""
        seed = self.config.sampler.seed
        if not index or seed is None:
            return self.config
        return replace(self.config, sampler=replace(self.config.sampler, seed=(seed + index) % (MAX_SEED + 1)))


def check_name(name: str) -> None:
    """Raise InputError for what cannot be a session's name."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH:
        raise InputError(f"a session's name is a string of 1 to {MAX_NAME_LENGTH} characters, {name!r:.60} was given")
