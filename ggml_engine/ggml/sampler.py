"""`Sampler`: chooses the next token from logits, by libllama's samplers in llama.cpp's order.

Greedy without anything that changes logits is an argmax. Else what changes logits runs first (`_shaping`), then what
chooses among them (`_chain`): over candidates where that comes to the same (`sampler_needs`), else over whole rows. The
two are made in `sampler_chains`.

With a grammar, a token is first drawn freely and kept if the grammar allows it; only otherwise is the grammar put to
all tokens and one drawn again. That is llama.cpp's way: without truncation it gives the same distribution as asking the
grammar first (a refused draw is replaced by one from the allowed ones), and it spares a walk over 262,144 tokens at
almost every step. A grammar that holds from a trigger on changes nothing before it.

Holds what it knows of the past (penalties, grammar, random numbers) for one sequence. One thread at a time.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ggml_engine.errors import ClosedError, ComputeError, InputError, NativeError
from ggml_engine.ggml.candidates import MAX_CANDIDATES, Candidates, RowNeed, best_of
from ggml_engine.ggml.library import ffi, load
from ggml_engine.ggml.sampler_chains import cloned, make_choosing, make_shaping
from ggml_engine.ggml.sampler_config import MAX_SEED, SamplerConfig
from ggml_engine.ggml.sampler_grammar import SamplerGrammar, make_grammar
from ggml_engine.ggml.sampler_needs import need_of

if TYPE_CHECKING:
    from ggml_engine.ggml.vocab import Vocabulary

__all__ = ["Sampler", "SamplerConfig"]

_CANDIDATE: Final = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])  # struct llama_token_data
_NOTHING_LEFT: Final = "logit bias, penalties and grammar leave no token to choose"


class _Scratch(threading.local):
    """One candidate array per thread and size: 3 MB for 262,144 tokens, too much for every session."""

    def __init__(self) -> None:
        self._arrays: dict[int, tuple[NDArray[Any], Any, Any]] = {}
        self._ids = np.empty(0, np.int32)

    def fill(self, ids: NDArray[np.int32] | None, logits: NDArray[np.float32]) -> tuple[NDArray[Any], Any]:
        """Candidates of these tokens (None: of all), and the same for libllama."""
        n = len(logits)
        size = max(n, MAX_CANDIDATES)
        if size not in self._arrays:
            made = np.zeros(size, _CANDIDATE)
            data = ffi.from_buffer("llama_token_data[]", made)
            self._arrays[size] = made, data, ffi.new("llama_token_data_array *")
        candidates, data, array = self._arrays[size]
        if ids is None:
            if len(self._ids) < n:
                self._ids = np.arange(n, dtype=np.int32)
            ids = self._ids[:n]
        candidates = candidates[:n]
        candidates["id"] = ids
        candidates["logit"] = logits
        array.data, array.size, array.selected, array.sorted = data, n, -1, False  # XTC moves `data`
        return candidates, array


_scratch = _Scratch()


def _random_seed() -> int:
    # of the system's randomness, without `secrets`, which loads OpenSSL; its bias is a millionth of a millionth
    return int.from_bytes(os.urandom(8), "little") % (MAX_SEED + 1)


class Sampler:
    """Chooses tokens for one sequence.

    `seed` is the one in use, `need` what `sample_from` is to be given of every row. InputError for a grammar, a schema
    or a biased token that the vocabulary cannot follow.
    """

    def __init__(self, vocabulary: Vocabulary, config: SamplerConfig) -> None:
        self.config: Final = config
        self.vocabulary: Final = vocabulary  # its native memory is used by the chain
        self.seed: Final = _random_seed() if config.seed is None else config.seed
        self._llama: Final = load().llama
        biases = dict(config.logit_bias)
        if biases:
            vocabulary.check_tokens(list(biases))
        biases.update(dict.fromkeys(vocabulary.suppressed, -math.inf))
        self._is_argmax: Final = config.is_greedy and not (biases or config.has_penalties or config.has_dry)
        self.need: Final[RowNeed] = need_of(config, biases, vocabulary.n_tokens)
        self._n_history: Final = max(
            config.repeat_last_n if config.has_penalties else 0, config.dry_penalty_last_n if config.has_dry else 0
        )
        self._grammar: SamplerGrammar | None = make_grammar(vocabulary, config)
        self._shaping: Any = make_shaping(vocabulary, config, biases)
        self._chain: Any = make_choosing(vocabulary, config, self.seed)
        self._is_closed = False

    # ---- use ----

    def sample(self, logits: NDArray[np.float32]) -> int:
        """The next token. `logits` is f32 [n_rows] (or [n_tokens]); rows without a token are never chosen.

        Does not take the token into the history: `accept` does. ComputeError for logits that are not finite.
        InputError when bias and grammar leave no token of this vocabulary.
        """
        self._check_open()
        row = self._shaped(logits)
        return self.sample_from(best_of(row, self.need) if self.need.n_best else None, lambda: row)

    def sample_from(self, candidates: Candidates | None, row: Callable[[], NDArray[np.float32]]) -> int:
        """As `sample`, from the candidates that `need` asks for, or more; None where it asks for the whole row.

        `row` gives that: where candidates do not do, too. They come to the token that the whole row comes to.
        """
        self._check_open()
        token = None
        if candidates is not None and candidates.is_finite:
            token = self._choose(candidates)
        if token is None:
            token = self._draw(self._checked(row()), is_free=True)
        # a whole grammar refuses at most once; one that waits for its trigger, one more token each time
        while self._grammar is not None and not self._grammar.allows(token):
            token = self._draw(self._checked(row()), is_free=False)
        return token

    def accept(self, token: int) -> None:
        """Take a chosen token into the history. InputError for one that is none, or that the grammar forbids here."""
        self._check_open()
        token = self.vocabulary.check_token(token)
        if self._grammar is not None:
            # libllama would end the process
            if not self._grammar.allows(token):
                raise InputError(f"token {token} ({self.vocabulary.text(token)!r}) does not fit the grammar here")
            self._grammar.accept(token)
        if self._shaping is not None:  # what chooses has no history
            self._llama.llama_sampler_accept(self._shaping, token)

    def accept_prompt(self, tokens: Sequence[int] | NDArray[np.integer[Any]]) -> None:
        """Take a sequence's earlier tokens into the history, for the penalties; the grammar begins after them."""
        self._check_open()
        ids = self.vocabulary.check_tokens(tokens)
        if self._shaping is not None and self._n_history:
            for token in ids[-self._n_history :].tolist():
                self._llama.llama_sampler_accept(self._shaping, token)

    def reset(self) -> None:
        """Forget the history: grammar at its root, the same random numbers again."""
        self._check_open()
        for part in (self._shaping, self._chain):
            if part is not None:
                self._llama.llama_sampler_reset(part)
        if self._grammar is not None:
            self._grammar.reset()

    def clone(self) -> Sampler:
        """An independent sampler in the same state: both go on with the same random numbers."""
        self._check_open()
        copy: Sampler = object.__new__(Sampler)
        copy.__dict__.update(self.__dict__)
        copy._shaping = cloned(self._shaping)
        copy._chain = cloned(self._chain)
        copy._grammar = None if self._grammar is None else self._grammar.clone()
        return copy

    def close(self) -> None:
        """Give the native memory back; may be called again. Other calls then raise ClosedError."""
        for part in (self._shaping, self._chain):
            if part is not None:
                ffi.release(part)
        if self._grammar is not None:
            self._grammar.close()
        self._shaping = self._chain = self._grammar = None
        self._is_closed = True

    def __enter__(self) -> Sampler:
        self._check_open()
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    # ---- choosing ----

    def _shaped(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        n = self.vocabulary.n_tokens
        if not isinstance(logits, np.ndarray) or logits.ndim != 1 or logits.dtype != np.float32 or len(logits) < n:
            found = f"{logits.dtype} {logits.shape}" if isinstance(logits, np.ndarray) else type(logits).__name__
            raise InputError(f"logits must be a float32 array of {n} or more, not {found}")
        return logits[:n]

    def _checked(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        logits = self._shaped(logits)
        # NaN reaches both ends, an infinity one of them
        if not math.isfinite(float(logits.max()) - float(logits.min())):
            n_bad = int(np.count_nonzero(~np.isfinite(logits)))
            raise ComputeError(
                f"non-finite logits: {n_bad} of {len(logits)} (bad weights, or an overflow in the graph)"
            )
        return logits

    def _choose(self, best: Candidates) -> int | None:
        """The token that the whole row comes to, by its best logits; None where equal ones leave the order open."""
        if self._is_argmax:
            return best.best_id
        candidates, array = _scratch.fill(best.ids, best.logits)
        if self._shaping is not None:
            self._llama.llama_sampler_apply(self._shaping, array)
        if self.config.is_greedy:
            return self._likeliest(candidates)
        if self._shaping is not None:
            candidates[:] = candidates[np.argsort(-candidates["logit"], kind="stable")]
        k = self.config.top_k
        values = candidates["logit"][: k + 1].tolist()
        if len(set(values)) < len(values):
            return None
        # in this order, `sorted` only spares the work that leads to the same order again
        array.size, array.sorted = k, True
        self._llama.llama_sampler_apply(self._chain, array)
        return self._selected(array)

    def _draw(self, logits: NDArray[np.float32], *, is_free: bool) -> int:
        """A token by the whole row, of those that the grammar allows or of all."""
        if self._is_argmax and is_free:
            return int(logits.argmax())
        candidates, array = _scratch.fill(None, logits)
        if self._grammar is not None and not is_free:
            self._grammar.forbid(candidates, array)
            if candidates["logit"].max() == -np.inf:
                raise InputError("the grammar allows no token of this vocabulary here")
        if self._shaping is not None:
            self._llama.llama_sampler_apply(self._shaping, array)
        if self.config.is_greedy:
            return self._likeliest(candidates)
        self._llama.llama_sampler_apply(self._chain, array)
        return self._selected(array)

    def _likeliest(self, candidates: NDArray[Any]) -> int:
        """The largest logit after all that changes any, the first in the vocabulary of equal ones."""
        logits = candidates["logit"]
        largest = logits.max()
        if not math.isfinite(float(largest)):
            raise InputError(_NOTHING_LEFT)
        return int(candidates["id"][logits == largest].min())

    @staticmethod
    def _selected(array: Any) -> int:
        if not 0 <= array.selected < array.size:
            raise NativeError("libllama's samplers chose no token")
        chosen = array.data[array.selected]
        if not math.isfinite(chosen.logit):
            raise InputError(_NOTHING_LEFT)
        return int(chosen.id)

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the sampler was closed")
