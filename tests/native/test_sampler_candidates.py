"""Candidates lead a sampler to the token that whole rows lead it to, by the same random numbers, whatever its options."""

from __future__ import annotations

import itertools
import math
import zlib
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from vocab_files import spm, write

from ggml_engine.errors import ComputeError, InputError
from ggml_engine.ggml.candidates import NOT_FINITE, WHOLE_ROW, Candidates, RowNeed, best_of, log_sum_exp
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.sampler import Sampler, SamplerConfig
from ggml_engine.ggml.vocab import Vocabulary

N = len(spm()["tokens"])
H, E, O = 260, 261, 263  # noqa: E741
Row = NDArray[np.float32]


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Vocabulary:
    with GGUFFile.open(write(tmp_path_factory.mktemp("v") / "v.gguf", spm(), n_rows=N + 22)) as file:
        return Vocabulary.load(file)


def rows_of(n: int, seed: int) -> list[Row]:
    """Rows in which the same tokens stay likely: of distinct logits, of many equal ones, and of equal ones alone."""
    rng = np.random.default_rng(seed)
    lasting = rng.standard_normal(N + 22) * 3
    found = []
    for i in range(n):
        row = lasting + rng.standard_normal(N + 22)
        if i % 3 == 1:
            row = np.round(row * 4) / 4
        if i % 12 == 2:
            row = np.round(row / 3)
        if i % 29 == 3:
            row = np.zeros(N + 22)
        row[N:] = math.nan  # padding may hold anything
        found.append(row.astype(np.float32))
    return found


ALONE: dict[str, dict[str, Any]] = {
    "defaults": {},
    "top-k 1": {"top_k": 1},
    "top-k 7": {"top_k": 7},
    "top-k 130": {"top_k": 130},  # libllama sorts so many in another way
    "no top-k": {"top_k": 0},
    "more than there are": {"top_k": 10_000},
    "hot": {"temperature": 2.5},
    "no truncation": {"top_p": 1.0, "min_p": 0.0},
    "top-p 0": {"top_p": 0.0},
    "min-p": {"min_p": 0.3},
    "typical": {"typical_p": 0.7},
    "repetition": {"repeat_penalty": 1.3},
    "short repetition": {"repeat_penalty": 3.0, "repeat_last_n": 3},
    "rewarded repetition": {"repeat_penalty": 0.8},
    "presence": {"presence_penalty": 0.75},
    "frequency": {"frequency_penalty": 0.5},
    "rewarded presence": {"presence_penalty": -0.75},
    "rewarded frequency": {"frequency_penalty": -0.5},
    "long history": {"repeat_penalty": 1.3, "repeat_last_n": 5000},
    "dry": {"dry_multiplier": 2.0, "dry_allowed_length": 1},
    "xtc": {"xtc_probability": 0.6, "xtc_threshold": 0.05},
    "sigma": {"top_n_sigma": 1.5},
    "dynamic temperature": {"dynatemp_range": 0.5, "dynatemp_exponent": 1.2},
    "forbidden": {"logit_bias": {H: -math.inf, 7: -1.0, 9: -0.25}},
    "raised": {"logit_bias": {H: 3.0, 7: -1.0}},
    "mirostat 1": {"mirostat": 1},
    "mirostat 2": {"mirostat": 2},
    "grammar": {"grammar": "root ::= [helo ]+"},
    "greedy": {"temperature": 0.0},
}
WHOLE = {  # what candidates cannot stand for
    "no top-k",
    "more than there are",
    "rewarded repetition",
    "rewarded presence",
    "rewarded frequency",
    "long history",
    "sigma",
    "raised",
    "mirostat 1",
    "mirostat 2",
}
TOGETHER = list(itertools.combinations(ALONE, 2))
MANY: dict[str, Any] = {
    "repeat_penalty": 1.2,
    "frequency_penalty": 0.25,
    "dry_multiplier": 0.8,
    "dry_allowed_length": 1,
    "logit_bias": {11: -2.0, 12: -math.inf},
    "xtc_probability": 0.3,
    "typical_p": 0.9,
    "dynatemp_range": 0.3,
    "top_k": 20,
}


