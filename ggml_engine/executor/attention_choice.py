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
FORMS: Final[Mapping[VLayout, tuple[AttentionForm, ...]]] = {  # CELLS only where the compiled kernel is there
    "columns": (AttentionForm.MATMUL, AttentionForm.MATMUL_FOLDED),
    "rows": (AttentionForm.CELLS, AttentionForm.FLASH, AttentionForm.FLASH_FOLDED),
}

# How often a step has so many tokens, roughly: most of them decode. Their times decide how V is laid out.
_WEIGHTS: Final = {1: 6, 4: 2, 8: 1, 16: 1, 32: 1, 128: 1, 512: 2}

# What another form must gain before it takes the place of the usual one: measurements are noisy. Another layout, and
# other forms beside the compiled kernel (all steps plan their reads in blocks then), must gain more over all steps.
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
    """The forms that "auto" takes. `forms` has for each layout and number of tokens one for each number of rows."""

    v_layout: VLayout
    forms: Mapping[VLayout, tuple[tuple[AttentionForm, ...], ...]]

    def form(self, v_layout: VLayout, n_tokens: int, n_rows: int) -> AttentionForm:
        """The form of a step of `n_tokens` that reads `n_rows` rows."""
        return self.forms[v_layout][_nearest(TOKENS, n_tokens)][_nearest(ROWS, n_rows)]

    def all_forms(self, v_layout: VLayout) -> frozenset[AttentionForm]:
        """Those that steps may have."""
        return frozenset(form for of_tokens in self.forms[v_layout] for form in of_tokens)


def _nearest(values: Sequence[int], n: int) -> int:
    """The index of the value whose ratio to n is smallest."""
    for i, (low, high) in enumerate(pairwise(values)):
        if n * n <= low * high:
            return i
    return len(values) - 1


def usual_table(n_group: int, *, is_tiled: bool, has_kernel: bool = False) -> AttentionTable:
    """What is taken without measurements, by the number of query heads that share a K/V head.

    With `has_kernel` the compiled kernel, over V in rows, for all steps. Else: products of a matrix gain by
    folding where there are a few tokens; with one it depends on the model, and with many there is nothing to gain.
    Flash attention gains where folding alone makes enough rows for its kernel of whole tiles, which `is_tiled` says
    that it has for these types of K and V.
    """
    matmul = {n: AttentionForm.MATMUL_FOLDED if n_group > 1 and 1 < n <= _FEW else AttentionForm.MATMUL for n in TOKENS}
    rows = {}
    for n in TOKENS:
        folds = is_tiled and n < _FLASH_TILE <= n * n_group
        rows[n] = AttentionForm.FLASH_FOLDED if folds else AttentionForm.FLASH
        if has_kernel:
            rows[n] = AttentionForm.CELLS
    forms: dict[VLayout, tuple[tuple[AttentionForm, ...], ...]] = {
        "columns": tuple((form,) * len(ROWS) for form in matmul.values()),
        "rows": tuple((form,) * len(ROWS) for form in rows.values()),
    }
    return AttentionTable("rows" if has_kernel else "columns", forms)


def table_of(times: Times, usual: AttentionTable) -> AttentionTable:
    """The table of measured times, where forms may be missing: steps whose usual form is missing stay as they are."""
    forms = {
        layout: tuple(
            tuple(_fastest(times, layout, form, i, j) for j, form in enumerate(of_tokens))
            for i, of_tokens in enumerate(usual.forms[layout])
        )
        for layout in FORMS
    }
    for layout, chosen in forms.items():
        is_exact = usual.all_forms(layout) == {AttentionForm.CELLS}
        if is_exact and _score(times, chosen) * _LAYOUT_GAIN >= _score(times, usual.forms[layout]):
            forms[layout] = usual.forms[layout]
    score = {layout: _score(times, forms[layout]) for layout in FORMS}
    layout = usual.v_layout
    for other, seconds in score.items():
        if seconds * _LAYOUT_GAIN < score[layout]:
            layout = other
    return AttentionTable(layout, forms)


def _fastest(times: Times, layout: VLayout, usual: AttentionForm, i: int, j: int) -> AttentionForm:
    """The fastest form over this layout, at numbers i and j of tokens and rows; the usual one where that is close."""
    if usual not in times:
        return usual
    best = min((form for form in FORMS[layout] if form in times), key=lambda form: times[form][i][j])
    return best if times[best][i][j] * _FORM_GAIN < times[usual][i][j] else usual


def _score(times: Times, forms: Sequence[Sequence[AttentionForm]]) -> float:
    """The weighted geometric mean of these forms' times; infinite where they were not measured."""
    total = 0.0
    for i, n in enumerate(TOKENS):
        if any(form not in times for form in forms[i]):
            return math.inf
        total += _WEIGHTS[n] * sum(math.log(times[form][i][j]) for j, form in enumerate(forms[i])) / len(ROWS)
    return math.exp(total / sum(_WEIGHTS.values()))
