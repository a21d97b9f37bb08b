"""`JsonScanner`: follows one JSON value through a text that comes in pieces, and says where it ends.

Each character is looked at once. What comes out is JSON even where models slip: a control character inside of a string
comes out escaped. Invariant: what is consumed, and what is said of it, does not depend on where the text was cut.
"""

from __future__ import annotations

import json
import re
from typing import Final

MAX_DEPTH: Final = 64
MAX_SCALAR: Final = 512  # characters of a number: Python refuses to read integers of over 4,300 digits

_SPACE: Final = re.compile(r"[ \t\n\r]+")
_CHARACTERS: Final = re.compile(r'[^"\\\x00-\x1f]+')
_SCALAR: Final = re.compile(r"[-+.0-9A-Za-z]+")
_WHOLE_SCALAR: Final = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")

# what may come next
_VALUE: Final = "value"
_VALUE_OR_END: Final = "value or ]"
_KEY: Final = "key"
_KEY_OR_END: Final = "key or }"
_COLON: Final = "colon"
_COMMA_OR_END: Final = "comma or end"


class JsonScanner:
    """One JSON value. `is_done` once it is complete, `is_broken` once it cannot become one."""

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        self._next = _VALUE
        self._open: list[str] = []  # the closing brackets that are due
        self._string: str | None = None  # inside of a string: "" for text, a backslash, or the digits of a \\u
        self._scalar = ""

    def feed(self, text: str, at: int) -> tuple[str, int]:
        """What the characters from `at` on say, as JSON, and the index of the first one that was not consumed."""
        out: list[str] = []
        while at < len(text) and not (self.is_done or self.is_broken):
            if self._string is not None:
                at = self._in_string(text, at, out)
            elif self._scalar:
                at = self._in_scalar(text, at, out)
            elif (space := _SPACE.match(text, at)) is not None:
                out.append(space[0])
                at = space.end()
            else:
                at = self._mark(text, at, out)
        return "".join(out), at

    def finish(self) -> str:
        """At the end of the text: a number that nothing follows is complete now."""
        out: list[str] = []
        if self._scalar:
            self._end_scalar(out)
        return "".join(out)

    def _in_string(self, text: str, at: int, out: list[str]) -> int:
        if self._string:
            return self._in_escape(text[at], at, out)
        if (run := _CHARACTERS.match(text, at)) is not None:
            out.append(run[0])
            return run.end()
        character = text[at]
        if character == '"':
            out.append(character)
            self._string = None
            self._end_of_text()
        elif character == "\\":
            self._string = character
        else:
            out.append(f"\\u{ord(character):04x}")
        return at + 1

    def _in_escape(self, character: str, at: int, out: list[str]) -> int:
        escape = f"{self._string}{character}"
        if len(escape) == 2:
            self.is_broken = character not in '"\\/bfnrtu'
            is_whole = character != "u"
        else:
            self.is_broken = character not in "0123456789abcdefABCDEF"
            is_whole = len(escape) == 6
        if self.is_broken:
            return at
        self._string = escape
        if is_whole:
            out.append(escape)
            self._string = ""
        return at + 1

    def _in_scalar(self, text: str, at: int, out: list[str]) -> int:
        run = _SCALAR.match(text, at, at + MAX_SCALAR + 1 - len(self._scalar))
        if run is not None:
            self._scalar += run[0]
            at = run.end()
        if len(self._scalar) > MAX_SCALAR:
            self.is_broken = True
        elif at < len(text):
            self._end_scalar(out)
        return at

    def _end_scalar(self, out: list[str]) -> None:
        if _WHOLE_SCALAR.fullmatch(self._scalar) is None:
            self.is_broken = True
            return
        out.append(self._scalar)
        self._scalar = ""
        self._end_of_value()

    def _mark(self, text: str, at: int, out: list[str]) -> int:
        character = text[at]
        expected = self._next
        if expected in (_KEY, _KEY_OR_END) and character == '"':
            self._string = ""
        elif expected in (_VALUE, _VALUE_OR_END) and character in '{["':
            self._begin(character)
        elif expected in (_VALUE, _VALUE_OR_END) and _SCALAR.match(character):
            return self._in_scalar(text, at, out)
        elif expected == _COLON and character == ":":
            self._next = _VALUE
        elif expected == _COMMA_OR_END and character == ",":
            self._next = _KEY if self._open[-1] == "}" else _VALUE
        elif expected in (_COMMA_OR_END, _KEY_OR_END, _VALUE_OR_END) and character == self._open[-1]:
            self._open.pop()
            self._end_of_value()
        else:
            self.is_broken = True
        if self.is_broken:
            return at
        out.append(character)
        return at + 1

    def _begin(self, character: str) -> None:
        if character == '"':
            self._string = ""
            return
        self._open.append("}" if character == "{" else "]")
        self._next = _KEY_OR_END if character == "{" else _VALUE_OR_END
        self.is_broken = len(self._open) > MAX_DEPTH

    def _end_of_text(self) -> None:
        if self._next in (_KEY, _KEY_OR_END):
            self._next = _COLON
        else:
            self._end_of_value()

    def _end_of_value(self) -> None:
        self._next = _COMMA_OR_END
        self.is_done = not self._open


def is_json_object(text: str) -> bool:
    """Whether the text is one JSON object, with nothing but space around it."""
    scanner = JsonScanner()
    _, end = scanner.feed(text, 0)
    return scanner.is_done and text.lstrip(" \t\n\r").startswith("{") and not text[end:].strip(" \t\n\r")


def is_encodable(text: str) -> bool:
    """Whether what the JSON says can be written again: no half of a surrogate pair, and no number beyond a double."""
    try:
        json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False).encode()
    except ValueError:
        return False
    return True
