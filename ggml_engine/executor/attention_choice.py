"""Which form of attention a step takes, and how V is laid out: a table by tokens and rows, from measured times or none.

Pure: knows no tensor, file or clock. A table never changes once it is made, so that steps of one shape have one form
for as long as an executor lives.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from ggml_engine.models.attention import AttentionForm
from ggml_engine.pool.kv_types import VLayout

# What is measured: steps of so many tokens, over so many rows. Between them the nearest one decides, by its ratio.
TOKENS: Final = (1, 4, 8, 16, 32, 128, 512)
ROWS: Final = (256, 1024, 4096)
FORMS: Final[Mapping[VLayout, tuple[AttentionForm, AttentionForm]]] = {
    "columns": (AttentionForm.MATMUL, AttentionForm.MATMUL_FOLDED),
    "rows": (AttentionForm.FLASH, AttentionForm.FLASH_FOLDED),
}

# How often a step has so many tokens, roughly: most of them decode. Their times decide how V is laid out.
_WEIGHTS: Final = {1: 6, 4: 2, 8: 1, 16: 1, 32: 1, 128: 1, 512: 2}

# What another form, or layout, must gain before it is taken in place of the usual one: measurements are noisy.
_FORM_GAIN: Final = 1.05
_LAYOUT_GAIN: Final = 1.15

# From so many rows of one product on, flash attention has a kernel that works on all of them (ggml's
# GGML_FA_TILE_Q, for K and V of f16 or f32), and before it none that gains by folding.
_FLASH_TILE: Final = 64

# To so many tokens products of folded heads are the faster ones without any measurement.
_FEW: Final = 32

Times = Mapping[AttentionForm, Sequence[Sequence[float]]]  # seconds by tokens, then by rows


@dataclass(frozen=True, slots=True)
class AttentionTable:
    """The forms that "auto" takes. `folds` has for each layout and number of tokens a flag for each number of rows."""

    v_layout: VLayout
    folds: Mapping[VLayout, tuple[tuple[bool, ...], ...]]

    def form(self, v_layout: VLayout, n_tokens: int, n_rows: int) -> AttentionForm:
        """The form of a step of `n_tokens` that reads `n_rows` rows."""
        return FORMS[v_layout][self.folds[v_layout][_nearest(TOKENS, n_tokens)][_nearest(ROWS, n_rows)]]


def _nearest(values: Sequence[int], n: int) -> int:
    """The index of the value whose ratio to n is smallest."""
    for i, (low, high) in enumerate(pairwise(values)):
        if n * n <= low * high:
            return i
    return len(values) - 1


def usual_table(n_group: int, *, is_tiled: bool) -> AttentionTable:
    """What is taken without measurements, by the number of query heads that share a K/V head.

    Products of a matrix gain by folding where there are a few tokens: with one it depends on the model, and with many
    there is nothing to gain. Flash attention gains where folding alone makes enough rows for its kernel of whole tiles,
    which `is_tiled` says that it has for these types of K and V.
    """
    flash = tuple((is_tiled and n < _FLASH_TILE <= n * n_group,) * len(ROWS) for n in TOKENS)
    matmul = tuple((n_group > 1 and 1 < n <= _FEW,) * len(ROWS) for n in TOKENS)
    return AttentionTable("columns", {"columns": matmul, "rows": flash})


def table_of(times: Times, usual: AttentionTable) -> AttentionTable:
    """The table of measured times, where forms may be missing: these are as in the usual one."""
    folds = dict(usual.folds)
    for layout, (plain, folded) in FORMS.items():
        if plain in times and folded in times:
            folds[layout] = tuple(
                tuple(_is_folded(was, a, b) for was, a, b in zip(*of_tokens, strict=True))
                for of_tokens in zip(usual.folds[layout], times[plain], times[folded], strict=True)
            )
    score = {layout: _score(times, folds[layout], layout) for layout in FORMS}
    layout = usual.v_layout
    for other, seconds in score.items():
        if seconds * _LAYOUT_GAIN < score[layout]:
            layout = other
    return AttentionTable(layout, folds)


def _is_folded(was: bool, plain: float, folded: float) -> bool:
    """Whether the heads are folded: as before where the times are close."""
    return plain * _FORM_GAIN >= folded if was else folded * _FORM_GAIN < plain


def _score(times: Times, folds: Sequence[Sequence[bool]], layout: VLayout) -> float:
    """The weighted geometric mean of the chosen forms' times; infinite where they were not measured."""
    if any(form not in times for form in FORMS[layout]):
        return math.inf
    total = 0.0
    for i, n in enumerate(TOKENS):
        chosen = [times[FORMS[layout][fold]][i][j] for j, fold in enumerate(folds[i])]
        total += _WEIGHTS[n] * sum(map(math.log, chosen)) / len(chosen)
    return math.exp(total / sum(_WEIGHTS.values()))
