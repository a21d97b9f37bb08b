"""Chains of libllama's samplers, in llama.cpp's order, for a configuration: what changes logits, and what chooses.

A chain frees itself, and all that is in it, when nothing refers to it any more. A clone goes on with the same history
and the same random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from ggml_engine.errors import NativeError
from ggml_engine.ggml.library import ffi, load
from ggml_engine.ggml.sampler_config import SamplerConfig

if TYPE_CHECKING:
    from ggml_engine.ggml.vocab import Vocabulary

_MIROSTAT_M: Final = 100


def make_shaping(vocabulary: Vocabulary, config: SamplerConfig, biases: Mapping[int, float]) -> Any:
    """What changes logits and has a history; None where nothing does. It uses the vocabulary's native memory."""
    llama = load().llama
    parts = []
    if biases:
        table = ffi.new("llama_logit_bias[]", [*biases.items()])
        parts.append(llama.llama_sampler_init_logit_bias(vocabulary.n_tokens, len(biases), table))
    if config.is_greedy or not config.mirostat:
        parts += _penalties(vocabulary, config)
    return _chained(parts) if parts else None


def make_choosing(vocabulary: Vocabulary, config: SamplerConfig, seed: int) -> Any:
    """What chooses, by random numbers of `seed`; None where that is the largest logit. It has no history."""
    llama = load().llama
    if config.is_greedy:
        return None
    if not config.mirostat:
        return _chained(_draws(config, seed))
    tau, eta = config.mirostat_tau, config.mirostat_eta
    if config.mirostat == 1:
        chooser = llama.llama_sampler_init_mirostat(vocabulary.n_tokens, seed, tau, eta, _MIROSTAT_M)
    else:
        chooser = llama.llama_sampler_init_mirostat_v2(seed, tau, eta)
    return _chained([llama.llama_sampler_init_temp(config.temperature), chooser])


def cloned(chain: Any) -> Any:
    """An independent chain in the same state; None for None."""
    return None if chain is None else _owned(load().llama.llama_sampler_clone(chain))


def _owned(chain: Any) -> Any:
    if chain == ffi.NULL:
        raise NativeError("libllama made no sampler")
    return ffi.gc(chain, load().llama.llama_sampler_free)


def _chained(parts: Sequence[Any]) -> Any:
    llama = load().llama
    chain = _owned(llama.llama_sampler_chain_init(llama.llama_sampler_chain_default_params()))
    for part in parts:
        llama.llama_sampler_chain_add(chain, part)
    return chain


def _penalties(vocabulary: Vocabulary, config: SamplerConfig) -> list[Any]:
    llama, parts = load().llama, []
    if config.has_penalties:
        amounts = config.repeat_penalty, config.frequency_penalty, config.presence_penalty
        parts.append(llama.llama_sampler_init_penalties(vocabulary.n_tokens, config.repeat_last_n, *amounts))
    if config.has_dry:
        texts = [ffi.new("char[]", text.encode()) for text in config.dry_sequence_breakers]
        parts.append(
            llama.llama_sampler_init_dry(
                *(vocabulary.native, config.dry_multiplier, config.dry_base, config.dry_allowed_length),
                *(config.dry_penalty_last_n, ffi.new("const char *[]", texts), len(texts)),
            )
        )
    return parts


def _draws(config: SamplerConfig, seed: int) -> list[Any]:
    llama = load().llama
    return [
        llama.llama_sampler_init_top_n_sigma(config.top_n_sigma),
        llama.llama_sampler_init_top_k(config.top_k),
        llama.llama_sampler_init_typical(config.typical_p, 1),
        llama.llama_sampler_init_top_p(config.top_p, 1),
        llama.llama_sampler_init_min_p(config.min_p, 1),
        llama.llama_sampler_init_xtc(config.xtc_probability, config.xtc_threshold, 1, seed),
        llama.llama_sampler_init_temp_ext(config.temperature, config.dynatemp_range, config.dynatemp_exponent),
        llama.llama_sampler_init_dist(seed),
    ]
