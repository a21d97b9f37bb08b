"""Choosing tokens, on a small vocabulary."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vocab_files import in_child, spm, write

from ggml_engine.errors import ClosedError, ComputeError, InputError
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.sampler import Sampler, SamplerConfig
from ggml_engine.ggml.vocab import Vocabulary

N = len(spm()["tokens"])
H, E, L, O = 260, 261, 262, 263  # noqa: E741
EOS = 2


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    with GGUFFile.open(write(tmp_path_factory.mktemp("v") / "v.gguf", spm(), n_rows=N + 22)) as file:
        return Vocabulary.load(file)


def logits(*best: int, n: int = N + 22) -> NDArray[np.float32]:
    values = np.zeros(n, np.float32)
    for rank, token in enumerate(best):
        values[token] = 100 - rank
    return values


def run(sampler: Sampler, n: int, seed: int = 0) -> list[int]:
    rng = np.random.default_rng(seed)
    tokens = []
    for _ in range(n):
        tokens.append(sampler.sample((rng.standard_normal(N + 22) * 3).astype(np.float32)))
        sampler.accept(tokens[-1])
    return tokens


def test_greedy_takes_the_largest_logit(vocabulary: Vocabulary) -> None:
    with Sampler(vocabulary, SamplerConfig.greedy()) as sampler:
        assert sampler.sample(logits(H, E)) == H


def test_padding_rows_are_never_chosen(vocabulary: Vocabulary) -> None:
    for config in (SamplerConfig.greedy(), SamplerConfig(seed=1), SamplerConfig(mirostat=2), SamplerConfig(top_k=0)):
        with Sampler(vocabulary, config) as sampler:
            assert sampler.sample(logits(N, N + 21, H)) == H


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("config", [SamplerConfig.greedy(), SamplerConfig(), SamplerConfig(mirostat=1)])
def test_logits_that_are_not_finite_are_an_error(vocabulary: Vocabulary, config: SamplerConfig, bad: float) -> None:
    values = logits(H)
    values[7] = bad
    with Sampler(vocabulary, config) as sampler:
        with pytest.raises(ComputeError, match=f"non-finite logits: 1 of {N}"):
            sampler.sample(values)
        values[7] = 0
        values[N] = bad  # padding may hold anything
        assert sampler.sample(values) == H


@pytest.mark.parametrize("bad", [np.zeros(N - 1, np.float32), np.zeros(N), np.zeros((1, N), np.float32), [0.0] * N])
def test_logits_of_a_wrong_shape_are_refused(vocabulary: Vocabulary, bad: Any) -> None:
    with Sampler(vocabulary, SamplerConfig()) as sampler, pytest.raises(InputError, match="logits must be"):
        sampler.sample(bad)


def test_a_seed_gives_the_same_tokens_again_and_none_is_reported(vocabulary: Vocabulary) -> None:
    first = Sampler(vocabulary, SamplerConfig(temperature=1.5))
    tokens = run(first, 20)
    again = Sampler(vocabulary, SamplerConfig(temperature=1.5, seed=first.seed))
    assert run(again, 20) == tokens
    assert run(Sampler(vocabulary, SamplerConfig(temperature=1.5, seed=first.seed ^ 1)), 20) != tokens
    again.reset()
    assert run(again, 20) == tokens


CONFIGS = [
    SamplerConfig(seed=5),
    SamplerConfig(seed=5, repeat_penalty=1.3, frequency_penalty=0.5, dry_multiplier=0.8),
    SamplerConfig(seed=5, mirostat=1),
    SamplerConfig(seed=5, mirostat=2),
    SamplerConfig(seed=5, grammar="root ::= [helo ]+"),
    SamplerConfig(temperature=0.0, repeat_penalty=1.5),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_a_clone_goes_on_like_its_source_and_apart_from_it(vocabulary: Vocabulary, config: SamplerConfig) -> None:
    source = Sampler(vocabulary, config)
    run(source, 5)
    clone = source.clone()
    expected = run(source, 10, seed=1)
    source.close()
    assert run(clone, 10, seed=1) == expected


def test_penalties_see_the_prompt_and_the_accepted_tokens(vocabulary: Vocabulary) -> None:
    config = SamplerConfig(temperature=0.0, repeat_penalty=2.0, repeat_last_n=3)
    sampler = Sampler(vocabulary, config)
    assert sampler.sample(logits(H, E, L)) == H
    sampler.accept_prompt([H] * 50 + [O, O, H])
    assert sampler.sample(logits(H, E, L)) == E
    sampler.accept(E)
    assert sampler.sample(logits(H, E, L)) == L
    sampler.accept_prompt([O] * 3)
    assert sampler.sample(logits(H, E, L)) == H


def test_logit_bias_adds_and_forbids(vocabulary: Vocabulary) -> None:
    for temperature in (0.0, 1.0):
        config = SamplerConfig(temperature=temperature, logit_bias={H: -math.inf, O: 500.0}, seed=1)
        assert Sampler(vocabulary, config).sample(logits(H, E)) == O
    with pytest.raises(InputError, match=f"token id {N}"):
        Sampler(vocabulary, SamplerConfig(logit_bias={N: 1.0}))


def test_forbidding_everything_is_an_error(vocabulary: Vocabulary) -> None:
    for temperature in (0.0, 1.0):
        config = SamplerConfig(temperature=temperature, logit_bias=dict.fromkeys(range(N), -math.inf))
        with pytest.raises(InputError, match="no token"):
            Sampler(vocabulary, config).sample(logits(H))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_is_followed_to_its_end_and_then_allows_only_the_end(
    vocabulary: Vocabulary, temperature: float
) -> None:
    sampler = Sampler(vocabulary, SamplerConfig(temperature=temperature, grammar='root ::= "he" "l"+', seed=1))
    chosen = []
    for best in ((O, EOS, H), (L, EOS, E), (EOS, L), (L, EOS), (EOS, L)):
        chosen.append(sampler.sample(logits(*best)))
        sampler.accept(chosen[-1])
    assert vocabulary.decode(chosen) == "hell"
    assert chosen[-1] == EOS
    sampler.reset()
    assert sampler.sample(logits(L, EOS, H)) == H


def test_accepting_what_the_grammar_forbids_is_an_error_and_changes_nothing(vocabulary: Vocabulary) -> None:
    sampler = Sampler(vocabulary, SamplerConfig(temperature=0.0, grammar='root ::= "he"'))
    for token in (L, EOS, 1, N - 2):
        with pytest.raises(InputError, match=f"token {token} .* grammar"):
            sampler.accept(token)
    assert sampler.sample(logits(L, H)) == H


def test_a_grammar_that_the_vocabulary_cannot_follow_is_an_error(vocabulary: Vocabulary) -> None:
    sampler = Sampler(vocabulary, SamplerConfig(grammar="root ::= [z-a]"))
    with pytest.raises(InputError, match="allows no token"):
        sampler.sample(logits(H))
    for grammar in ("root ::= <[9999]>", "root ::= <nope>", 'root ::= ("a" | )* "b"'):
        with pytest.raises(InputError):
            Sampler(vocabulary, SamplerConfig(grammar=grammar))


def test_a_grammar_may_name_special_tokens(vocabulary: Vocabulary) -> None:
    sampler = Sampler(vocabulary, SamplerConfig(temperature=0.0, grammar='root ::= <|user|> "he"'))
    assert sampler.sample(logits(H, N - 2)) == N - 2
    sampler.accept(N - 2)
    assert sampler.sample(logits(N - 2, H)) == H


def test_a_closed_sampler_says_so(vocabulary: Vocabulary) -> None:
    sampler = Sampler(vocabulary, SamplerConfig(grammar="root ::= ."))
    sampler.close()
    sampler.close()
    for call in (lambda: sampler.sample(logits(H)), lambda: sampler.accept(H), sampler.reset, sampler.clone):
        with pytest.raises(ClosedError):
            call()


def test_bad_ids_are_refused(vocabulary: Vocabulary) -> None:
    sampler = Sampler(vocabulary, SamplerConfig())
    for bad in (-1, N, True, 2**63):
        with pytest.raises(InputError, match="token id"):
            sampler.accept(bad)
        with pytest.raises(InputError, match="token id"):
            sampler.accept_prompt([bad])


EXTREMES = """
import itertools, sys
import numpy as np
from ggml_engine.errors import EngineError
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.sampler import Sampler, SamplerConfig
from ggml_engine.ggml.sampler_config import _NUMBERS, _INTEGERS
from ggml_engine.ggml.vocab import Vocabulary
vocabulary = Vocabulary.load(GGUFFile.open(sys.argv[1]))
rng = np.random.default_rng(0)
rows = [rng.standard_normal(vocabulary.n_rows).astype("f4") * scale for scale in (0, 1, 1e30)]
for mirostat, temperature in itertools.product((0, 1, 2), (1e-29, 1e-6, 0.8, 100.0)):
    for name, bounds in {**_NUMBERS, **_INTEGERS}.items():
        for value in bounds:
            options = {"mirostat": mirostat, "temperature": temperature, "seed": 1, name: value}
            if "repeat" in name: options.setdefault("repeat_penalty", 1.1)
            if "dry" in name: options.setdefault("dry_multiplier", 0.8)
            if "xtc" in name: options.setdefault("xtc_probability", 1.0)
            if "dynatemp" in name: options.setdefault("dynatemp_range", 0.5)
            sampler = Sampler(vocabulary, SamplerConfig(**options))
            for row in rows:
                try:
                    sampler.accept(sampler.sample(row))
                except EngineError as error:
                    pass
print("alive")
"""


def test_no_extreme_of_any_option_kills_the_process(vocabulary: Vocabulary, tmp_path: Path) -> None:
    child = in_child(EXTREMES, write(tmp_path / "v.gguf", spm()), timeout_s=120)
    assert (child.returncode, child.stdout) == (0, "alive\n"), child.stderr[-500:]
