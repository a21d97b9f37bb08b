"""The sampler draws what llama.cpp's chain, built here by hand through ctypes, draws."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from real_models import smollm2

from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.library import restore_log
from ggml_engine.ggml.sampler import Sampler, SamplerConfig
from ggml_engine.ggml.vocab import Vocabulary

SEED = 1234


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    with GGUFFile.open(smollm2()) as file:
        return Vocabulary.load(file)


class Chain:
    """llama-cpp-python's functions, in the order of common_sampler_init (common/sampling.cpp)."""

    def __init__(self, vocabulary: Vocabulary, config: SamplerConfig) -> None:
        import llama_cpp as api

        restore_log()
        self.api: Any = api
        params = api.llama_model_default_params()
        params.vocab_only = True
        self.model = api.llama_model_load_from_file(str(smollm2()).encode(), params)
        self.vocab = vocab = api.llama_model_get_vocab(self.model)
        self.n = n = vocabulary.n_tokens
        self.chain = api.llama_sampler_chain_init(api.llama_sampler_chain_default_params())
        add: Callable[[Any], Any] = lambda part: api.llama_sampler_chain_add(self.chain, part)  # noqa: E731
        c = config
        if c.logit_bias:
            table = (api.llama_logit_bias * len(c.logit_bias))(*((t, b) for t, b in c.logit_bias.items()))
            add(api.llama_sampler_init_logit_bias(n, len(c.logit_bias), table))
        if c.mirostat:
            add(api.llama_sampler_init_temp(c.temperature))
            if c.mirostat == 1:
                add(api.llama_sampler_init_mirostat(n, SEED, c.mirostat_tau, c.mirostat_eta, 100))
            else:
                add(api.llama_sampler_init_mirostat_v2(SEED, c.mirostat_tau, c.mirostat_eta))
        else:
            pointer = api.llama_cpp.llama_sampler_p_ctypes
            native = api.llama_cpp._lib.llama_sampler_init_penalties
            native.restype, native.argtypes = pointer, [ctypes.c_int32] * 2 + [ctypes.c_float] * 3
            amounts = c.repeat_penalty, c.frequency_penalty, c.presence_penalty
            add(native(n, c.repeat_last_n, *amounts))
            texts = (ctypes.c_char_p * len(c.dry_sequence_breakers))(*(b.encode() for b in c.dry_sequence_breakers))
            native = api.llama_cpp._lib.llama_sampler_init_dry
            native.restype = pointer
            native.argtypes = [ctypes.c_void_p, ctypes.c_float, ctypes.c_float, ctypes.c_int32, ctypes.c_int32]
            native.argtypes += [ctypes.POINTER(ctypes.c_char_p), ctypes.c_size_t]
            dry = c.dry_multiplier, c.dry_base, c.dry_allowed_length, c.dry_penalty_last_n
            add(native(vocab, *dry, texts, len(texts)))
            add(api.llama_sampler_init_top_n_sigma(c.top_n_sigma))
            add(api.llama_sampler_init_top_k(c.top_k))
            add(api.llama_sampler_init_typical(c.typical_p, 0))
            add(api.llama_sampler_init_top_p(c.top_p, 0))
            add(api.llama_sampler_init_min_p(c.min_p, 0))
            add(api.llama_sampler_init_xtc(c.xtc_probability, c.xtc_threshold, 0, SEED))
            add(api.llama_sampler_init_temp_ext(c.temperature, c.dynatemp_range, c.dynatemp_exponent))
            add(api.llama_sampler_init_dist(SEED))

    def sample(self, logits: NDArray[np.float32]) -> int:
        data = (self.api.llama_token_data * self.n)()
        view = np.frombuffer(data, [("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])
        view["id"], view["logit"] = np.arange(self.n), logits
        array = self.api.llama_token_data_array(data, self.n, -1, False)
        self.api.llama_sampler_apply(self.chain, ctypes.byref(array))
        token = int(array.data[array.selected].id)
        self.api.llama_sampler_accept(self.chain, token)
        return token


def rows(n: int, vocabulary: Vocabulary, seed: int) -> list[NDArray[np.float32]]:
    rng = np.random.default_rng(seed)
    shape = rng.standard_normal(vocabulary.n_rows) * 3  # the same tokens stay likely, so that penalties matter
    return [(shape + rng.standard_normal(vocabulary.n_rows)).astype(np.float32) for _ in range(n)]


CONFIGS = {
    "defaults": {},
    "hot": {"temperature": 2.0},
    "top-k 1": {"top_k": 1},
    "top-k 300": {"top_k": 300, "temperature": 1.5, "min_p": 0.0},
    "no top-k": {"top_k": 0, "top_p": 0.9},
    "top-p": {"top_p": 0.5},
    "top-p 0": {"top_p": 0.0},
    "min-p": {"min_p": 0.3, "top_p": 1.0},
    "typical": {"typical_p": 0.7},
    "repetition": {"repeat_penalty": 1.3, "repeat_last_n": 8},
    "presence and frequency": {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    "dry": {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    "xtc": {"xtc_probability": 0.6, "xtc_threshold": 0.05},
    "sigma": {"top_n_sigma": 1.5},
    "dynamic temperature": {"dynatemp_range": 0.5, "dynatemp_exponent": 1.2},
    "bias": {"logit_bias": {100: 5.0, 101: -math.inf}},
    "mirostat 1": {"mirostat": 1},
    "mirostat 2": {"mirostat": 2, "mirostat_tau": 3.0},
    "all": {"repeat_penalty": 1.1, "dry_multiplier": 0.8, "top_n_sigma": 2.0, "xtc_probability": 0.3, "typical_p": 0.9},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_same_seed_gives_llama_cpps_tokens(vocabulary: Vocabulary, name: str) -> None:
    config = SamplerConfig(seed=SEED, **CONFIGS[name])  # type: ignore[arg-type]
    chain = Chain(vocabulary, config)
    sampler = Sampler(vocabulary, config)
    ours, theirs = [], []
    for logits in rows(60, vocabulary, 7):
        theirs.append(chain.sample(logits))
        ours.append(sampler.sample(logits))
        sampler.accept(ours[-1])
    assert ours == theirs
    if name != "top-k 1":
        assert len(set(ours)) > 3


def test_equal_logits_at_the_edge_of_top_k_are_drawn_as_llama_cpp_does(vocabulary: Vocabulary) -> None:
    config = SamplerConfig(seed=SEED, temperature=3.0, min_p=0.0, top_p=1.0)
    chain, sampler = Chain(vocabulary, config), Sampler(vocabulary, config)
    rng = np.random.default_rng(3)
    for _ in range(40):
        logits = np.round(rng.standard_normal(vocabulary.n_rows) * 2).astype(np.float32)
        assert sampler.sample(logits) == chain.sample(logits)


def test_greedy_equals_the_argmax_of_a_chain_at_temperature_0(vocabulary: Vocabulary) -> None:
    config = SamplerConfig(temperature=0.0, seed=SEED, repeat_penalty=1.5)
    chain, sampler = Chain(vocabulary, config), Sampler(vocabulary, config)
    for logits in rows(30, vocabulary, 9):
        token = sampler.sample(logits)
        sampler.accept(token)
        assert token == chain.sample(logits)
        assert Sampler(vocabulary, SamplerConfig.greedy()).sample(logits) == logits.argmax()


def test_a_json_schema_gives_json(vocabulary: Vocabulary) -> None:
    import json

    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "n": {"type": "integer"}},
        "required": ["name", "n"],
    }
    for seed in range(3):
        sampler = Sampler(vocabulary, SamplerConfig(seed=seed, json_schema=schema))
        tokens: list[int] = []
        for logits in rows(200, vocabulary, seed):
            token = sampler.sample(logits)
            sampler.accept(token)
            if vocabulary.is_end(token):
                break
            tokens.append(token)
        parsed = json.loads(vocabulary.decode(tokens))
        assert set(parsed) == {"name", "n"}
        assert isinstance(parsed["n"], int)
