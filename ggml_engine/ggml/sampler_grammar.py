"""The grammar of a `Sampler`: which tokens it lets through, from the first one on or from a trigger on.

Both kinds answer the same questions, so that a sampler need not know which it has. Owns libllama's grammars and their
memory. One thread at a time.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ggml_engine.errors import InputError, NativeError
from ggml_engine.ggml.lazy_grammar import Found, LazyGrammar, Watch
from ggml_engine.ggml.library import ffi, load

if TYPE_CHECKING:
    from ggml_engine.ggml.gbnf import Checked
    from ggml_engine.ggml.sampler_config import SamplerConfig
    from ggml_engine.ggml.vocab import Vocabulary


class SamplerGrammar(Protocol):
    """What a sampler asks of its grammar. `accept` takes only what `allows` lets through."""

    def allows(self, token: int) -> bool:
        """Whether the token may come next."""

    def accept(self, token: int) -> None:
        """Go on behind the token."""

    def forbid(self, candidates: NDArray[Any], array: Any) -> None:
        """Minus infinity for candidates that may not come next: all of them, or those that were refused here."""

    def reset(self) -> None:
        """Back to the beginning."""

    def clone(self) -> SamplerGrammar:
        """An independent one at the same place."""

    def close(self) -> None:
        """Give native memory back."""


def make_grammar(vocabulary: Vocabulary, config: SamplerConfig) -> SamplerGrammar | None:
    """The grammar that the options ask for. InputError for one that the vocabulary cannot follow."""
    text = config.grammar
    if config.json_schema is not None:
        from ggml_engine.ggml.json_schema import schema_to_grammar  # noqa: PLC0415  # few texts follow a schema

        text = schema_to_grammar(config.json_schema)
    if text is None:
        return None
    if isinstance(text, LazyGrammar):
        _check_names(vocabulary, _checked(text.all_rules))
        return _AwaitedGrammar(vocabulary, text)
    _check_names(vocabulary, _checked(text))
    return _HeldGrammar(vocabulary, _compiled(vocabulary, text))


@lru_cache(maxsize=16)
def _checked(text: str) -> Checked:
    from ggml_engine.ggml.gbnf import check_grammar  # noqa: PLC0415  # few texts follow a grammar

    return check_grammar(text)


def _check_names(vocabulary: Vocabulary, checked: Checked) -> None:
    if checked.token_ids:
        vocabulary.check_tokens(checked.token_ids)
    for token in checked.token_texts:
        if len(vocabulary.encode(token, add_special=False, parse_special=True)) != 1:
            raise InputError(f"the grammar names {token!r}, which is not one token of this vocabulary")


def _compiled(vocabulary: Vocabulary, text: str) -> Any:
    made = load().llama.llama_sampler_init_grammar(vocabulary.native, text.encode(), b"root")
    if made == ffi.NULL:
        raise InputError("libllama refuses the grammar: its repetitions are too many, or a rule may begin with itself")
    return _owned(made)


def _owned(part: Any) -> Any:
    if part == ffi.NULL:
        raise NativeError("libllama made no sampler")
    return ffi.gc(part, load().llama.llama_sampler_free)


class _HeldGrammar:
    """A grammar that the text follows from its first token on."""

    def __init__(self, vocabulary: Vocabulary, native: Any) -> None:
        self._vocabulary: Final = vocabulary  # its native memory is used by the grammar
        self._llama: Final = load().llama
        self._native = native

    def allows(self, token: int) -> bool:
        one = ffi.new("llama_token_data *", (token, 1.0, 0.0))
        array = ffi.new("llama_token_data_array *", {"data": one, "size": 1, "selected": -1, "sorted": False})
        self._llama.llama_sampler_apply(self._native, array)
        return bool(one.logit != -math.inf)

    def accept(self, token: int) -> None:
        self._llama.llama_sampler_accept(self._native, token)

    def forbid(self, candidates: NDArray[Any], array: Any) -> None:  # noqa: ARG002 - `array` is the same for libllama
        self._llama.llama_sampler_apply(self._native, array)

    def reset(self) -> None:
        self._llama.llama_sampler_reset(self._native)

    def clone(self) -> _HeldGrammar:
        return _HeldGrammar(self._vocabulary, _owned(self._llama.llama_sampler_clone(self._native)))

    def close(self) -> None:
        ffi.release(self._native)


class _AwaitedGrammar:
    """A grammar that holds from a trigger on. Until then a token costs one look at the bytes that it adds.

    The token that completes the trigger is the first one of the grammar that is made then: what of it belongs to
    the trigger, or comes before, is a text at the beginning of that grammar, and what is left follows the rule.
    """

    def __init__(self, vocabulary: Vocabulary, lazy: LazyGrammar) -> None:
        self._vocabulary: Final = vocabulary
        self._lazy: Final = lazy
        self._watch = Watch.of(lazy)
        self._held: _HeldGrammar | None = None
        self._refused: set[int] = set()  # at this place
        self._next: tuple[int, Watch | _HeldGrammar] | None = None  # what the latest allowed token leads to

    def allows(self, token: int) -> bool:
        if self._held is not None:
            return self._held.allows(token)
        if self._next is not None and self._next[0] == token:  # drawn, and now taken
            return True
        found = self._watch.after(self._piece(token))
        if isinstance(found, Watch):
            self._next = token, found
            return True
        held = self._begun(token, found)
        if held is None:
            self._refused.add(token)
            return False
        self._next = token, held
        return True

    def accept(self, token: int) -> None:
        if self._held is None:
            if self._next is None or self._next[0] != token:
                self.allows(token)
            following = self._next[1] if self._next is not None else self._watch
            self._next = None
            self._refused.clear()
            if isinstance(following, Watch):
                self._watch = following
                return
            self._held = following
        self._held.accept(token)

    def forbid(self, candidates: NDArray[Any], array: Any) -> None:
        if self._held is not None:
            self._held.forbid(candidates, array)
        else:
            candidates["logit"][np.isin(candidates["id"], list(self._refused))] = -math.inf

    def reset(self) -> None:
        self.close()
        self._watch = Watch.of(self._lazy)

    def clone(self) -> _AwaitedGrammar:
        copy = _AwaitedGrammar(self._vocabulary, self._lazy)
        copy._watch = self._watch
        copy._held = None if self._held is None else self._held.clone()
        copy._refused = set(self._refused)
        return copy

    def close(self) -> None:
        self._held = self._next = None
        self._refused.clear()

    def _piece(self, token: int) -> bytes:
        """The bytes that the reader of the reply sees: of control tokens, those of marks alone."""
        piece = self._vocabulary.piece(token)
        if not piece and self._watch.concerns(text := self._vocabulary.text(token)):
            piece = text.encode()
        return piece

    def _begun(self, token: int, found: Found) -> _HeldGrammar | None:
        """The grammar before the token that completes the trigger; None where the token does not fit it."""
        try:
            begin = self._piece(token)[: found.n_before].decode()
        except UnicodeDecodeError:  # it begins in the middle of a character
            return None
        text = self._lazy.text(found.rule, begin)
        held = _HeldGrammar(self._vocabulary, _compiled(self._vocabulary, text))
        return held if held.allows(token) else None
