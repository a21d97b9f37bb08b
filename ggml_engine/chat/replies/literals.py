"""Values that are no JSON, read as JSON: Python's, and Gemma's, whose texts stand between marks of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from .json_scan import MAX_DEPTH, MAX_SCALAR, JsonScanner
from .reader import MalformedError, Marks, Reader, Reading

Put = Callable[[str], None]

_KEY: Final = re.compile(r"[^:{}\[\]\s\"',]+")
_SCALAR: Final = re.compile(r"[-+.\w]+")
_IDENTIFIER: Final = re.compile(r"\w+")
_HEXADECIMAL: Final = re.compile(r"[0-9A-Fa-f]+")
_MAX_KEY: Final = 256
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\\": "\\", "'": "'", '"': '"', "\n": ""}
_CODES: Final = {"x": 2, "u": 4, "U": 8}
_CONSTANTS: Final = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True, slots=True)
class Literals:
    """How values are spelled: what texts stand between, and whether a backslash escapes in them."""

    quotes: tuple[str, ...]
    has_escapes: bool

    def read(self, reader: Reader, put: Put) -> Reading[None]:
        """One value, handed on as JSON as it comes."""
        open_brackets: list[str] = []
        while True:
            yield from reader.skip_space()
            taken = yield from reader.take("{", "[", *self.quotes)
            if taken is None:
                yield from _read_scalar(reader, put)
            elif taken in self.quotes:
                yield from self._read_text(reader, put, taken)
            else:
                open_brackets.append("}" if taken == "{" else "]")
                if len(open_brackets) > MAX_DEPTH:
                    raise MalformedError
                put(taken)
                yield from reader.skip_space()
                if (yield from reader.take(open_brackets[-1])) is None:
                    yield from self._read_key(reader, put, open_brackets[-1])
                    continue
                put(open_brackets.pop())
            while open_brackets:
                yield from reader.skip_space()
                mark = yield from reader.expect(",", open_brackets[-1])
                put(mark)
                if mark == ",":
                    yield from self._read_key(reader, put, open_brackets[-1])
                    break
                open_brackets.pop()
            else:
                return

    def read_keywords(self, reader: Reader, put: Put) -> Reading[None]:
        """`key=value, ...)`, as the arguments of a call in Python, handed on as one JSON object."""
        put("{")
        yield from reader.skip_space()
        mark = yield from reader.take(")")
        while mark != ")":
            yield from reader.skip_space()
            key = yield from reader.take_run(_IDENTIFIER, _MAX_KEY)
            yield from reader.skip_space()
            yield from reader.expect("=")
            if not key:
                raise MalformedError
            put(f"{json.dumps(key, ensure_ascii=False)}: ")
            yield from self.read(reader, put)
            yield from reader.skip_space()
            mark = yield from reader.expect(",", ")")
            if mark == ",":
                put(", ")
        put("}")

    def _read_key(self, reader: Reader, put: Put, bracket: str) -> Reading[None]:
        if bracket != "}":
            return
        yield from reader.skip_space()
        quote = yield from reader.take(*self.quotes)
        if quote is not None:
            yield from self._read_text(reader, put, quote)
        else:
            key = yield from reader.take_run(_KEY, _MAX_KEY)
            if not key or self.has_escapes:  # Python's keys are texts
                raise MalformedError
            put(json.dumps(key, ensure_ascii=False))
        yield from reader.skip_space()
        yield from reader.expect(":")
        put(":")

    def _read_text(self, reader: Reader, put: Put, quote: str) -> Reading[None]:
        marks = Marks(quote, "\\") if self.has_escapes else Marks(quote)

        def put_text(text: str) -> None:
            if text:
                put(json.dumps(text, ensure_ascii=False)[1:-1])

        put('"')
        while (mark := (yield from reader.pass_text(marks, put_text))) != quote:
            if mark is None:
                raise MalformedError
            put_text((yield from _read_escape(reader)))
        put('"')


PYTHON: Final = Literals(quotes=('"', "'"), has_escapes=True)


def _read_scalar(reader: Reader, put: Put) -> Reading[None]:
    text = yield from reader.take_run(_SCALAR, MAX_SCALAR)
    text = _CONSTANTS.get(text, text)
    scanner = JsonScanner()
    out, _ = scanner.feed(text, 0)
    out += scanner.finish()
    if not scanner.is_done:
        raise MalformedError
    put(out)


def _read_escape(reader: Reader) -> Reading[str]:
    character = yield from reader.peek()
    if character in _CODES:
        yield from reader.expect(character)
        digits = ""
        while len(digits) < _CODES[character]:
            digit = yield from reader.peek()
            if _HEXADECIMAL.fullmatch(digit) is None:
                raise MalformedError
            digits += yield from reader.expect(digit)
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise MalformedError
        return chr(code)
    if character in _ESCAPES:
        return _ESCAPES[(yield from reader.expect(character))]
    return "\\"
