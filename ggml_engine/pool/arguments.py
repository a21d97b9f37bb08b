"""Checks of the numbers that callers of the cell cache give: integers, and arrays of them.

Owns: what counts as an integer (Python's and numpy's, never a bool, float or text), and the refusal of the rest.
Does not know: what the numbers mean; the caller names them and the error to raise.
"""

from __future__ import annotations

import operator

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import CacheError, OptionError, StepError


def checked_int(value: object, what: str, error: type[Exception]) -> int:
    """The integer, or `error` naming `what` and the value that was given."""
    if isinstance(value, (bool, np.bool_)):
        raise error(f"{what} is an integer, not {value!r}")
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise error(f"{what} is an integer, not {value!r}") from None


def checked_option(value: int, what: str, least: int) -> int:
    """An option that is at least `least`, or OptionError."""
    checked = checked_int(value, what, OptionError)
    if checked < least:
        raise OptionError(f"{what} must be at least {least}, got {checked}")
    return checked


def checked_count(n_tokens: int) -> int:
    """A number of tokens, zero included, or StepError."""
    checked = checked_int(n_tokens, "a number of tokens", StepError)
    if checked < 0:
        raise StepError(f"a step cannot have {checked} tokens")
    return checked


def checked_integers(values: npt.ArrayLike, what: str, error: type[CacheError]) -> npt.NDArray[np.int64]:
    """A private i64 copy of a one-dimensional array of integers that fit i64."""
    try:
        array = np.asarray(values)
    except (ValueError, TypeError, OverflowError):
        raise error(f"{what} are a list of integers") from None
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise error(f"{what} are a list of integers, got {array.dtype} {list(array.shape)}")
    if array.dtype == np.uint64 and array.size and int(array.max()) > np.iinfo(np.int64).max:
        raise error(f"{what} must fit 64 bits with a sign, got {int(array.max())}")
    return array.astype(np.int64)
