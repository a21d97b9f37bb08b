"""What a check compares and prints, without a model."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

import ggml_engine.cli.check as command
from ggml_engine.cli.main import main
from ggml_engine.errors import GGUFError
from ggml_engine.reference.check import CheckRow, compare_logits
from ggml_engine.reference.ways import chunked_ways

FINE = CheckRow("matmul", "alone", "libllama", 0.0, 0.0, 0.0, True)
PAST = CheckRow("flash", "batched", "libllama", math.inf, math.inf, 1e-2, False)
NOTE = CheckRow("all", "all", "naive attention", None, None, None, True, "too large for\nnaive attention")


def test_the_error_is_the_mean_square_over_the_variance_of_the_reference() -> None:
    expected = np.array([[0.0, 2.0], [0.0, 4.0]])  # variances 1 and 4
    found = np.array([[0.0, 2.0], [1.0, 4.0]], np.float32)
    assert compare_logits(found, expected) == (1.0, 0.5 / 5)
    assert compare_logits(expected.astype(np.float32), expected) == (0.0, 0.0)


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_past_every_bound(wrong: float) -> None:
    expected = np.array([[0.0, 2.0]])
    assert compare_logits(np.array([[wrong, 2.0]], np.float32), expected) == (math.inf, math.inf)


def test_flat_references_do_not_hide_a_difference() -> None:
    flat = np.ones((1, 2))
    assert compare_logits(np.ones((1, 2), np.float32), flat) == (0.0, 0.0)
    assert compare_logits(np.zeros((1, 2), np.float32), flat) == (1.0, math.inf)


@pytest.mark.parametrize("n", [16, 17, 96, 700])
def test_every_way_of_cutting_feeds_all_tokens_in_steps_of_at_least_one(n: int) -> None:
    ways = chunked_ways(n, [1, 5, 15, 512])
    assert len({way.sizes for way in ways}) == len(ways)
    for way in ways:
        assert sum(way.sizes) == n
        assert min(way.sizes) >= 1
    assert [way.name for way in ways[3:]] == [f"window {w}" for w in (1, 5, 15, 512) if w < n]


def test_the_table_shows_every_comparison_and_says_what_was_not_compared(monkeypatch, capsys) -> None:
    monkeypatch.setattr(command, "check_rows", lambda _model, **_options: [NOTE, FINE, PAST])
    assert main(["check", "some.gguf"]) == 1
    out, err = capsys.readouterr()
    header, first, second, note = out.splitlines()
    assert header.split("  ")[0] == "mode"
    assert first.split() == ["matmul", "alone", "libllama", "0", "0", "0", "ok"]
    assert second.split() == ["flash", "batched", "libllama", "inf", "inf", "0.01", "FAIL"]
    assert note == "not compared: all, all, with naive attention: too large for naive attention"
    assert err == "1 of 2 comparisons are past their bound\n"


def test_all_within_their_bounds_is_code_0_and_json_has_every_row(monkeypatch, capsys) -> None:
    asked = {}
    monkeypatch.setattr(command, "check_rows", lambda _model, **options: asked.update(options) or [FINE, NOTE])
    assert main(["check", "some.gguf", "--json", "--tokens", "40", "--seed", "3", "--attention", "flash"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    rows = json.loads(out)
    assert [row["against"] for row in rows] == ["libllama", "naive attention"]
    assert rows[0]["ok"] is True
    assert rows[1]["bound"] is None
    assert {key: asked[key] for key in ("n_tokens", "seed", "attention", "kv_type", "threads")} == {
        "n_tokens": 40,
        "seed": 3,
        "attention": "flash",
        "kv_type": "f16",
        "threads": None,
    }


def test_json_has_no_infinity_and_still_says_that_it_failed(monkeypatch, capsys) -> None:
    monkeypatch.setattr(command, "check_rows", lambda _model, **_options: [PAST])
    assert main(["check", "some.gguf", "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["error"], row["ok"]) == (None, False)


def test_a_file_that_cannot_be_read_is_one_line_and_code_1(monkeypatch, capsys) -> None:
    def refuse(*_args, **_options):
        raise GGUFError("bad-magic", "some.gguf", 0, "magic", "is not GGUF")

    monkeypatch.setattr(command, "check_rows", refuse)
    assert main(["check", "some.gguf"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ggml-engine: error: ")
    assert err.count("\n") == 1
