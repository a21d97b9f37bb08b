"""What of a row of logits is needed, all of it or its best candidates, and how these are found.

A sampler says what it needs (`RowNeed`), an executor gives that much of every row (`Candidates`), so that rows of
262,144 logits stay where they were computed. Knows nothing of ggml; the search is compiled where the package was built
with it (`native/best_logits.c`): a decode step has numpy's code to load anew, once weights have passed the caches.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

try:
    from ggml_engine.native import _kernels as _native
except ImportError:  # nothing was built
    _native = None  # type: ignore[assignment]

MAX_CANDIDATES = 1024

# The compiled search cuts a row in blocks of 128, and needs some more of these than it looks for.
_LEAST_PER_CANDIDATE = 512

# Groups that a row is cut into for each candidate: few logits besides the best reach the bound that they give.
_GROUPS_PER_CANDIDATE = 4
_MIN_GROUPS = 256


@dataclass(frozen=True, slots=True)
class RowNeed:
    """The `n_best` largest of the first `n_tokens` logits of a row, or the whole row where `n_best` is 0.

    `log_sum` asks for the logarithm of the sum of all exponentials, too, which log-probabilities are relative to.
    """

    n_best: int = 0
    n_tokens: int = 0
    log_sum: bool = False


WHOLE_ROW = RowNeed()


class Candidates:
    """The best of a row, the largest logit first, equal ones in the order of their ids.

    Where `is_finite` is false, some logit may be infinite or not a number: nothing else holds then, and the row has to
    be looked at. `log_sum` is of all logits of the row; None where it was not asked for. `ids` i32 [n_best] and
    `logits` f32 [n_best] may be given as bytes.
    """

    __slots__ = ("_ids", "_logits", "is_finite", "log_sum")

    def __init__(
        self,
        ids: NDArray[np.int32] | bytes,
        logits: NDArray[np.float32] | bytes,
        is_finite: bool = True,
        log_sum: float | None = None,
    ) -> None:
        self._ids, self._logits = ids, logits
        self.is_finite = is_finite
        self.log_sum = log_sum

    @property
    def ids(self) -> NDArray[np.int32]:
        """The tokens, i32 [n_best]."""
        if isinstance(self._ids, bytes):
            self._ids = np.frombuffer(self._ids, np.int32)
        return self._ids

    @property
    def logits(self) -> NDArray[np.float32]:
        """Their logits, f32 [n_best]."""
        if isinstance(self._logits, bytes):
            self._logits = np.frombuffer(self._logits, np.float32)
        return self._logits

    @property
    def best_id(self) -> int:
        """The token of the largest logit."""
        found: int = _ID.unpack_from(self._ids)[0]  # type: ignore[arg-type]  # an array is a buffer, too
        return found

    @property
    def n_bytes(self) -> int:
        """Bytes of ids and logits."""
        return 2 * (len(self._ids) if isinstance(self._ids, bytes) else self._ids.nbytes)

    def first(self, n: int) -> Candidates:
        """The best `n` of them."""
        return Candidates(self.ids[:n], self.logits[:n], self.is_finite, self.log_sum)


_ID = struct.Struct("=i")
NOT_FINITE = Candidates(np.empty(0, np.int32), np.empty(0, np.float32), is_finite=False)


def best_of(row: NDArray[np.float32], need: RowNeed) -> Candidates:
    """The candidates of a row f32 [n_tokens or more] that `need` asks for, which is not the whole row."""
    if _native is None or need.n_best * _LEAST_PER_CANDIDATE > need.n_tokens or not row.flags.c_contiguous:
        return best_of_by_numpy(row, need)
    found = _native.best_logits(row, need.n_tokens, need.n_best)
    if found is None:
        return NOT_FINITE
    return Candidates(*found, True, log_sum_exp(row) if need.log_sum else None)


def best_of_by_numpy(row: NDArray[np.float32], need: RowNeed) -> Candidates:
    """As `best_of`, where the compiled one is not there or looks at too much."""
    logits = row[: need.n_tokens]
    if need.n_best == 1:
        best = int(logits.argmax())
        ids, values = np.array([best], np.int32), logits[best : best + 1].copy()
    else:
        ids = best_ids(logits, need.n_best)
        values = logits[ids]
    largest = values.item(0) if ids.size else math.nan
    # NaN is the largest for argmax, and leaves no ids else; an infinity is at one end
    if not math.isfinite(largest - logits.item(logits.argmin())):
        return NOT_FINITE
    return Candidates(ids, values, log_sum=log_sum_exp(row) if need.log_sum else None)


def best_ids(logits: NDArray[np.float32], k: int) -> NDArray[np.int32]:
    """Where the k largest are, likeliest first, equal ones by id; fewer where there is NaN.

    The k-th largest of the maxima of any groups is a bound that at least k logits reach, and few others.
    """
    k = min(k, len(logits))
    n_groups = max(_MIN_GROUPS, _GROUPS_PER_CANDIDATE * k)
    n_each = len(logits) // n_groups
    if n_each < 2:
        bound = np.partition(logits, len(logits) - k)[len(logits) - k]
    else:
        # columns are the groups: whole vectors are compared at once
        maxima = logits[: n_each * n_groups].reshape(n_each, n_groups).max(axis=0)
        bound = np.partition(maxima, n_groups - k)[n_groups - k]
    found = np.flatnonzero(logits >= bound)
    values = logits[found]
    if len(found) > 4 * k:  # many are equal to the bound, and the sort is not for nothing
        least = np.partition(values, len(values) - k)[len(values) - k]
        found = found[values >= least]
        values = logits[found]
    return found[np.argsort(-values, kind="stable")[:k]].astype(np.int32)


def log_sum_exp(row: NDArray[np.float32]) -> float:
    """The logarithm of the sum of all exponentials of a row f32 [n], computed in f64."""
    peak = row.max()
    scaled: NDArray[Any] = np.subtract(row, peak, dtype=np.float64)
    return float(peak) + float(np.log(np.exp(scaled, out=scaled).sum()))
