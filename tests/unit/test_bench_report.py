"""What a benchmark found: the best mode, quotients, JSON, and the tables."""

from __future__ import annotations

import json

import pytest
from bench_reports import MODES, race, whole_report

from ggml_engine.bench.report import Comparison, ModelReport, Row
from ggml_engine.cli.bench_table import case_table, heading


def test_the_best_mode_is_the_one_with_the_fastest_median() -> None:
    model = ModelReport("tiny")
    row = race(model, "decode", "x", {"ours": [1.0, 1.0, 1.0], MODES[0]: [0.1, 9.0, 9.0], MODES[2]: [2.0, 2.0, 2.0]})
    assert row.best is not None
    assert row.best.name == MODES[2]
    assert row.compared == {"ours against the best mode": [2.0] * 3, "ours against the defaults": [0.1, 9.0, 9.0]}


def test_a_row_is_there_once_something_was_measured_or_left_out() -> None:
    model = ModelReport("tiny")
    empty, left_out = model.row("decode", "a"), model.row("warm", "b")
    empty.add("ours", "s", 3)
    left_out.skipped["ours"] = "too long"
    assert model.cases == ["warm"]
    assert [row["case"] for row in model.plain()["rows"]] == ["warm"]


def test_quotients_of_figures_have_names() -> None:
    row = Row("warm", "x")
    cold, warm = row.add("cold", "s"), row.add("warm", "s")
    row.comparisons.append(Comparison("cold / warm", cold, warm))
    assert row.compared == {}
    cold.values.extend([4.0, 6.0])
    warm.values.extend([2.0])
    assert row.compared == {"cold / warm": [2.0]}


def test_the_document_has_every_value_and_what_follows_from_them() -> None:
    report = whole_report()
    report.models[0].rows[0].skipped["no flash, split"] = "no room"
    document = json.loads(json.dumps(report.plain(), allow_nan=False))
    assert set(document) == {"format", "machine", "options", "interrupted", "models"}
    assert document["format"] == 1
    assert document["interrupted"] is False
    (model,) = document["models"]
    assert (model["model"], model["failed"]) == ("tiny", {})
    prefill, shared, clone = model["rows"]
    assert set(prefill) == {"case", "label", "series", "ratios", "best", "defaults", "skipped"}
    assert prefill["series"][0] == {
        "name": "ours", "unit": "s", "values": [1.0, 1.0, 2.0], "median": 1.0, "min": 1.0, "max": 2.0, "n_tokens": 10,
        "tokens_per_s": {"median": 10.0, "min": 5.0, "max": 10.0},
    }  # fmt: skip
    assert prefill["ratios"][0] == {
        "name": "ours against the best mode", "values": [2.0, 1.5, 1.0], "median": 1.5, "min": 1.0, "max": 2.0,
    }  # fmt: skip
    assert (prefill["best"], prefill["defaults"]) == ("flash, split", "flash, split")
    assert prefill["skipped"] == [{"name": "no flash, split", "reason": "no room"}]
    assert [series["name"] for series in shared["series"]] == ["ours", *MODES]
    assert (clone["best"], clone["defaults"], clone["ratios"]) == (None, None, [])
    assert [series["unit"] for series in clone["series"]] == ["s", "cells", "bytes"]


def test_a_race_is_a_line_with_a_column_for_each_mode() -> None:
    text = case_table(whole_report().models[0], "shared")
    _, title, heads, line, note = text.splitlines()
    assert title == "tiny: decode of sequences on a shared prefix, tokens/s"
    columns = ["ours", *MODES, "ours/best", "spread", "best mode", "ours/defaults", "spread"]
    assert heads.split() == " ".join(columns).split()
    assert line.split() == ["8", "sequences", "on", "64", "10.0", "3.3", "3.3", "2.5", "2.5", "2.00", "2.00..3.00",
                            "flash,", "split", "2.00", "2.00..3.00"]  # fmt: skip
    assert note == "llama.cpp's defaults: flash, split. A ratio above 1 is ours ahead."


def test_a_race_without_others_is_ours_with_its_spread() -> None:
    model = ModelReport("tiny")
    race(model, "decode", "1 sequence at 0", {"ours": [1.0, 2.0, 4.0]})
    assert case_table(model, "decode").splitlines()[2:] == [
        "                 ours  least..greatest",
        "1 sequence at 0   5.0  2.5..10.0",
    ]


def test_figures_are_a_line_each_in_units_that_can_be_read() -> None:
    lines = case_table(whole_report().models[0], "clone").splitlines()[3:]
    assert [" ".join(line.split()) for line in lines] == [
        "a prefix of 64 time 20.0 us 10.0..30.0",
        "cells taken 0 cells 0..0",
        "K/V added 0 bytes 0..0",
    ]


def test_a_reason_is_told_once_and_with_the_rows_that_it_holds_for() -> None:
    model = ModelReport("tiny")
    for label in ("a", "b"):
        race(model, "decode", label, {"ours": [1.0]}).skipped["flash, unified"] = "the same"
    model.rows[1].skipped["flash, split"] = "no\nroom"
    notes = [line for line in case_table(model, "decode").splitlines() if line.startswith("not measured")]
    assert notes == ["not measured: flash, unified: the same", "not measured: flash, split (b): no room"]


def test_a_case_that_failed_says_so_after_what_was_measured() -> None:
    model = ModelReport("tiny")
    model.failed["decode"] = "libllama made no context"
    assert case_table(model, "decode").splitlines()[-1] == "failed: libllama made no context"
    assert case_table(model, "prefill") == ""


@pytest.mark.parametrize(
    ("seconds", "shown"), [(1.5, "1.50 s"), (0.25, "250.00 ms"), (2e-5, "20.0 us"), (0.0, "0.0 us")]
)
def test_a_time_has_a_unit_of_its_size(seconds: float, shown: str) -> None:
    model = ModelReport("tiny")
    model.row("warm", "x").add("warm", "s").values.append(seconds)
    assert shown in case_table(model, "warm")


def test_the_heading_names_processor_threads_and_versions() -> None:
    report = whole_report()
    assert heading(report.machine, report.options).splitlines() == [
        "A Processor, 2 of 4 cores, 2 threads",
        "ggml-engine 0.1, ggml 1.2.3, llama-cpp-python 0.3",
        "medians of 3 interleaved repetitions (least..greatest)",
    ]
