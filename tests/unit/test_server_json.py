"""JSON from strangers: what Python's own parser would take, or die of, is a 400 that says why."""

from __future__ import annotations

import pytest

from ggml_engine.server.errors import HttpProblem
from ggml_engine.server.strict_json import MAX_DEPTH, parse_object


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "no JSON"),
        (b"{", "no JSON"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": -Infinity}', "-Infinity"),
        (b'{"a": 1e999}', "outside the range"),
        (b'{"a": ' + b"1" * 5000 + b"}", "5000 digits"),
        (b'{"a": "\xff"}', "not UTF-8"),
        (b'{"a": "\xed\xa0\x80"}', "not UTF-8"),
        (rb'{"a": "\ud800"}', "lone surrogate"),
        (rb'{"\udfff": 1}', "lone surrogate"),
        (rb'{"a": ["x", {"b": "\u0000"}]}', r"U\+0000"),
        (b'{"a": "\x00"}', "no JSON"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "'c' is given twice"),
        (b"[" * 100_000, "nests deeper"),
        (b'{"a":' * 100_000, "nests deeper"),
        (b'{"a":' + b"[" * MAX_DEPTH + b"]" * MAX_DEPTH + b"}", "nests deeper"),
        (b"[1]", "must be a JSON object"),
        (b"null", "it is null"),
        (b'"text"', "must be a JSON object"),
    ],
    ids=lambda value: str(value[:20]),
)
def test_what_is_no_fit_json_is_refused(body: bytes, reason: str) -> None:
    with pytest.raises(HttpProblem, match=reason) as caught:
        parse_object(body)
    assert (caught.value.status, caught.value.code) == (400, "invalid_json")
    assert len(caught.value.message) < 200


def test_what_is_fit_is_taken_as_it_is() -> None:
    assert parse_object(rb'{"a": "\ud83d\ude00 \\u0000", "b": [1, 2.5, null, true], "": {}}') == {
        "a": "\U0001f600 \\u0000",
        "b": [1, 2.5, None, True],
        "": {},
    }


def test_a_body_may_nest_as_deep_as_the_bound_says() -> None:
    n = MAX_DEPTH - 1
    assert parse_object(b'{"a":' + b"[" * n + b"]" * n + b"}")


def test_many_brackets_side_by_side_are_not_deep() -> None:
    assert len(parse_object(b'{"a":[' + b"[],{}," * 1000 + b"[]]}")["a"]) == 2001
