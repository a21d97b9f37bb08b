"""Probabilities beside tokens, of the model's own distribution."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ggml_engine.ggml.candidates import MAX_CANDIDATES, WHOLE_ROW, Candidates, RowNeed, best_ids, log_sum_exp


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """A token, the natural logarithm of its probability, and the likeliest tokens there with theirs, best first."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def token_logprobs(logits: npt.NDArray[np.float32], token: int, n_top: int) -> TokenLogprobs:
    """Of `token` by a row of logits f32 [n_vocab]; equally likely tokens come in the order of their ids."""
    log_sum = log_sum_exp(logits)
    top = best_ids(logits, n_top) if n_top else np.empty(0, np.int32)
    return TokenLogprobs(token, float(logits[token]) - log_sum, _top(top, logits[top], log_sum))


def need_with_logprobs(need: RowNeed, n_top: int, n_vocab: int) -> RowNeed:
    """What a sampler's `need` comes to where the `n_top` likeliest of all `n_vocab` tokens are asked for, too."""
    n_best = max(need.n_best, n_top)
    if not need.n_best or need.n_tokens != n_vocab or n_best > min(MAX_CANDIDATES, n_vocab):
        return WHOLE_ROW
    return RowNeed(n_best, n_vocab, log_sum=True)


def candidate_logprobs(best: Candidates, token: int, n_top: int) -> TokenLogprobs | None:
    """As `token_logprobs`, by candidates of the whole vocabulary; None where the token is not among them."""
    found = np.flatnonzero(best.ids == token)
    if best.log_sum is None or not found.size:
        return None
    return TokenLogprobs(
        token, float(best.logits[found[0]]) - best.log_sum, _top(best.ids[:n_top], best.logits[:n_top], best.log_sum)
    )


def _top(ids: npt.NDArray[np.int32], logits: npt.NDArray[np.float32], log_sum: float) -> tuple[tuple[int, float], ...]:
    return tuple((token, logit - log_sum) for token, logit in zip(ids.tolist(), logits.tolist(), strict=True))
