"""`Generation`: the handle of one generate call over one sequence.

Owns a sampler, a decoder of the stream and the counting of tokens and times. Runs on the thread that iterates it.
Leaves the sequence with every token that it forwarded; the last sampled one is pending: sampled, not committed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ggml_engine.control.config import GenConfig
from ggml_engine.control.stop import StopMatcher
from ggml_engine.errors import CancelledError, ContextLengthError, InputError
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.ggml.sampler import Sampler
from ggml_engine.ggml.vocab import StreamDecoder, Vocabulary

PrefillProgress = Callable[[int, int], None]  # (tokens done, tokens in all)


class Reason(str, Enum):
    """Why a generation ended."""

    FINISHED = "finished"  # the model said so
    LENGTH = "length"  # max_tokens, or the context is full
    STOP = "stop"  # a stop string or stop token
    CANCELLED = "cancelled"


@dataclass(slots=True)
class GenerationStats:
    """Counts and times of a generation. Times in seconds since it began to run."""

    prompt_tokens: int = 0
    reused_tokens: int = 0
    evaluated_tokens: int = 0
    generated_tokens: int = 0
    prefill_s: float = 0.0
    first_token_s: float | None = None
    decode_s: float = 0.0
    reason: Reason | None = None
    token_times_s: list[float] = field(default_factory=list)

    @property
    def prefill_tokens_per_s(self) -> float:
        """Speed of the evaluated prompt tokens; reused ones do not count."""
        return self.evaluated_tokens / self.prefill_s if self.prefill_s > 0 else 0.0

    @property
    def decode_tokens_per_s(self) -> float:
        """Speed after the first token."""
        n = self.generated_tokens - 1
        return n / self.decode_s if n > 0 and self.decode_s > 0 else 0.0


class SequenceOwner(Protocol):
    """Who keeps a sequence: its committed tokens, and the generation that may extend it."""

    sequence: int
    tokens: list[int]
    generation: Generation | None


class Generation(Iterator[str]):
    """Iterate for pieces of text; a piece never holds half a character.

    `tokens` are those sampled so far, the end token included; `text` is what was shown. `result()` runs it to its end.
    """

    def __init__(
        self,
        executor: GgmlExecutor,
        vocabulary: Vocabulary,
        owner: SequenceOwner,
        delta: npt.NDArray[np.int32],
        config: GenConfig,
        on_prefill: PrefillProgress | None = None,
    ) -> None:
        """`delta` are the tokens to forward first, at least one, after those that the owner's sequence holds."""
        self._executor = executor
        self._vocabulary = vocabulary
        self._owner = owner  # keeps the sequence open while it is needed
        self._sequence = owner.sequence
        self._delta = delta
        history = owner.tokens
        if not self._delta.size:
            raise InputError("there is nothing to generate from: the prompt has no tokens")
        needed, limit = len(history) + int(delta.size), executor.cache.capacity
        if needed > limit:
            raise ContextLengthError(needed, limit)
        self._history = list(history)
        self._config = config
        self._on_prefill = on_prefill
        self.tokens: list[int] = []
        self.text = ""
        self.stats = GenerationStats(prompt_tokens=needed, reused_tokens=len(history))
        self._cancelled = False
        self._pieces = self._run()

    def __next__(self) -> str:
        return next(self._pieces)

    def cancel(self) -> None:
        """End before the next step; may be called from any thread."""
        self._cancelled = True

    def result(self) -> str:
        """Run to the end and return the whole text."""
        for _ in self:
            pass
        return self.text

    @property
    def reason(self) -> Reason | None:
        """Why it ended; None while it runs."""
        return self.stats.reason

    # ---- the loop

    def _run(self) -> Iterator[str]:
        decoder, matcher = StreamDecoder(self._vocabulary), StopMatcher(self._config.stop)
        with Sampler(self._vocabulary, self._config.sampler) as sampler:
            sampler.accept_prompt([*self._history, *self._delta.tolist()])
            begun = time.perf_counter()
            logits = self._prefill(begun)
            while logits is not None:
                token = sampler.sample(logits)
                sampler.accept(token)
                self._count(token, begun)
                ends = self._ends(token)
                shown = matcher.push("" if ends else decoder.push(token))
                if shown:
                    self.text += shown
                    yield shown
                reason = ends or self._bounded(matcher)
                if reason is not None:
                    self.stats.reason = reason
                    break
                logits = self._forward([token], "last")[0]
        rest = matcher.push(decoder.finish()) + matcher.finish()
        if rest:
            self.text += rest
            yield rest

    def _prefill(self, begun: float) -> npt.NDArray[np.float32] | None:
        chunk = self._executor.options.max_batch_tokens
        total = int(self._delta.size)
        for start in range(0, total, chunk):
            if self._cancelled:
                self.stats.reason = Reason.CANCELLED
                return None
            end = min(start + chunk, total)
            wanted = "last" if end == total else "none"
            logits = self._forward(self._delta[start:end], wanted)
            self.stats.evaluated_tokens = end
            self.stats.prefill_s = time.perf_counter() - begun
            if self._on_prefill is not None:
                self._on_prefill(end, total)
        last: npt.NDArray[np.float32] = logits[0]
        return last

    def _forward(self, tokens: Sequence[int] | npt.NDArray[np.int32], wanted: str) -> npt.NDArray[np.float32]:
        if self._owner.generation is not self:
            raise CancelledError("another generation has begun in this conversation")
        logits = self._executor.forward(Batch.of_sequence(self._sequence, tokens, logits=wanted))
        self._owner.tokens.extend(int(token) for token in tokens)
        return logits

    def _count(self, token: int, begun: float) -> None:
        now = time.perf_counter() - begun
        self.tokens.append(token)
        self.stats.generated_tokens += 1
        self.stats.token_times_s.append(now)
        if self.stats.first_token_s is None:
            self.stats.first_token_s = now
        self.stats.decode_s = now - self.stats.first_token_s

    def _ends(self, token: int) -> Reason | None:
        if token in self._config.stop_tokens:
            return Reason.STOP
        if not self._config.ignore_eos and self._vocabulary.is_end(token):
            return Reason.FINISHED
        return None

    def _bounded(self, matcher: StopMatcher) -> Reason | None:
        if matcher.matched is not None:
            return Reason.STOP
        if self._cancelled:
            return Reason.CANCELLED
        limit = self._config.max_tokens
        if limit is not None and len(self.tokens) >= limit:
            return Reason.LENGTH
        if self._executor.length(self._sequence) >= self._executor.cache.capacity:
            return Reason.LENGTH
        return None
