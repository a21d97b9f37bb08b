"""The table of forms: what it takes without measurements, with them, and between what was measured."""

from __future__ import annotations

import pytest

from ggml_engine.executor.attention_choice import FORMS, ROWS, TOKENS, Times, table_of, usual_table
from ggml_engine.models.attention import AttentionForm

ALL = [form for forms in FORMS.values() for form in forms]
CELLS = AttentionForm.CELLS


def times(**seconds: float) -> dict[AttentionForm, list[list[float]]]:
    """One time for every size, 1 where none is given."""
    return {form: [[seconds.get(form.value, 1.0)] * len(ROWS) for _ in TOKENS] for form in ALL}


@pytest.mark.parametrize(
    ("n_tokens", "form"), [(1, "matmul"), (4, "matmul_folded"), (8, "matmul_folded"), (512, "matmul")]
)
def test_without_measurements_products_are_folded_for_a_few_tokens(n_tokens: int, form: str) -> None:
    assert usual_table(3, is_tiled=True).form("columns", n_tokens, 1000).value == form
    assert usual_table(1, is_tiled=True).form("columns", n_tokens, 1000).value == "matmul"


@pytest.mark.parametrize(("n_tokens", "form"), [(1, "flash"), (8, "flash"), (32, "flash_folded"), (128, "flash")])
def test_flash_attention_is_folded_where_that_makes_a_tile(n_tokens: int, form: str) -> None:
    assert usual_table(3, is_tiled=True).form("rows", n_tokens, 1000).value == form
    assert usual_table(3, is_tiled=False).form("rows", n_tokens, 1000).value == "flash"


def test_the_faster_form_is_taken_at_each_size() -> None:
    measured = times(matmul=2.0)
    measured[AttentionForm.MATMUL][0] = [0.5, 0.5, 2.0]
    table = table_of(measured, usual_table(3, is_tiled=True))
    found = [table.form("columns", 1, n).value for n in ROWS]
    assert found == ["matmul", "matmul", "matmul_folded"]
    assert table.form("columns", 128, 256).value == "matmul_folded"


def test_a_form_that_is_hardly_faster_changes_nothing() -> None:
    usual = usual_table(3, is_tiled=True)
    assert table_of(times(matmul=1.02, flash=0.98), usual) == usual
    assert table_of(times(matmul=0.98, flash=1.02), usual) == usual
    usual = usual_table(3, is_tiled=True, has_kernel=True)
    assert table_of(times(flash=0.96, matmul=0.96), usual) == usual


def test_the_nearest_size_by_ratio_decides() -> None:
    measured = times()
    measured[AttentionForm.MATMUL][0] = [0.1] * 3
    measured[AttentionForm.MATMUL][1] = [9.0] * 3
    table = table_of(measured, usual_table(3, is_tiled=True))
    assert [table.form("columns", n, 256).is_folded for n in (1, 2, 3, 4)] == [False, False, True, True]
    measured = times()
    measured[AttentionForm.MATMUL][0] = [0.1, 9.0, 0.1]
    table = table_of(measured, usual_table(3, is_tiled=True))
    assert [table.form("columns", 1, n).is_folded for n in (1, 512, 513, 2048, 2049, 10**6)] == [
        False, False, True, True, False, False,
    ]  # fmt: skip


def test_v_lies_in_rows_where_flash_attention_is_clearly_faster() -> None:
    usual = usual_table(3, is_tiled=True)
    assert table_of(times(flash=0.9, flash_folded=0.9), usual).v_layout == "columns"
    assert table_of(times(flash=0.8, flash_folded=0.8), usual).v_layout == "rows"
    assert table_of(times(flash=0.8), usual).v_layout == "rows"


def test_forms_that_were_not_measured_are_as_usual() -> None:
    usual = usual_table(3, is_tiled=True)
    flash: Times = {form: rows for form, rows in times(flash=0.1).items() if form.is_flash}
    table = table_of(flash, usual)
    assert table.forms["columns"] == usual.forms["columns"]
    assert table.form("rows", 32, 256) is AttentionForm.FLASH


@pytest.mark.parametrize("n_tokens", TOKENS)
def test_the_compiled_kernel_is_usual_for_all_steps_where_it_is_there(n_tokens: int) -> None:
    usual = usual_table(3, is_tiled=True, has_kernel=True)
    assert usual.v_layout == "rows"
    assert {usual.form("rows", n_tokens, n) for n in ROWS} == {CELLS}
    assert not usual.form("columns", n_tokens, 256).is_flash, "V in columns is for products"
    assert usual.all_forms("rows") == {CELLS}


def test_steps_at_which_another_form_is_faster_than_the_kernel_take_it() -> None:
    measured = times()
    measured[AttentionForm.FLASH_FOLDED][4] = [0.05] * len(ROWS)
    measured[AttentionForm.FLASH][6] = [1.0, 1.0, 0.9]
    table = table_of(measured, usual_table(3, is_tiled=True, has_kernel=True))
    assert [table.form("rows", n, 4096).value for n in TOKENS] == [
        "cells", "cells", "cells", "cells", "flash_folded", "cells", "flash",
    ]  # fmt: skip
    assert table.form("rows", 512, 1024) is CELLS
    assert table.all_forms("rows") == {CELLS, AttentionForm.FLASH, AttentionForm.FLASH_FOLDED}


def test_the_kernel_is_not_mixed_with_forms_that_gain_little_over_all_steps() -> None:
    usual = usual_table(3, is_tiled=True, has_kernel=True)
    measured = times()
    measured[AttentionForm.FLASH][3] = [0.5] * len(ROWS)
    assert table_of(measured, usual) == usual
    measured[AttentionForm.FLASH][0] = [0.5] * len(ROWS)
    assert table_of(measured, usual).all_forms("rows") == {CELLS, AttentionForm.FLASH}


def test_v_lies_in_columns_where_the_kernel_is_clearly_slower_than_products() -> None:
    usual = usual_table(3, is_tiled=True, has_kernel=True)
    assert table_of(times(matmul=0.9, matmul_folded=0.9), usual).v_layout == "rows"
    assert table_of(times(matmul=0.8, matmul_folded=0.8), usual).v_layout == "columns"
