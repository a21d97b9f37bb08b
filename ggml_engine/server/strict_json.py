"""JSON as a server may take it from strangers: bounded in depth and in the number of values, no names twice, finite
numbers, text that is Unicode.

Python's own parser takes `NaN`, lone surrogates and repeated names, and raises RecursionError for deep input. It holds
Python's lock for as long as it makes lists and strings, so values are counted before it is asked: by operations on
bytes, which take some milliseconds a megabyte whatever these are. What is refused raises HttpProblem 400 that says why.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any, Final, NoReturn

from ggml_engine.server.errors import HttpProblem

MAX_DEPTH: Final = 64
MAX_NAMES: Final = 16_384  # of one object: each that nobody knows is a fault of its own
MAX_CONTAINERS: Final = 1 << 16  # arrays and objects of a body
MAX_VALUES: Final = 1 << 20  # of a body; that many ids of tokens are taken by /detokenize
MAX_STRINGS: Final = 1 << 19  # of a body, names included, where there are so many brackets or commas that they count
MAX_DIGITS: Final = 4300  # of an integer: Python's own bound, which can be turned off
_SUSPECT: Final = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")  # NUL, or a half of a surrogate pair


def _refuse(message: str) -> NoReturn:
    raise HttpProblem(400, "invalid_json", message)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_NAMES:
        _refuse(f"an object has {len(pairs)} names, at most {MAX_NAMES} are read")
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for name, _ in pairs:
            if name in seen:
                _refuse(f"the name {name[:60]!r} is given twice in one object")
            seen.add(name)
    return found


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        _refuse(f"an integer has {len(text)} digits, at most {MAX_DIGITS} are read")
    return int(text)


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        _refuse(f"the number {text[:40]} is outside the range of a double")
    return value


def _constant(text: str) -> NoReturn:
    _refuse(f"{text} is no JSON")


def check_numbers(body: bytes) -> None:
    """Raise HttpProblem 400 for more values or containers than may be, before they are made.

    Of a body that is no JSON only what stands before its first fault is counted rightly: a parser comes no further.
    """
    if body.count(b"[") + body.count(b"{") <= MAX_CONTAINERS and body.count(b",") < MAX_VALUES:
        return  # whatever of them stands in strings
    outside = _without_strings(body)
    n_containers = outside.count(b"[") + outside.count(b"{")
    if n_containers > MAX_CONTAINERS:
        _refuse(f"the body has {n_containers} arrays and objects, at most {MAX_CONTAINERS} are read")
    n_values = 1 + outside.count(b",")  # at most one less for each container, and the containers themselves
    if n_values > MAX_VALUES:
        _refuse(f"the body has {n_values} values, at most {MAX_VALUES} are read")


def _without_strings(body: bytes) -> bytes:
    """What stands outside of strings. Raises HttpProblem where there are too many of these."""
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")  # what is left of a string ends it where it ended
    n_strings = body.count(b'"') // 2
    if n_strings > MAX_STRINGS:
        _refuse(f"the body has {n_strings} strings, at most {MAX_STRINGS} are read")
    return b"".join(body.split(b'"')[::2])


def parse_object(body: bytes) -> dict[str, Any]:
    """The object that a body holds. Raises HttpProblem 400."""
    check_numbers(body)
    try:
        text = body.decode("utf-8")
    except UnicodeDecodeError as error:
        _refuse(f"the body is not UTF-8: byte {error.start}")
    try:
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_constant, parse_int=_integer, parse_float=_float
        )
    except RecursionError:
        _refuse(f"the body nests deeper than {MAX_DEPTH} levels")
    except ValueError as error:
        where = f" at character {error.pos}: {error.msg}" if isinstance(error, json.JSONDecodeError) else ""
        _refuse(f"the body is no JSON{where}")
    if text.count("[") + text.count("{") > MAX_DEPTH:
        _check_depth(value)
    if _SUSPECT.search(text):
        for part in _texts(value):
            _check_text(part)
    if not isinstance(value, dict):
        _refuse(f"the body must be a JSON object, it is {_kind(value)}")
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [part for whole in level for part in _parts(whole) if isinstance(part, dict | list)]
        if not level:
            return
    _refuse(f"the body nests deeper than {MAX_DEPTH} levels")


def _parts(value: Any) -> Any:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _texts(value: Any) -> Iterator[str]:
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str):
            yield part
        elif isinstance(part, dict):
            yield from part
            waiting.extend(part.values())
        elif isinstance(part, list):
            waiting.extend(part)


def _check_text(text: str) -> None:
    if "\0" in text:
        _refuse("a string holds the character U+0000")
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        _refuse("a string holds a lone surrogate, which is no character")


def _kind(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"
