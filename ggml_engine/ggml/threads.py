"""`ThreadCounts`: how many threads compute a step.

Owns the defaults and the limits; how a backend is told is `ggml/backends.py`'s to know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ggml_engine.errors import OptionError
from ggml_engine.ggml.processors import count_cores

__all__ = ["MAX_THREADS", "ThreadCounts", "check_threads", "default_threads"]

MAX_THREADS: Final = 512  # GGML_MAX_N_THREADS: ggml dies of more


def default_threads(leave_cores: int = 0) -> int:
    """One for each core that computes best here (`ggml/processors.py`), but for `leave_cores` of them; at least 1."""
    return max(1, min(count_cores() - leave_cores, MAX_THREADS))


def check_threads(name: str, value: object, least: int = 1) -> int:
    """`value` as a number of threads. Raises OptionError for what is none, with the option's name."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MAX_THREADS:
        raise OptionError(f"{name} must be {least} to {MAX_THREADS}, asked for {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class ThreadCounts:
    """Threads of steps of one token (`decode`) and of all other steps (`prefill`), 1 to 512 each.

    The border is libllama's: a step of one token reads all weights for a single product each, so memory is what it
    waits for; with every further token there is more to compute on the same bytes.
    """

    decode: int
    prefill: int

    def __post_init__(self) -> None:
        """Raise OptionError for what is no number of threads."""
        check_threads("threads", self.decode)
        check_threads("threads_batch", self.prefill)

    @classmethod
    def choose(cls, threads: int | None = None, threads_batch: int | None = None, leave_cores: int = 0) -> ThreadCounts:
        """What the options of those names stand for.

        `threads` is by default one for each core that computes best, less `leave_cores`; `threads_batch` is by default
        the same. Raises OptionError, also for both `threads` and `leave_cores`: a number that is given is kept.
        """
        if check_threads("leave_cores", leave_cores, least=0) and threads is not None:
            raise OptionError(
                f"leave_cores lowers the default of threads, and {threads!r} threads are asked for: give one of the two"
            )
        decode = default_threads(leave_cores) if threads is None else threads
        return cls(decode, decode if threads_batch is None else threads_batch)

    @property
    def are_same(self) -> bool:
        """Whether all steps have the same number."""
        return self.decode == self.prefill

    def of_step(self, n_tokens: int) -> int:
        """Threads of a step of so many tokens."""
        return self.decode if n_tokens == 1 else self.prefill
