"""The compiled search for the best of a row gives what numpy's gives, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from compilers import has_compiler

from ggml_engine.ggml import candidates
from ggml_engine.ggml.candidates import RowNeed, best_of, best_of_by_numpy

Row = npt.NDArray[np.float32]
KINDS: dict[str, Callable[[np.random.Generator, int], Row]] = {
    "random": lambda rng, n: rng.normal(size=n).astype(np.float32),
    "many equal": lambda rng, n: (np.round(rng.normal(size=n) * 3) / 3).astype(np.float32),
    "all equal": lambda _, n: np.full(n, -2.5, np.float32),
    "ascending": lambda rng, n: np.sort(rng.normal(size=n)).astype(np.float32),
    "descending": lambda rng, n: -np.sort(rng.normal(size=n)).astype(np.float32),
    "both zeros": lambda rng, n: np.where(rng.random(n) < 0.5, np.float32(0.0), np.float32(-0.0)).astype(np.float32),
}
SIZES = (1, 31, 127, 128, 129, 512, 1000, 5000, 49152)


def native(row: Row, need: RowNeed) -> tuple[list[int], bytes] | None:
    assert candidates._native is not None
    found = candidates._native.best_logits(row, need.n_tokens, need.n_best)
    return None if found is None else (np.frombuffer(found[0], np.int32).tolist(), found[1])


def test_it_is_there_where_there_is_a_compiler() -> None:
    assert candidates._native is not None or not has_compiler()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", SIZES)
def test_ids_and_logits_are_numpys_in_their_order(kind: str, n: int) -> None:
    row = KINDS[kind](np.random.default_rng(n), n + 3)
    row[n:] = 99.0  # not looked at
    for k in {1, min(n, 2), min(n, 41), min(n, 300), min(n, 1024)}:
        need = RowNeed(k, n)
        expected = best_of_by_numpy(row, need)
        assert native(row, need) == (expected.ids.tolist(), expected.logits.tobytes())


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("n", [1, 127, 128, 300, 4096])
def test_what_is_not_finite_is_found_wherever_it_is_and_nowhere_else(value: float, n: int) -> None:
    row = np.random.default_rng(1).normal(size=n + 1).astype(np.float32)
    for at in {0, n // 2, n - 1, max(0, n - 40)}:
        spoiled = row.copy()
        spoiled[at] = value
        assert native(spoiled, RowNeed(1, n)) is None
        assert not best_of(spoiled, RowNeed(1, n)).is_finite
    row[n] = value
    assert native(row, RowNeed(1, n)) is not None


def test_rows_of_another_kind_are_refused() -> None:
    native_search = candidates._native
    assert native_search is not None
    search = native_search.best_logits
    row = np.zeros(1000, np.float32)
    for bad, error in ((row.astype(np.float64), TypeError), (row[::2], (ValueError, BufferError))):
        with pytest.raises(error):
            search(bad, 10, 1)
    for n, k in ((1001, 1), (10, 0), (10, 11), (-1, 1), (10, -1)):
        with pytest.raises(ValueError, match="the best"):
            search(row, n, k)


def test_candidates_are_the_same_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    row = KINDS["random"](np.random.default_rng(3), 49152)
    for need in (RowNeed(1, 49152), RowNeed(41, 49000, log_sum=True), RowNeed(1024, 49152)):
        found = best_of(row, need)
        with monkeypatch.context() as patch:
            patch.setattr(candidates, "_native", None)
            plain = best_of(row, need)
        assert found.ids.tolist() == plain.ids.tolist()
        assert found.logits.tobytes() == plain.logits.tobytes()
        assert (found.best_id, found.n_bytes, found.log_sum) == (plain.best_id, plain.n_bytes, plain.log_sum)