class Watched:
    """A sampler that is given candidates, and its twin that is given whole rows."""

    def __init__(self, vocabulary: Vocabulary, options: dict[str, Any], seed: int = 11) -> None:
        config = SamplerConfig(seed=seed, **options)
        self.sampler, self.twin = Sampler(vocabulary, config), Sampler(vocabulary, config)
        self.n_whole = 0

    def step(self, row: Row) -> int:
        """The token that both choose; what one of them refuses the other refuses, too."""

        def whole() -> Row:
            self.n_whole += 1
            return row

        need = self.sampler.need
        best = best_of(row, need) if need.n_best else None
        try:
            expected = self.twin.sample_from(None, lambda: row)
        except InputError as error:
            with pytest.raises(InputError, match=str(error)[:20]):
                self.sampler.sample_from(best, whole)
            return -1
        found = self.sampler.sample_from(best, whole)
        assert found == expected
        for each in (self.sampler, self.twin):
            each.accept(found)
        return found

    def close(self) -> None:
        self.sampler.close()
        self.twin.close()


@pytest.mark.parametrize("name", ALONE)
def test_candidates_come_to_the_token_of_the_whole_row(vocabulary: Vocabulary, name: str) -> None:
    watched = Watched(vocabulary, ALONE[name])
    assert (watched.sampler.need == WHOLE_ROW) == (name in WHOLE)
    chosen = {watched.step(row) for row in rows_of(700, 1)}
    if name != "top-k 1":
        assert len(chosen) > 2
    watched.close()


def test_options_go_together(vocabulary: Vocabulary) -> None:
    n_candidates = 0
    for i, (one, other) in enumerate(TOGETHER):
        watched = Watched(vocabulary, ALONE[one] | ALONE[other], seed=i)
        n_candidates += watched.sampler.need.n_best > 0
        for row in rows_of(30, i):
            watched.step(row)
        watched.close()
    assert n_candidates > len(TOGETHER) / 4
    for i, temperature in enumerate((0.0, 0.8, 3.0)):
        watched = Watched(vocabulary, MANY | {"temperature": temperature}, seed=i)
        assert watched.sampler.need.n_best
        for row in rows_of(400, i):
            watched.step(row)
        watched.close()


def test_whole_rows_are_looked_at_where_equal_logits_leave_the_order_open_and_nowhere_else(
    vocabulary: Vocabulary,
) -> None:
    rng = np.random.default_rng(2)
    distinct = [rng.permutation(N).astype(np.float32) / 8 for _ in range(60)]
    for options in ({}, {"repeat_penalty": 1.37}, {"temperature": 0.0, "presence_penalty": 0.3}, {"temperature": 0.0}):
        watched = Watched(vocabulary, options)
        for row in distinct:
            watched.step(row)
        assert watched.n_whole == 0
        watched.close()
    watched = Watched(vocabulary, {})
    for row in distinct:
        watched.step(np.floor(row))
    assert watched.n_whole == 60
    watched.close()


def test_a_token_that_the_grammar_refuses_is_drawn_again_from_the_whole_row(vocabulary: Vocabulary) -> None:
    watched = Watched(vocabulary, {"temperature": 0.0, "grammar": 'root ::= "he"'})
    row = np.zeros(N, np.float32)
    row[O], row[H], row[E] = 3, 2, 1
    assert (watched.step(row), watched.n_whole) == (H, 1)
    row[E] = 4
    assert (watched.step(row), watched.n_whole) == (E, 1)
    watched.close()


def test_candidates_that_are_not_known_to_be_finite_are_not_used(vocabulary: Vocabulary) -> None:
    row = np.random.default_rng(0).standard_normal(N).astype(np.float32)
    for options in ({"temperature": 0.0}, {}):
        watched = Watched(vocabulary, options)
        token = watched.twin.sample_from(None, lambda: row)
        assert watched.sampler.sample_from(NOT_FINITE, lambda: row) == token
        for bad in (math.nan, math.inf, -math.inf):
            spoiled = row.copy()
            spoiled[50] = bad
            assert not best_of(spoiled, watched.sampler.need).is_finite
            with pytest.raises(ComputeError, match=f"non-finite logits: 1 of {N}"):
                watched.sampler.sample(spoiled)
        watched.close()


