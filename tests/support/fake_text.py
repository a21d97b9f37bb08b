"""The text of the fake executor's tokens: token 17 is "<17>". Samplers in numpy, and a count of those that are open."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import InputError
from ggml_engine.ggml.sampler_config import SamplerConfig


class FakeSampler:
    """Greedy at temperature 0, else by a seeded generator; a repetition penalty over the last tokens."""

    def __init__(self, text: FakeText, config: SamplerConfig) -> None:
        self._text = text
        self._config = config
        self._past: deque[int] = deque(maxlen=config.repeat_last_n)
        self._random = np.random.default_rng(config.seed)
        self.is_closed = False
        self.prompts: list[list[int]] = []  # every accept_prompt

    def accept_prompt(self, tokens: Sequence[int]) -> None:
        self._check_open()
        self.prompts.append(list(tokens))
        self._past.extend(self._text.check_tokens(tokens).tolist() if len(tokens) else [])

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        self._check_open()
        return penalised(logits, list(self._past), self._config, self._random)

    def accept(self, token: int) -> None:
        self._check_open()
        self._past.append(token)

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._text.count_samplers(-1)

    def _check_open(self) -> None:
        assert not self.is_closed, "the sampler was closed"


def penalised(
    logits: npt.NDArray[np.float32],
    past: Sequence[int],
    config: SamplerConfig,
    random: np.random.Generator | None = None,
) -> int:
    """The token by a row of logits f32 [n_vocab] after `past`: logits of tokens in it are divided by the penalty."""
    row = logits.astype(np.float64)
    for token in Counter(past):
        row[token] = row[token] / config.repeat_penalty if row[token] > 0 else row[token] * config.repeat_penalty
    if config.temperature == 0:
        return int(row.argmax())
    scaled = np.exp((row - row.max()) / config.temperature)
    assert random is not None
    return int(random.choice(row.size, p=scaled / scaled.sum()))


class FakeDecoder:
    """Token n is "<n>"; tokens in `pieces` are what stands there."""

    def __init__(self, pieces: dict[int, str], last: str) -> None:
        self._pieces = pieces
        self._last = last

    def push(self, token: int) -> str:
        return self._pieces.get(token, f"<{token}>")

    def finish(self) -> str:
        last, self._last = self._last, ""
        return last


class FakeText:
    """A `TextModel`. `ends` are the tokens that the model ends with, `pieces` what tokens look like, if not "<n>"."""

    def __init__(self, n_vocab: int = 97, ends: Sequence[int] = (), pieces: dict[int, str] | None = None) -> None:
        self.n_vocab = n_vocab
        self.ends = set(ends)
        self.pieces = pieces or {}
        self.hidden: frozenset[int] = frozenset()  # control tokens: no text unless it is asked for
        self.last_piece = ""  # what every decoder has left at the end
        self.n_open_samplers = 0
        self.samplers: list[FakeSampler] = []
        self.sampler_error: Exception | None = None
        self._lock = threading.Lock()  # samplers are made on the callers' threads and closed on the engine's

    def check_tokens(self, tokens: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
        ids = np.asarray(tokens)
        if ids.ndim != 1 or ids.dtype.kind not in "iu" or not ids.size or ids.min() < 0 or ids.max() >= self.n_vocab:
            raise InputError(f"token ids are 0 to {self.n_vocab - 1}, got {tokens!r:.60}")
        return ids.astype(np.int32)

    def is_end(self, token: int) -> bool:
        return token in self.ends

    def sampler(self, config: SamplerConfig) -> FakeSampler:
        if self.sampler_error is not None:
            raise self.sampler_error
        made = FakeSampler(self, config)
        self.count_samplers(1)
        self.samplers.append(made)
        return made

    def count_samplers(self, n: int) -> None:
        with self._lock:
            self.n_open_samplers += n

    def decoder(self, shown: frozenset[int] = frozenset()) -> FakeDecoder:
        hidden = dict.fromkeys(self.hidden - shown, "")
        return FakeDecoder(self.pieces | hidden, self.last_piece)

    def shown(self, tokens: Sequence[int]) -> str:
        """The text of tokens."""
        return "".join(self.pieces.get(token, f"<{token}>") for token in tokens) + self.last_piece
