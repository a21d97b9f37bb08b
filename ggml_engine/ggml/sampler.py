"""`Sampler`: chooses the next token from logits, by libllama's samplers in llama.cpp's order.

Greedy without anything that changes logits is an argmax; the chain is for the rest. With a grammar, a token is first
drawn freely and kept if the grammar allows it; only otherwise is the grammar put to all tokens and one drawn again.
That is llama.cpp's way: without truncation it gives the same distribution as asking the grammar first (a refused draw
is replaced by one from the allowed ones), and it spares a walk over 262,144 tokens at almost every step.

Holds what it knows of the past (penalties, grammar, random numbers) for one sequence. One thread at a time.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from ggml_engine.errors import ClosedError, ComputeError, InputError, NativeError
from ggml_engine.ggml.gbnf import check_grammar
from ggml_engine.ggml.json_schema import schema_to_grammar
from ggml_engine.ggml.library import ffi, load
from ggml_engine.ggml.sampler_config import MAX_SEED, SamplerConfig

if TYPE_CHECKING:
    from ggml_engine.ggml.vocab import Vocabulary

__all__ = ["Sampler", "SamplerConfig"]

_CANDIDATE: Final = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])  # struct llama_token_data
_MIROSTAT_M: Final = 100
_BLOCK: Final = 512


class _Scratch(threading.local):
    """One candidate array per thread and vocabulary size: 3 MB for 262,144 tokens, too much for every session."""

    def __init__(self) -> None:
        self._arrays: dict[int, tuple[NDArray[Any], NDArray[np.int32], Any]] = {}

    def get(self, n: int) -> tuple[NDArray[Any], NDArray[np.int32], Any]:
        if n not in self._arrays:
            candidates = np.zeros(n, _CANDIDATE)
            self._arrays[n] = (
                candidates,
                np.arange(n, dtype=np.int32),
                ffi.from_buffer("llama_token_data[]", candidates),
            )
        return self._arrays[n]


_scratch = _Scratch()


class Sampler:
    """Chooses tokens for one sequence.

    `seed` is the one in use. InputError for a grammar, a schema or a biased token that the vocabulary cannot follow.
    """

    def __init__(self, vocabulary: Vocabulary, config: SamplerConfig) -> None:
        self.config: Final = config
        self.vocabulary: Final = vocabulary  # its native memory is used by the chain
        self.seed: Final = secrets.randbelow(MAX_SEED + 1) if config.seed is None else config.seed
        self._llama: Final = load().llama
        biases = dict(config.logit_bias)
        if biases:
            vocabulary.check_tokens(list(biases))
        biases.update(dict.fromkeys(vocabulary.suppressed, -math.inf))
        self._is_argmax: Final = config.is_greedy and not (biases or config.has_penalties or config.has_dry)
        is_first_top_k = not (biases or config.has_penalties or config.has_dry or config.top_n_sigma or config.mirostat)
        self._can_reduce: Final = is_first_top_k and not config.is_greedy and 0 < config.top_k <= 256
        self._n_history: Final = max(
            config.repeat_last_n if config.has_penalties else 0, config.dry_penalty_last_n if config.has_dry else 0
        )
        self._grammar: Any = self._make_grammar()
        self._chain: Any = None if self._is_argmax else self._make_chain(biases)
        self._is_closed = False

    # ---- use ----

    def sample(self, logits: NDArray[np.float32]) -> int:
        """The next token. `logits` is f32 [n_rows] (or [n_tokens]); rows without a token are never chosen.

        Does not take the token into the history: `accept` does. ComputeError for logits that are not finite.
        InputError when bias and grammar leave no token of this vocabulary.
        """
        self._check_open()
        logits = self._checked(logits)
        token = self._draw(logits, is_free=True)
        if self._grammar is None or self._allows(token):
            return token
        return self._draw(logits, is_free=False)

    def accept(self, token: int) -> None:
        """Take a chosen token into the history. InputError for one that is none, or that the grammar forbids here."""
        self._check_open()
        token = int(self.vocabulary.check_tokens([token])[0])
        if self._grammar is not None:
            # libllama would end the process
            if not self._allows(token):
                raise InputError(f"token {token} ({self.vocabulary.text(token)!r}) does not fit the grammar here")
            self._llama.llama_sampler_accept(self._grammar, token)
        if self._chain is not None:
            self._llama.llama_sampler_accept(self._chain, token)

    def accept_prompt(self, tokens: Sequence[int] | NDArray[np.integer[Any]]) -> None:
        """Take a sequence's earlier tokens into the history, for the penalties; the grammar begins after them."""
        self._check_open()
        ids = self.vocabulary.check_tokens(tokens)
        if self._chain is not None and self._n_history:
            for token in ids[-self._n_history :].tolist():
                self._llama.llama_sampler_accept(self._chain, token)

    def reset(self) -> None:
        """Forget the history: grammar at its root, the same random numbers again."""
        self._check_open()
        for part in (self._chain, self._grammar):
            if part is not None:
                self._llama.llama_sampler_reset(part)

    def clone(self) -> Sampler:
        """An independent sampler in the same state: both go on with the same random numbers."""
        self._check_open()
        copy: Sampler = object.__new__(Sampler)
        copy.__dict__.update(self.__dict__)
        copy._chain = self._cloned(self._chain)
        copy._grammar = self._cloned(self._grammar)
        return copy

    def close(self) -> None:
        """Give the native memory back; may be called again. Other calls then raise ClosedError."""
        for part in (self._chain, self._grammar):
            if part is not None:
                ffi.release(part)
        self._chain = self._grammar = None
        self._is_closed = True

    def __enter__(self) -> Sampler:
        self._check_open()
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()

    # ---- choosing ----

    def _checked(self, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        n = self.vocabulary.n_tokens
        if not isinstance(logits, np.ndarray) or logits.ndim != 1 or logits.dtype != np.float32 or len(logits) < n:
            found = f"{logits.dtype} {logits.shape}" if isinstance(logits, np.ndarray) else type(logits).__name__
            raise InputError(f"logits must be a float32 array of {n} or more, not {found}")
        logits = logits[:n]
        # NaN reaches both ends, an infinity one of them
        if not math.isfinite(float(logits.max()) - float(logits.min())):
            n_bad = int(np.count_nonzero(~np.isfinite(logits)))
            raise ComputeError(f"non-finite logits: {n_bad} of {n} (bad weights, or an overflow in the graph)")
        return logits

    def _draw(self, logits: NDArray[np.float32], *, is_free: bool) -> int:
        if self._is_argmax and is_free:
            return int(logits.argmax())
        candidates, ids, data = _scratch.get(len(logits))
        top = self._top(logits) if self._can_reduce and is_free else None
        n = len(logits) if top is None else len(top)
        candidates["id"][:n] = ids if top is None else top
        candidates["logit"][:n] = logits if top is None else logits[top]
        # in this order, `sorted` only spares the work that leads to the same order again
        array = ffi.new(
            "llama_token_data_array *", {"data": data, "size": n, "selected": -1, "sorted": top is not None}
        )
        if self._grammar is not None and not is_free:
            self._llama.llama_sampler_apply(self._grammar, array)
            if candidates["logit"].max() == -np.inf:
                raise InputError("the grammar allows no token of this vocabulary here")
        if self._chain is not None:
            self._llama.llama_sampler_apply(self._chain, array)
        # nothing in a greedy chain reorders or drops candidates
        index = int(candidates["logit"].argmax()) if self.config.is_greedy else array.selected
        if not 0 <= index < array.size:
            raise NativeError("libllama's samplers chose no token")
        chosen = array.data[index]
        if not math.isfinite(chosen.logit):
            raise InputError("logit bias, penalties and grammar leave no token to choose")
        return int(chosen.id)

    def _top(self, logits: NDArray[np.float32]) -> NDArray[np.int64] | None:
        """The `top_k` likeliest tokens, likeliest first, or None when equal logits leave their order open.

        What libllama's top-k gives, without filling an array of all tokens: the k-th largest of the blocks' maxima is
        a bound that at least k logits reach, and few others.
        """
        k = min(self.config.top_k, len(logits))
        n_blocks = len(logits) // _BLOCK
        if n_blocks <= k:
            return None
        maxima = logits[: n_blocks * _BLOCK].reshape(n_blocks, _BLOCK).max(axis=1)
        bound = np.partition(maxima, n_blocks - k)[n_blocks - k]
        found = np.flatnonzero(logits >= bound)
        found = found[np.argsort(-logits[found], kind="stable")]
        values = logits[found[: k + 1]]
        return found[:k] if bool((values[:-1] > values[1:]).all()) else None

    def _allows(self, token: int) -> bool:
        one = ffi.new("llama_token_data *", (token, 1.0, 0.0))
        array = ffi.new("llama_token_data_array *", {"data": one, "size": 1, "selected": -1, "sorted": False})
        self._llama.llama_sampler_apply(self._grammar, array)
        return bool(one.logit != -math.inf)

    # ---- making ----

    def _check_open(self) -> None:
        if self._is_closed:
            raise ClosedError("the sampler was closed")

    def _cloned(self, part: Any) -> Any:
        return None if part is None else self._owned(self._llama.llama_sampler_clone(part))

    def _owned(self, part: Any) -> Any:
        if part == ffi.NULL:
            raise NativeError("libllama made no sampler")
        return ffi.gc(part, self._llama.llama_sampler_free)

    def _make_grammar(self) -> Any:
        text = self.config.grammar
        if self.config.json_schema is not None:
            text = schema_to_grammar(self.config.json_schema)
        if text is None:
            return None
        checked = check_grammar(text)
        if checked.token_ids:
            self.vocabulary.check_tokens(checked.token_ids)
        for token in checked.token_texts:
            if len(self.vocabulary.encode(token, add_special=False, parse_special=True)) != 1:
                raise InputError(f"the grammar names {token!r}, which is not one token of this vocabulary")
        made = self._llama.llama_sampler_init_grammar(self.vocabulary.native, text.encode(), b"root")
        if made == ffi.NULL:
            raise InputError(
                "libllama refuses the grammar: its repetitions are too many, or a rule may begin with itself"
            )
        return self._owned(made)

    def _make_chain(self, biases: dict[int, float]) -> Any:
        llama, config, n_tokens = self._llama, self.config, self.vocabulary.n_tokens
        chain = self._owned(llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params()))
        parts = []
        if biases:
            table = ffi.new("llama_logit_bias[]", [*biases.items()])
            parts.append(llama.llama_sampler_init_logit_bias(n_tokens, len(biases), table))
        if config.mirostat and not config.is_greedy:
            parts.append(llama.llama_sampler_init_temp(config.temperature))
            tau, eta = config.mirostat_tau, config.mirostat_eta
            if config.mirostat == 1:
                parts.append(llama.llama_sampler_init_mirostat(n_tokens, self.seed, tau, eta, _MIROSTAT_M))
            else:
                parts.append(llama.llama_sampler_init_mirostat_v2(self.seed, tau, eta))
        else:
            parts += self._make_penalties()
            if not config.is_greedy:
                parts += self._make_draws()
        for part in parts:
            llama.llama_sampler_chain_add(chain, part)
        return chain

    def _make_penalties(self) -> list[Any]:
        llama, config, parts = self._llama, self.config, []
        if config.has_penalties:
            amounts = config.repeat_penalty, config.frequency_penalty, config.presence_penalty
            parts.append(llama.llama_sampler_init_penalties(self.vocabulary.n_tokens, config.repeat_last_n, *amounts))
        if config.has_dry:
            texts = [ffi.new("char[]", text.encode()) for text in config.dry_sequence_breakers]
            parts.append(
                llama.llama_sampler_init_dry(
                    *(self.vocabulary.native, config.dry_multiplier, config.dry_base, config.dry_allowed_length),
                    *(config.dry_penalty_last_n, ffi.new("const char *[]", texts), len(texts)),
                )
            )
        return parts

    def _make_draws(self) -> list[Any]:
        llama, config = self._llama, self.config
        return [
            llama.llama_sampler_init_top_n_sigma(config.top_n_sigma),
            llama.llama_sampler_init_top_k(config.top_k),
            llama.llama_sampler_init_typical(config.typical_p, 1),
            llama.llama_sampler_init_top_p(config.top_p, 1),
            llama.llama_sampler_init_min_p(config.min_p, 1),
            llama.llama_sampler_init_xtc(config.xtc_probability, config.xtc_threshold, 1, self.seed),
            llama.llama_sampler_init_temp_ext(config.temperature, config.dynatemp_range, config.dynatemp_exponent),
            llama.llama_sampler_init_dist(self.seed),
        ]
