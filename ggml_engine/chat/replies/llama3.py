"""Llama 3's calls: `{"name": ..., "parameters": {...}}` as the whole reply, several with `;` between.

`<|python_tag|>` may stand before, and begins a call anywhere else; `<|python_tag|>NAME.call(key="value")` is the form
of the tools that the models know by themselves.
"""

from __future__ import annotations

import re
from typing import Final

from .literals import PYTHON
from .parser import ReplyParser
from .reader import Marks, Reading

PYTHON_TAG: Final = "<|python_tag|>"
# a reply that is JSON without being a call shows at its first other key
KEYS: Final = frozenset(("type", "id"))
_BEGINS: Final = Marks(PYTHON_TAG)
_NAME: Final = re.compile(r"[\w-]+")


class Llama3Parser(ReplyParser):
    """Reads calls at the beginning of the reply, and behind `<|python_tag|>`."""

    def body(self) -> Reading[None]:
        """A bare call counts at the beginning only."""
        self.content((yield from self.skip_space()))
        if self.tool_names and (yield from self.take("{")) is not None:
            yield from self._read_calls("{")
        while (mark := (yield from self.pass_text(_BEGINS, self.content))) is not None:
            space = yield from self.skip_space()
            if (yield from self.take("{")) is not None:
                yield from self._read_calls(mark + space + "{")
            else:
                yield from self.attempt(self._read_known(), mark + space)

    def _read_calls(self, begin: str) -> Reading[None]:
        while (yield from self.attempt(self.read_call(KEYS), begin)):
            yield from self.skip_space()
            if (yield from self.take(";")) is None:
                return
            begin = ";" + (yield from self.skip_space())
            if (yield from self.take("{")) is None:
                self.content(begin)
                return
            begin += "{"

    def _read_known(self) -> Reading[None]:
        name = yield from self.take_run(_NAME, 256)
        yield from self.expect(".call(")
        self.begin_call(name)
        yield from PYTHON.read_keywords(self, self.put_arguments)
        self.end_call()
