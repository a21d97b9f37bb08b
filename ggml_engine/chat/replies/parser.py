"""`ReplyParser`: from the text of a reply, as it comes, to its parts. What all formats share; each is a subclass.

Content and reasoning come without the space that only stands between them and markup. A call that turns out not to be
one is given back as text (`attempt`), so that nothing the model wrote is lost.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Collection, Sequence

from .json_scan import is_encodable, is_json_object
from .parts import ContentPart, ReasoningPart, ReplyPart, ToolCallArguments, ToolCallBegin, ToolCallEnd
from .reader import MalformedError, Marks, Reader, Reading

_ID_CHARACTERS = string.ascii_letters + string.digits
_NAME_KEYS = frozenset(("name",))
_ARGUMENT_KEYS = frozenset(("arguments", "parameters"))


def random_id(prefix: str, n_characters: int) -> str:
    """An id for a call: the prefix and so many random letters and digits."""
    return prefix + "".join(secrets.choice(_ID_CHARACTERS) for _ in range(n_characters))


class ReplyParser(Reader):
    """Reads one reply. `tool_names` are the tools that may be called; a call of any other name is text.

    `reasoning` has the marks around the model's thoughts, at the beginning of the reply; None leaves them in the
    content. `is_open`: the prompt has the opening mark already. Not for use by two threads at once.
    """

    def __init__(
        self,
        tool_names: Collection[str] = (),
        *,
        reasoning: tuple[str, str] | None = None,
        is_open: bool = False,
        new_id: Callable[[], str] = lambda: random_id("call_", 24),
    ) -> None:
        super().__init__()
        self.tool_names = frozenset(tool_names)
        self._reasoning = reasoning
        self._is_open = is_open
        self._new_id = new_id
        self._parts: list[ReplyPart] = []
        self._space: list[str] = []  # held back: it may stand before markup
        self._drops_space = False
        self._n_calls = 0
        self._call: _Call | None = None
        self._story = self._run()
        next(self._story)

    def feed(self, text: str) -> list[ReplyPart]:
        """What is certain after this piece: markup, and what may become markup, is not among it."""
        if text:
            self._add(text)
            next(self._story)
        return self._taken()

    def finish(self) -> list[ReplyPart]:
        """The rest, at the end of the reply."""
        self._has_ended = True
        for _ in self._story:
            raise AssertionError("a reply's reading waits at the end of the reply")
        if not self._drops_space:
            self._put(ContentPart("".join(self._space)))
        self._space = []
        return self._taken()

    def body(self) -> Reading[None]:
        """What follows the reasoning, to the end of the text."""
        yield from self.pass_text(Marks(), self.content)

    def _run(self) -> Reading[None]:
        yield
        if self._reasoning is not None:
            yield from self._read_reasoning(*self._reasoning)
        yield from self.body()

    def _read_reasoning(self, begin: str, end: str) -> Reading[None]:
        if not self._is_open:
            space = yield from self.skip_space()
            if (yield from self.take(begin)) is None:
                self.content(space)
                return
        self._drops_space = True
        yield from self.pass_text(Marks(end), self.reason)
        self.end_reasoning()

    # ---- parts ----

    def content(self, text: str) -> None:
        """A piece of the answer."""
        self._put_words(ContentPart, text)

    def reason(self, text: str) -> None:
        """A piece of the reasoning."""
        self._put_words(ReasoningPart, text)

    def end_reasoning(self) -> None:
        """The space around the reasoning belongs to its markup."""
        self._space = []
        self._drops_space = True

    def _put_words(self, kind: type[ContentPart] | type[ReasoningPart], text: str) -> None:
        words = text.rstrip()
        if words:
            space = "" if self._drops_space else "".join(self._space)
            self._put(kind(space + (words.lstrip() if self._drops_space else words)))
            self._drops_space = False
            self._space = []
        self._space.append(text[len(words) :])

    def _put(self, part: ReplyPart) -> None:
        if not (isinstance(part, (ContentPart, ReasoningPart)) and not part.text):
            self._parts.append(part)

    def _taken(self) -> list[ReplyPart]:
        taken, self._parts = self._parts, []
        return taken

    # ---- calls ----

    def attempt(self, reading: Reading[None], mark: str = "") -> Reading[bool]:
        """Reads a call that `mark` began and says whether it is one; else what was read of it is text."""
        held = [] if self._drops_space else self._space
        self._raw = [*held, mark]
        self._space = []
        try:
            yield from reading
        except MalformedError:
            raw = "".join(self._raw or ())
            call, self._call, self._raw = self._call, None, None
            if call is not None and call.has_begun:
                self._put(ToolCallEnd(call.index, raw))
                self._drops_space = False
            else:
                self.content(raw)
            return False
        self._raw = None
        return True

    def begin_call(self, name: str) -> None:
        """A call of this tool; its arguments are still to come. MalformedError for a tool that was not given."""
        if name not in self.tool_names:
            raise MalformedError
        self._call = _Call(self._n_calls, name)

    def put_arguments(self, text: str) -> None:
        """A piece of the arguments."""
        call = self._call
        if call is None:
            raise MalformedError
        if not call.has_begun:
            call.has_begun = True
            self._n_calls += 1
            self._put(ToolCallBegin(call.index, self._new_id(), call.name))
        if text:
            call.arguments.append(text)
            self._put(ToolCallArguments(call.index, text))

    def end_call(self) -> None:
        """The call is complete; what follows it is no part of it. MalformedError for what JSON cannot hold."""
        if self._call is not None:
            if not is_encodable("".join(self._call.arguments)):
                raise MalformedError
            self._put(ToolCallEnd(self._call.index))
        self._call = None
        self._raw = None
        self._drops_space = True

    def read_call(self, keys: Collection[str] | None = None) -> Reading[None]:
        """An object with the call's name and arguments, its `{` already read.

        `keys` are those that it may have besides; None for any.
        """
        has_name = False
        held: list[str] | None = None  # arguments that came before the name
        separator = yield from self._next_key("}")
        while separator != "}":
            key = yield from self.json_text()
            yield from self.skip_space()
            yield from self.expect(":")
            yield from self.skip_space()
            if key in _NAME_KEYS:
                if has_name:
                    raise MalformedError
                self.begin_call((yield from self.json_text()))
                has_name = True
                if held is not None:
                    self.put_arguments("".join(held))
            elif key in _ARGUMENT_KEYS:
                if held is not None:
                    raise MalformedError
                held = []
                yield from self._read_arguments(self.put_arguments if has_name else held.append)
            elif keys is not None and key not in keys:
                raise MalformedError
            else:
                yield from self.pass_json(lambda _: None)
            separator = yield from self._next_key()
        if not has_name:
            raise MalformedError
        if held is None:
            self.put_arguments("{}")
        self.end_call()

    def _next_key(self, *closing: str) -> Reading[str]:
        """Goes to the next key, or over the bracket that ends the object."""
        yield from self.skip_space()
        if closing:
            return (yield from self.take(*closing)) or ","
        separator = yield from self.expect(",", "}")
        if separator == ",":
            yield from self.skip_space()
        return separator

    def _read_arguments(self, put: Callable[[str], None]) -> Reading[None]:
        """An object as it comes; the text of one as a JSON string, or null, when it is complete."""
        start = yield from self.peek()
        if start == "{":
            yield from self.pass_json(put)
        elif start == '"':
            text = yield from self.json_text()
            if not (is_json_object(text) and is_encodable(text)):  # the text may have halves of surrogates as they are
                raise MalformedError
            put(text)
        else:
            yield from self.expect("null")
            put("{}")


class _Call:
    """A call that is being read."""

    __slots__ = ("arguments", "has_begun", "index", "name")

    def __init__(self, index: int, name: str) -> None:
        self.index = index
        self.name = name
        self.has_begun = False
        self.arguments: list[str] = []


def parse_reply(parser: ReplyParser, pieces: Sequence[str]) -> list[ReplyPart]:
    """All parts of a reply."""
    return [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
