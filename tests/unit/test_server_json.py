"""JSON from strangers: what Python's own parser would take, or die of, is a 400 that says why."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from server_fakes import Jobs, app_of, client_of, run

from ggml_engine.server import strict_json
from ggml_engine.server.errors import HttpProblem
from ggml_engine.server.strict_json import MAX_CONTAINERS, MAX_DEPTH, MAX_STRINGS, MAX_VALUES, parse_object


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
        (b"[" * 60_000, "nests deeper"),
        (b'{"a":' * 60_000, "nests deeper"),
        (b"[" * 100_000, "100000 arrays and objects"),
        (b'{"a":' * 100_000, "100000 arrays and objects"),
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


# ---- how many values there may be


class Parser:
    """Counts what the parser of JSON is asked for, and by whom."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.n_bytes = 0
        self._loads = json.loads
        monkeypatch.setattr(strict_json.json, "loads", self)

    def __call__(self, text: str, **options: Any) -> Any:
        self.n_bytes += len(text)
        return self._loads(text, **options)


@pytest.mark.parametrize(
    ("part", "n", "reason"),
    [
        (b"[]", MAX_CONTAINERS, f"{MAX_CONTAINERS + 1} arrays and objects, at most {MAX_CONTAINERS}"),
        (b"{}", MAX_CONTAINERS, f"{MAX_CONTAINERS + 1} arrays and objects, at most {MAX_CONTAINERS}"),
        (b"[{}]", MAX_CONTAINERS // 2, f"{MAX_CONTAINERS + 1} arrays and objects"),
        (b"0", MAX_VALUES, f"{MAX_VALUES + 1} values, at most {MAX_VALUES}"),
        (b'""', MAX_VALUES + 1, f"{MAX_VALUES + 1} strings, at most {MAX_STRINGS}"),
        (rb'["\\\\"]', MAX_CONTAINERS, "arrays and objects"),
        (rb'["\\\""]', MAX_CONTAINERS, "arrays and objects"),
    ],
    ids=str,
)
def test_more_values_than_may_be_never_reach_the_parser(
    part: bytes, n: int, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = Parser(monkeypatch)
    body = b"[" + b",".join([part] * n) + (b"" if b"0" not in part else b",0") + b"]"
    with pytest.raises(HttpProblem, match=reason) as caught:
        parse_object(body)
    assert (caught.value.status, caught.value.code, parser.n_bytes) == (400, "invalid_json", 0)


@pytest.mark.parametrize("text", ["[" * 10, "{[,", '"[,', "\\[,", '\\"[,', '\\\\"[,', "\n[,{}"], ids=repr)
def test_brackets_and_commas_of_a_text_are_no_values(text: str) -> None:
    long = text * (2 * MAX_VALUES // len(text))
    assert parse_object(json.dumps({"prompt": long, "after": [long[:9], {}]}).encode())["prompt"] == long


@pytest.mark.parametrize(("part", "n"), [(b"[]", MAX_CONTAINERS - 2), (b"7", MAX_VALUES)])
def test_as_many_as_may_be_are_read(part: bytes, n: int) -> None:
    assert len(parse_object(b'{"a":[' + b",".join([part] * n) + b"]}")["a"]) == n


def counted(value: Any) -> tuple[int, int, int]:
    """Containers, strings with names, and commas that there are in a value as JSON."""
    found = (int(isinstance(value, dict | list)), int(isinstance(value, str)), 0)
    if isinstance(value, dict | list):
        parts = [*value, *value.values()] if isinstance(value, dict) else value
        for more in map(counted, parts):
            found = tuple(a + b for a, b in zip(found, more, strict=True))  # type: ignore[assignment]
        found = (*found[:2], found[2] + max(0, len(value) - 1))
    return found


def made_up(rng: random.Random, depth: int = 5) -> Any:
    """Some value, with texts that look like values."""
    kind = rng.randrange(5 if depth else 3)
    if kind < 2:
        return "".join(rng.choice('"\\[]{},:a\u20ac\n') for _ in range(rng.randrange(8)))
    if kind == 2:
        return rng.choice([0, 1.5, None, True])
    values = [made_up(rng, depth - 1) for _ in range(rng.randrange(5))]
    return values if kind == 3 else {f'{i}["{rng.random()}\\': value for i, value in enumerate(values)}


def test_what_is_counted_is_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(5)
    for name in ("MAX_CONTAINERS", "MAX_VALUES"):
        monkeypatch.setattr(strict_json, name, 0)
    for _ in range(300):
        value = [made_up(rng) for _ in range(3)]
        body = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
        n_containers, n_strings, n_commas = counted(value)
        with pytest.raises(HttpProblem, match=f"has {n_containers} arrays and objects"):
            parse_object(body)
        outside = strict_json._without_strings(body)
        assert outside.count(b",") == n_commas
        assert outside.count(b'"') == 0
        monkeypatch.setattr(strict_json, "MAX_STRINGS", n_strings - 1)
        with pytest.raises(HttpProblem, match=f"has {n_strings} strings"):
            parse_object(body)
        monkeypatch.setattr(strict_json, "MAX_STRINGS", MAX_STRINGS)


def test_a_body_of_brackets_is_refused_in_both_dialects() -> None:
    body = b'{"a":[' + b"[]," * MAX_CONTAINERS + b"[]]}"

    async def ask() -> None:
        async with client_of(app_of(Jobs())) as client:
            for path in ("/echo", "/v1/messages/fail"):
                response = await client.post(path, content=body, headers={"Content-Type": "application/json"})
                error = response.json()["error"]
                assert (response.status_code, error["type"]) == (400, "invalid_request_error")
                assert "arrays and objects" in error["message"]

    run(ask())