# Made with the sampler that knew whole rows only: 60 rows, the first tokens and a checksum of all.
RECORDED: dict[str, tuple[list[int], int]] = {
    "defaults": ([185, 185, 58, 17, 185, 220], 2890184263),
    "top-k 1": ([185, 185, 58, 0, 185, 169], 1130530548),
    "top-k 7": ([185, 185, 220, 2, 185, 195], 3326900123),
    "top-k 130": ([185, 185, 58, 25, 185, 220], 233579100),
    "no top-k": ([185, 185, 58, 221, 185, 220], 2346575265),
    "more than there are": ([185, 185, 58, 221, 185, 220], 2346575265),
    "hot": ([185, 185, 58, 17, 58, 182], 3495952751),
    "no truncation": ([185, 185, 58, 37, 220, 120], 1723803418),
    "top-p 0": ([185, 185, 58, 38, 185, 169], 3136947941),
    "min-p": ([185, 185, 58, 17, 185, 58], 2024178654),
    "typical": ([185, 185, 105, 31, 185, 195], 3871788488),
    "repetition": ([185, 220, 58, 17, 182, 210], 237288690),
    "short repetition": ([185, 220, 58, 17, 185, 120], 1846767492),
    "rewarded repetition": ([185, 185, 58, 17, 185, 58], 694141104),
    "presence": ([185, 220, 58, 17, 220, 210], 231895316),
    "frequency": ([185, 220, 58, 17, 220, 273], 1238698991),
    "rewarded presence": ([185, 185, 58, 7, 185, 169], 17640446),
    "rewarded frequency": ([185, 185, 58, 7, 185, 58], 833822010),
    "long history": ([185, 220, 58, 17, 182, 210], 237288690),
    "dry": ([185, 185, 220, 17, 185, 210], 1663979737),
    "xtc": ([185, 58, 58, 17, 185, 182], 2076714225),
    "sigma": ([185, 185, 220, 17, 185, 220], 189651647),
    "dynamic temperature": ([185, 185, 58, 17, 220, 120], 1445609810),
    "forbidden": ([185, 185, 58, 17, 185, 220], 1870213134),
    "raised": ([185, 185, 260, 260, 185, 259], 2449815673),
    "mirostat 1": ([185, 185, 58, 158, 135, 185], 2749938987),
    "mirostat 2": ([185, 185, 58, 231, 220, 120], 2140355407),
    "grammar": ([111, 111, 114, 111, 111, 259], 418996738),
    "greedy": ([185, 185, 58, 0, 185, 169], 1130530548),
}


@pytest.mark.parametrize("name", ALONE)
def test_the_same_seed_gives_the_tokens_that_it_always_gave(vocabulary: Vocabulary, name: str) -> None:
    with Sampler(vocabulary, SamplerConfig(seed=77, **ALONE[name])) as sampler:
        chosen = []
        for row in rows_of(60, 5):
            chosen.append(sampler.sample(row))
            sampler.accept(chosen[-1])
    assert (chosen[:6], zlib.crc32(np.array(chosen, "<i4").tobytes())) == RECORDED[name]


@pytest.mark.parametrize("n", [1, 5, 300, 3000, 50_000])
def test_candidates_are_the_largest_and_of_equal_ones_the_first(n: int) -> None:
    rng = np.random.default_rng(n)
    for scale, k in itertools.product((0.0, 0.5, 3.0, 1e4), (1, 2, 41, 130, 1000)):
        row = np.round(rng.standard_normal(n + 3) * scale).astype(np.float32)
        best = best_of(row, RowNeed(min(k, n), n, log_sum=True))
        expected = np.lexsort((np.arange(n), -row[:n]))[:k]
        np.testing.assert_array_equal(best.ids, expected)
        np.testing.assert_array_equal(best.logits, row[expected])
        assert (best.ids.dtype, best.logits.dtype) == (np.int32, np.float32)
        assert best.log_sum == log_sum_exp(row)
        assert best.n_bytes == 8 * min(k, n)


def test_the_first_of_candidates_are_candidates() -> None:
    best = Candidates(np.arange(5, dtype=np.int32), np.zeros(5, np.float32), log_sum=2.0).first(2)
    assert (best.ids.tolist(), best.logits.tolist(), best.is_finite, best.log_sum) == ([0, 1], [0.0, 0.0], True, 2.0)
