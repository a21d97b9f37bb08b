"""The operations that a chat template may use, each asking the meter before it runs.

String methods and filters that are not here do not exist for a template: what can be bounded is bounded, the rest is
refused (printf formatting, `center`, `zfill`, `batch`, `urlize`, ...). Results keep the marks of `Text` where the
operation only cuts, joins or replaces; every other result is a plain string, which nobody trusts. Knows nothing of
templates and of how they name these.
"""

from __future__ import annotations

import json
import operator
import re
from collections.abc import Callable, Iterable
from datetime import datetime
from string import Formatter
from typing import Any

from jinja2.runtime import Undefined

from ggml_engine.errors import ChatTemplateError

from .limits import CHARS_PER_WORK, MAX_INT_BITS, Meter, Stream
from .text import joined, ranges_of, stripped

_MAX_REPEAT = 64  # widths of indentation and of padding
# What str.splitlines cuts at.
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
# CPython's size of a short string, and of the list slot that holds it.
_STR_BYTES = 80


def refuse(what: str) -> ChatTemplateError:
    """The error for an operation that a template may not use."""
    return ChatTemplateError(f"the chat template uses {what}, which is not allowed")


def checked(value: Any) -> Any:
    """`value`, unless it is an integer too wide for any use in a prompt."""
    if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        raise ChatTemplateError(f"the chat template computes an integer of {value.bit_length()} bits")
    return value


# --- text


def as_text(meter: Meter, value: Any) -> str:
    """What `{{ value }}` prints. Only plain values can be printed; a container is measured before."""
    if isinstance(value, str):
        return value
    if isinstance(value, (list, tuple, dict, range)):
        size = meter.weigh(value)
        _only_plain(value)
        # repr writes at most 10 characters for one (\\U0010ffff), and quotes, commas, "Undefined" around each value.
        meter.allot(size.n_chars * 10 + size.n_values * 100)
        text = str(value)
        meter.new_text(len(text), text)
        return text
    if isinstance(value, Stream) or _is_opaque(value):
        raise refuse(f"the text of a {type(value).__name__}")
    return str(value)


def _is_opaque(value: Any) -> bool:
    return not (value is None or isinstance(value, (bool, int, float, Undefined)))


def _only_plain(value: Any) -> None:
    level = [value]
    while level:
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below += [*each.keys(), *each.values()]
            elif isinstance(each, (list, tuple)):
                below += each
            elif not isinstance(each, (str, range)) and _is_opaque(each):
                raise refuse(f"the text of a {type(each).__name__}")
        level = below


def concatenated(meter: Meter, values: Iterable[Any]) -> str:
    """The texts of `values` in a row, marks kept."""
    pieces = [as_text(meter, value) for value in values]
    n_ranges = sum(len(ranges_of(piece)) for piece in pieces)
    meter.new_list(len(pieces) + n_ranges, 80)
    meter.new_text(sum(map(len, pieces)), *pieces)
    return joined(pieces)


def join(meter: Meter, separator: str, items: Iterable[Any], *, convert: bool = False) -> str:
    """`separator.join(items)`; with `convert`, items that are no text are printed, as the filter does."""
    meter.weigh(items)
    pieces: list[Any] = []
    for item in items:
        if pieces:
            pieces.append(separator)
        if not (convert or isinstance(item, str)):
            raise TypeError(f"join needs texts, not {type(item).__name__}")
        pieces.append(item)
    return concatenated(meter, pieces)


def strip(meter: Meter, text: str, chars: str | None = None) -> str:
    return _strip(meter, text, chars, str.strip)


def lstrip(meter: Meter, text: str, chars: str | None = None) -> str:
    return _strip(meter, text, chars, str.lstrip)


def rstrip(meter: Meter, text: str, chars: str | None = None) -> str:
    return _strip(meter, text, chars, str.rstrip)


def _strip(meter: Meter, text: str, chars: str | None, strip_ends: Callable[[str, str | None], str]) -> str:
    _bounded(len(chars or ""), "strip")  # each character is looked up among these, one by one
    meter.new_text(len(text), text)
    return stripped(text, lambda each: strip_ends(each, chars))


def removeprefix(meter: Meter, text: str, prefix: str) -> str:
    meter.new_text(len(text), text)
    return text[len(prefix) :] if text.startswith(prefix) else text


def removesuffix(meter: Meter, text: str, suffix: str) -> str:
    meter.new_text(len(text), text)
    return text[: len(text) - len(suffix)] if suffix and text.endswith(suffix) else text


