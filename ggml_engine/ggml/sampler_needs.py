"""Which sampler needs whole rows of logits, and which only candidates: decided here, for every configuration.

Candidates do where they lead to the same token as the whole row, by the same random numbers. The chain looks at the
`top_k` best once everything before them has changed logits. What can only lower logits, and of how many tokens at
most, is known: with so many candidates more, none that is left out can come to be among the best.
"""

from __future__ import annotations

from collections.abc import Mapping

from ggml_engine.ggml.candidates import MAX_CANDIDATES, WHOLE_ROW, RowNeed
from ggml_engine.ggml.sampler_config import SamplerConfig


def need_of(config: SamplerConfig, biases: Mapping[int, float], n_tokens: int) -> RowNeed:
    """What a sampler of `config` over `n_tokens` tokens needs; `biases` are all that are added to logits, by token.

    A draw that the grammar refuses needs the whole row, and so does one where equal logits leave the order open.
    """
    n_lowered = _n_lowered(config, biases)
    n_chosen = 1 if config.is_greedy else config.top_k
    if n_lowered is None or not n_chosen or (not config.is_greedy and _looks_at_all(config)):
        return WHOLE_ROW
    # libllama sorts: one candidate more shows whether the last one that counts is equal to what is left out
    n_best = n_chosen + n_lowered + (0 if config.is_greedy else 1)
    if n_best > MAX_CANDIDATES or n_best >= n_tokens:
        return WHOLE_ROW
    return RowNeed(n_best, n_tokens)


def _looks_at_all(config: SamplerConfig) -> bool:
    """Whether something looks at all logits before the best are chosen: a deviation, or a distribution."""
    return config.top_n_sigma > 0 or config.mirostat > 0


def _n_lowered(config: SamplerConfig, biases: Mapping[int, float]) -> int | None:
    """Of how many tokens at most logits are lowered; None where some may be raised."""
    raises = any(bias > 0 for bias in biases.values())
    n_of_history = 0  # distinct tokens in the longest history that is looked at
    if config.has_penalties:
        raises |= config.repeat_penalty < 1 or config.presence_penalty < 0 or config.frequency_penalty < 0
        n_of_history = config.repeat_last_n
    if config.has_dry:
        n_of_history = max(n_of_history, config.dry_penalty_last_n)
    return None if raises else len(biases) + n_of_history
