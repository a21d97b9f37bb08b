"""Mistral's calls: `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]` and `[TOOL_CALLS]NAME[ARGS]{...}`.

The newer form may have `[CALL_ID]` and an id before `[ARGS]`; each call has a `[TOOL_CALLS]` of its own. Ids that the
model writes are not taken over: the parser gives ids of the same form.
"""

from __future__ import annotations

import re
from typing import Final

from .parser import ReplyParser
from .reader import MalformedError, Marks, Reading

TOOL_CALLS: Final = "[TOOL_CALLS]"
ARGS: Final = "[ARGS]"
CALL_ID: Final = "[CALL_ID]"
_BEGINS: Final = Marks(TOOL_CALLS)
_NAME: Final = re.compile(r"[\w.-]+")


class MistralParser(ReplyParser):
    """Reads both forms, whichever of them the model was taught."""

    def body(self) -> Reading[None]:
        """`[TOOL_CALLS]` begins a call, or a list of them."""
        while (mark := (yield from self.pass_text(_BEGINS, self.content))) is not None:
            begin = mark + (yield from self.skip_space())
            if (yield from self.take("[")) is not None:
                yield from self._read_list(begin + "[")
            elif (yield from self.take("{")) is not None:
                yield from self.attempt(self.read_call(), begin + "{")
            else:
                yield from self.attempt(self._read_named(), begin)

    def _read_list(self, begin: str) -> Reading[None]:
        while True:
            begin += yield from self.skip_space()
            if (yield from self.take("{")) is None:
                self.content(begin)
                return
            if not (yield from self.attempt(self.read_call(), begin + "{")):
                return
            yield from self.skip_space()
            if (yield from self.take(",", "]")) != ",":
                return
            begin = ","

    def _read_named(self) -> Reading[None]:
        name = yield from self.take_run(_NAME, 256)
        if (yield from self.take(CALL_ID)) is not None:
            yield from self.take_run(_NAME, 256)
        yield from self.take(ARGS)
        yield from self.skip_space()
        self.begin_call(name)
        if (yield from self.peek()) != "{":
            raise MalformedError
        yield from self.pass_json(self.put_arguments)
        self.end_call()
