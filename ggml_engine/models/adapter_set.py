"""Which adapters a sequence is computed with, and how strongly. Loads nothing native."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import numpy as np

from ggml_engine.errors import OptionError


@runtime_checkable
class AdapterLike(Protocol):
    """A change of a model's weights that was loaded: `models.adapter.Adapter`."""

    @property
    def fingerprint(self) -> str:
        """A name for all that it changes."""


@dataclass(frozen=True, slots=True)
class AdapterSet:
    """Adapters with their scales, in the order in which they are added. Sets are equal by adapter, scale and order."""

    scaled: tuple[tuple[AdapterLike, float], ...] = ()

    @classmethod
    def of(cls, pairs: Iterable[tuple[AdapterLike, float]]) -> AdapterSet:
        """Of pairs of an adapter and its scale; what has scale 0 is left out.

        Raises OptionError for other things, scales that are no finite f32, and an adapter that is there twice.
        """
        kept: dict[AdapterLike, float] = {}
        for pair in pairs:
            if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[0], AdapterLike):
                raise OptionError(f"adapters are pairs of a loaded adapter and a scale, got {pair!r:.80}")
            adapter, scale = pair
            if adapter in kept:
                raise OptionError("an adapter is given twice: add up its scales")
            kept[adapter] = checked_scale(scale)
        return cls(tuple((adapter, scale) for adapter, scale in kept.items() if scale))

    @property
    def adapters(self) -> tuple[AdapterLike, ...]:
        """Without their scales."""
        return tuple(adapter for adapter, _ in self.scaled)

    def fingerprint_over(self, base: str) -> str:
        """A name for K/V that these adapters make where it is named `base` without any; `base` where there are none."""
        if not self.scaled:
            return base
        lines = [f"{adapter.fingerprint} {scale!r}\n" for adapter, scale in self.scaled]
        import hashlib  # noqa: PLC0415  # it loads OpenSSL, and a start needs none

        return hashlib.sha256(f"{base}\nadapters\n{''.join(lines)}".encode()).hexdigest()


def checked_scale(scale: object) -> float:
    """A scale, rounded to f32. Raises OptionError for what is none."""
    if isinstance(scale, bool) or not isinstance(scale, int | float | np.integer | np.floating):
        raise OptionError(f"the scale of an adapter is a number, is {scale!r:.80}")
    with np.errstate(over="ignore", under="ignore"):
        rounded = float(np.float32(scale))
    if not math.isfinite(rounded):
        raise OptionError(f"the scale of an adapter is finite in 32 bits, is {scale!r}")
    return rounded


NO_ADAPTERS: Final = AdapterSet()
