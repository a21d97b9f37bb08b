"""Probabilities beside tokens, of the model's own distribution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token, the natural logarithm of its probability, and the likeliest tokens there with theirs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: npt.NDArray[np.float32], token: int, n_top: int) -> TokenLogprobs:
    """Of `token` by a row of logits f32 [n_vocab]; equally likely tokens come in the order of their ids."""
    row = logits.astype(np.float64)
    peak = float(row.max())
    log_sum = peak + float(np.log(np.exp(row - peak).sum()))
    top: tuple[tuple[int, float], ...] = ()
    if n_top:
        n_top = min(n_top, row.size)
        least = np.partition(row, row.size - n_top)[row.size - n_top]
        candidates = np.flatnonzero(row >= least)
        best = candidates[np.argsort(-row[candidates], kind="stable")][:n_top]
        top = tuple((int(i), float(row[i]) - log_sum) for i in best)
    return TokenLogprobs(token, float(row[token]) - log_sum, top)