def replace(meter: Meter, text: str, old: str, new: str, count: int | None = -1) -> str:
    meter.spend(1 + len(text) // 32)
    n_found = text.count(old)
    if count is not None and count >= 0:
        n_found = min(n_found, count)
    meter.new_text(len(text) + n_found * (len(new) - len(old)), text, new)
    if not (old and n_found and (ranges_of(text) or ranges_of(new))):
        return text.replace(old, new, n_found)
    meter.new_list(2 * n_found + 1, _STR_BYTES)
    pieces: list[str] = []
    position = 0
    for _ in range(n_found):
        found = text.index(old, position)
        pieces += (text[position:found], new)
        position = found + len(old)
    pieces.append(text[position:])
    return concatenated(meter, pieces)


def split(meter: Meter, text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
    return _split(meter, text, sep, maxsplit, text.split)


def rsplit(meter: Meter, text: str, sep: str | None = None, maxsplit: int = -1) -> list[str]:
    _pay_for_backward_search(meter, text, sep or "")
    return _split(meter, text, sep, maxsplit, text.rsplit)


def _split(meter: Meter, text: str, sep: str | None, maxsplit: int, cut: Callable[..., list[str]]) -> list[str]:
    meter.new_text(len(text), text)
    n_pieces = len(text) // 2 + 1 if sep is None else text.count(sep) + 1
    meter.new_list(min(n_pieces, maxsplit + 1) if maxsplit >= 0 else n_pieces, _STR_BYTES)
    return cut(sep, maxsplit)


def _pay_for_backward_search(meter: Meter, text: str, sub: str) -> None:
    # Unlike the forward one, CPython's backward search takes the product of the lengths at worst.
    meter.spend(1 + len(text) * len(sub) // (2 * CHARS_PER_WORK))


def splitlines(meter: Meter, text: str, keepends: bool = False) -> list[str]:
    meter.new_text(len(text), text)
    meter.new_list(_count_lines(text), _STR_BYTES)
    return text.splitlines(bool(keepends))


def _count_lines(text: str) -> int:
    return 1 + sum(text.count(end) for end in _LINE_ENDS)


def repeat(meter: Meter, value: Any, times: int) -> Any:
    """`value * times` of a string, list or tuple."""
    times = max(times, 0)
    if isinstance(value, str):
        meter.new_text(len(value) * times, value)
    else:
        meter.new_list(len(value) * times)
    return value * times


def indent(meter: Meter, value: Any, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Every line but the first moved right, as Jinja's filter of this name does it."""
    text = as_text(meter, value)
    prefix = width if isinstance(width, str) else " " * _bounded(width, "indent")
    _bounded(len(prefix), "indent")
    n_lines = _count_lines(text)
    meter.new_list(n_lines, _STR_BYTES)
    meter.new_text(len(text) + n_lines * len(prefix), text, prefix)
    lines = text.splitlines() or [""]
    head = (prefix if first else "") + lines[0]
    return "\n".join([head, *(prefix + line if blank or line else line for line in lines[1:])])


def _bounded(width: Any, what: str) -> int:
    if not isinstance(width, int) or not 0 <= width <= _MAX_REPEAT:
        raise ChatTemplateError(
            f"the chat template asks {what} for a length of {width!r:.20}, the limit is {_MAX_REPEAT}"
        )
    return width


def format_text(meter: Meter, template: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """`template.format(...)` with plain fields only: no attributes, no conversions, short specifications."""
    texts = {id(value): as_text(meter, value) for value in (*args, *kwargs.values())}
    meter.new_list(len(template), _STR_BYTES)
    pieces: list[str] = []
    numbering = iter(range(len(args)))
    for literal, field, spec, conversion in Formatter().parse(template):
        pieces.append(literal)
        if field is None:
            continue
        if conversion or not re.fullmatch(r"\w*", field) or not re.fullmatch(r"[^{}]{0,8}", spec or ""):
            raise refuse(f"the format field {{{field:.20}}}")
        if any(int(digits) > _MAX_REPEAT for digits in re.findall(r"\d+", spec or "")):
            raise refuse(f"the format {spec!r}")
        key = field or str(next(numbering, len(args)))
        value = args[int(key)] if key.isdigit() else kwargs[key]
        pieces.append(format(value, spec) if spec else texts[id(value)])
    return "".join(concatenated(meter, pieces))


def _walking(name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    """A method whose cost and result are no larger than the text and the arguments."""

    def method(meter: Meter, text: str, *args: Any) -> Any:
        # Upper and title case make up to three characters of one.
        meter.new_text(len(text) * (3 if name in {"upper", "title", "capitalize", "lower", "casefold"} else 1), text)
        if name in {"rfind", "rindex", "rpartition"} and args and isinstance(args[0], str):
            _pay_for_backward_search(meter, text, args[0])
        return plain(text, *args)

    return method


STRING_METHODS: dict[str, Callable[..., Any]] = {
    "strip": strip,
    "lstrip": lstrip,
    "rstrip": rstrip,
    "removeprefix": removeprefix,
    "removesuffix": removesuffix,
    "replace": replace,
    "split": split,
    "rsplit": rsplit,
    "splitlines": splitlines,
    "join": join,
    **{
        name: _walking(name, getattr(str, name))
        for name in (
            *("upper", "lower", "title", "capitalize", "casefold", "startswith", "endswith", "find", "rfind", "index"),
            *("rindex", "count", "partition", "rpartition", "isdigit", "isdecimal", "isnumeric", "isalpha", "isalnum"),
            *("isspace", "isupper", "islower", "istitle", "isascii"),
        )
    },
}
CONTAINER_METHODS: dict[type, frozenset[str]] = {
    dict: frozenset({"get", "items", "keys", "values", "copy"}),
    list: frozenset({"index", "count", "copy"}),
    tuple: frozenset({"index", "count"}),
}


# --- operators


def add(meter: Meter, left: Any, right: Any) -> Any:
    if isinstance(left, str) and isinstance(right, str):
        return concatenated(meter, (left, right))
    if isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        meter.new_list(len(left) + len(right))
    return checked(operator.add(left, right))


def multiply(meter: Meter, left: Any, right: Any) -> Any:
    if isinstance(left, (str, list, tuple)) and isinstance(right, int):
        return repeat(meter, left, right)
    if isinstance(right, (str, list, tuple)) and isinstance(left, int):
        return repeat(meter, right, left)
    return checked(operator.mul(left, right))


def power(_meter: Meter, left: Any, right: Any) -> Any:
    if isinstance(left, int) and isinstance(right, int) and right > 0 and left.bit_length() * right > MAX_INT_BITS + 1:
        raise ChatTemplateError(f"the chat template computes an integer of about {left.bit_length() * right} bits")
    return checked(operator.pow(left, right))


def modulo(_meter: Meter, left: Any, right: Any) -> Any:
    if isinstance(left, (str, bytes)):
        raise refuse("printf formatting (text % value)")
    return operator.mod(left, right)


BINARY: dict[str, Callable[[Meter, Any, Any], Any]] = {
    "+": add,
    "*": multiply,
    "**": power,
    "%": modulo,
    "-": lambda _meter, left, right: checked(operator.sub(left, right)),
    "/": lambda _meter, left, right: operator.truediv(left, right),
    "//": lambda _meter, left, right: checked(operator.floordiv(left, right)),
}


def sliced(meter: Meter, value: Any, start: Any, stop: Any, step: Any) -> Any:
    """`value[start:stop:step]`."""
    if isinstance(value, str):
        meter.new_text(len(value), value)
        meter.new_list(len(ranges_of(value)), 80)
    elif isinstance(value, (list, tuple)):
        meter.new_list(len(value))
    return value[start:stop:step]


# --- filters


def to_json(
    meter: Meter,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """`json.dumps` with the defaults that chat templates expect (Hugging Face's: not the HTML-safe Jinja ones)."""
    size = meter.weigh(value)
    width = 0
    if indent is not None:
        width = _bounded(len(indent) if isinstance(indent, str) else indent, "tojson")
    if separators is not None and sum(map(len, separators)) > _MAX_REPEAT:
        raise refuse("tojson with long separators")
    # \u0000 is the longest escape, 12 characters for one outside the basic plane.
    meter.allot(size.n_chars * (12 if ensure_ascii else 6) + size.n_values * (100 + 2 * width * size.depth))
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    meter.new_text(len(text), text)
    return text


def rounded(_meter: Meter, value: Any, precision: int = 0, method: str = "common") -> float:
    if not isinstance(precision, int) or abs(precision) > 20:
        raise ChatTemplateError(f"the chat template rounds to {precision!r:.20} digits, -20 to 20 are allowed")
    if method == "common":
        return round(float(value), precision)
    scaled = float(value) * 10.0**precision
    whole = {"ceil": -(-scaled // 1), "floor": scaled // 1}.get(method)
    if whole is None:
        raise ChatTemplateError(f"the chat template rounds by {method!r:.20}: common, ceil or floor is meant")
    return float(whole / 10.0**precision)


def total(meter: Meter, values: Iterable[Any], attribute: str | int | None = None, start: Any = 0) -> Any:
    """The sum of numbers (of their `attribute`, where one is named)."""
    meter.weigh(values)
    result = start
    for value in values:
        number = value[attribute] if attribute is not None else value
        if not isinstance(number, (int, float)) or not isinstance(result, (int, float)):
            raise TypeError(f"sum adds numbers, not {type(number).__name__}")
        result = checked(result + number)
    return result


def is_multiple(value: Any, divisor: Any) -> bool:
    if isinstance(value, str):
        raise TypeError("a text is neither odd nor even")
    return bool(value % divisor == 0)


# --- functions


def bounded_range(*args: int) -> range:
    """`range`, of at most 100,000 numbers."""
    numbers = range(*args)
    if numbers.__len__() > 100_000:
        raise OverflowError(f"a range of {len(numbers)} numbers, the limit is 100000")
    return numbers


def formatted_time(now: Callable[[], datetime], pattern: str) -> str:
    """`now().strftime(pattern)`; the pattern may hold single-letter directives only."""
    if len(pattern) > 200 or re.search(r"%(?![-A-Za-z%])|%-?[^A-Za-z%-]|\0", pattern):
        raise refuse(f"the time format {pattern!r:.40}")
    return now().strftime(pattern)
