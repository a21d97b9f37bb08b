"""What the control plane needs of a vocabulary: token ids checked, sampled, and turned into text.

`VocabularyText` is the real one; a test may bring one without a model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ggml_engine.ggml.candidates import Candidates, RowNeed
from ggml_engine.ggml.sampler import Sampler
from ggml_engine.ggml.sampler_config import SamplerConfig
from ggml_engine.ggml.vocab import StreamDecoder, Vocabulary


class TokenSampler(Protocol):
    """Chooses tokens for one generation."""

    def accept_prompt(self, tokens: Sequence[int]) -> None:
        """Take the history into account, for penalties."""

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        """A token, by a row of logits f32 [n_vocab]."""

    def accept(self, token: int) -> None:
        """Take a chosen token into account."""

    def close(self) -> None:
        """Free what it holds; idempotent."""


@runtime_checkable
class CandidateSampler(TokenSampler, Protocol):
    """A sampler that does with the best of a row, where it can."""

    @property
    def need(self) -> RowNeed:
        """What it needs of every row."""

    def sample_from(self, candidates: Candidates | None, row: Callable[[], npt.NDArray[np.float32]]) -> int:
        """The token of `sample`, from what `need` asks for, or more; `row` gives the whole row."""


class TokenDecoder(Protocol):
    """Turns the tokens of one generation into text, whole characters at a time."""

    def push(self, token: int) -> str:
        """The text that this token completes."""

    def finish(self) -> str:
        """What is left at the end."""


class TextModel(Protocol):
    """The tokens and the text of one model."""

    def check_tokens(self, tokens: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
        """The ids as an array [tokens]. Raises InputError for one that the model does not have."""

    def is_end(self, token: int) -> bool:
        """Whether the model ends with this token."""

    def sampler(self, config: SamplerConfig) -> TokenSampler:
        """A sampler for one generation. Raises InputError and OptionError for what it cannot be."""

    def decoder(self, shown: frozenset[int] = frozenset()) -> TokenDecoder:
        """A decoder for one generation, which shows the text of these control tokens."""


class VocabularyText:
    """`TextModel` of a GGUF vocabulary."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    def check_tokens(self, tokens: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
        """The ids as an array."""
        return self.vocabulary.check_tokens(tokens)

    def is_end(self, token: int) -> bool:
        """Whether the model ends with this token."""
        return self.vocabulary.is_end(token)

    def sampler(self, config: SamplerConfig) -> Sampler:
        """A sampler for one generation."""
        return Sampler(self.vocabulary, config)

    def decoder(self, shown: frozenset[int] = frozenset()) -> StreamDecoder:
        """A decoder for one generation; it goes on after a prompt, so a leading space is part of the text."""
        return StreamDecoder(self.vocabulary, continues=True, shown=shown)
