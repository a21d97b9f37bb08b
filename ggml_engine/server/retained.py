"""`with_retained`: a rendered prompt in the tokens whose K/V is there, where these spell the same text.

A chat template renders an answer from its text, and the tokenizer may cut that text otherwise than the model did when
it wrote it: from there on all K/V of the conversation would be lost. Two rows of tokens spell the same where their
pieces do, byte for byte, and their special tokens are the same at the same places: what spells one is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

import numpy as np

from ggml_engine.control.prefix_match import n_shared

_FIRST_SPECIAL: Final = 256  # below are bytes


class Spelling:
    """What each token of a vocabulary adds to a text, as characters: a byte is one, and so is a special token."""

    def __init__(self, vocabulary: Any) -> None:
        self._piece = vocabulary.piece
        self._known = {token: chr(_FIRST_SPECIAL + token) for token in vocabulary.special_tokens.values()}

    def __call__(self, token: int) -> str:
        found = self._known.get(token)
        if found is None:
            piece: bytes = self._piece(token)
            found = self._known[token] = piece.decode("latin-1") or chr(_FIRST_SPECIAL + token)
        return found


def with_retained(tokens: list[int], retained: Iterable[Sequence[int]], spelling: Spelling) -> list[int]:
    """`tokens`, or what spells the same and begins as one of `retained`, where that has more of the text in common.

    Of several the first is taken that goes furthest.
    """
    wanted = np.asarray(tokens, np.int32)
    best, n_covered = tokens, 0
    for held in retained:
        n_same = n_shared(wanted, np.asarray(held, np.int32))
        n_held, n_tokens = _n_spelled_alike(tokens, held, n_same, spelling)
        if n_tokens > n_covered:
            n_covered = n_tokens
            best = tokens if n_tokens == n_same else [*map(int, held[:n_held]), *tokens[n_tokens:]]
    return best


def _n_spelled_alike(tokens: Sequence[int], held: Sequence[int], n_same: int, spelling: Spelling) -> tuple[int, int]:
    """How many of `held` and of `tokens` spell the same, both cut between tokens; the first `n_same` are the same."""
    n_held = n_tokens = n_same
    found = (n_held, n_tokens)
    ahead, is_held = "", True  # what one of them spells beyond the other, and which one
    while True:
        takes_held = not ahead or not is_held
        if n_held == len(held) if takes_held else n_tokens == len(tokens):
            return found
        if takes_held:
            piece = spelling(int(held[n_held]))
            n_held += 1
        else:
            piece = spelling(tokens[n_tokens])
            n_tokens += 1
        n = min(len(piece), len(ahead))
        if piece[:n] != ahead[:n]:
            return found
        if len(piece) > n:
            ahead, is_held = piece[n:], takes_held
        else:
            ahead = ahead[n:]
        if not ahead:
            found = (n_held, n_tokens)
