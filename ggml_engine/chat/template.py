"""`ChatTemplate`: a model file's own template, rendered to a prompt.

Owns what goes in (plain values, copied and checked) and what comes out (a text, or segments that say where control
tokens may be read). A bad template never stops a file from loading: it is compiled at its first use, and the
`ChatTemplateError` of that says why. Jinja is imported then, too. One rendering at a time per template; any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any

from ggml_engine.errors import ChatTemplateError, InputError

from .limits import MAX_INT_BITS, Limits, Meter
from .text import Segment, authored, segments

if TYPE_CHECKING:
    from jinja2 import Template

    from .sandbox import Sandbox

METADATA_KEY = "tokenizer.chat_template"
_MAX_INPUT_DEPTH = 64
_MAX_MESSAGE_CHARS = 400


class ChatTemplate:
    """A chat template in Jinja, as GGUF files hold one under `tokenizer.chat_template`.

    `bos_token` and `eos_token` are the texts of these tokens, for templates that print them. `now` is the clock that
    a template reads through `strftime_now`. Never raises at construction, whatever the source.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str = "",
        eos_token: str = "",
        limits: Limits | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source = source
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._limits = limits or Limits()
        self._now = now
        self._lock = threading.Lock()
        self._compiled: tuple[Sandbox, Template] | None = None
        self._fault: str | None = None
        self._variables: frozenset[str] | None = None

    @classmethod
    def from_metadata(
        cls, metadata: Mapping[str, object], *, model_name: str, bos_token: str = "", eos_token: str = ""
    ) -> ChatTemplate:
        """The template in a GGUF file's metadata; raises ChatTemplateError when it holds none.

        `model_name` names the file in that message.
        """
        source = metadata.get(METADATA_KEY)
        if source is None:
            raise ChatTemplateError(f"{model_name} has no chat template ({METADATA_KEY}): give it a raw prompt instead")
        if not isinstance(source, str):
            raise ChatTemplateError(f"{model_name}: {METADATA_KEY} is a {type(source).__name__}, not a text")
        return cls(source, bos_token=bos_token, eos_token=eos_token)

    def render(
        self, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool = True, **variables: object
    ) -> str:
        """The prompt for a conversation.

        A message is a mapping with `role` and `content` (a text, a list of parts, or None), and whatever else the
        template knows, such as `tool_calls`. `variables` reach the template as they are named: `tools`, `documents`,
        `enable_thinking`, ... Raises ChatTemplateError when the template is unusable, too expensive, or refuses the
        conversation (then with its own message), and InputError for a value that is not plain data.
        """
        return "".join((self._render(messages, add_generation_prompt, variables),))

    def render_segments(
        self,
        messages: Sequence[Mapping[str, object]],
        special_tokens: Iterable[str],
        *,
        add_generation_prompt: bool = True,
        **variables: object,
    ) -> list[Segment]:
        """The prompt, cut so that a control token can only come from the template itself.

        `special_tokens` are the texts of the vocabulary's control tokens. Where a message, a role or any other given
        value spells one, wholly or in part, that stretch is a segment with `parse_special` False; all else is in
        segments with `parse_special` True. The texts of the segments in a row are what `render` returns. Raises as
        `render`.
        """
        return segments(self._render(messages, add_generation_prompt, variables), special_tokens)

    def check(self) -> None:
        """Compiles the template now; raises ChatTemplateError when it cannot be used."""
        with self._lock:
            self._compile()

    @property
    def variables(self) -> frozenset[str]:
        """The names that the template reads and that rendering may be given, `messages` and such among them.

        Raises ChatTemplateError when the template cannot be used.
        """
        with self._lock:
            if self._variables is None:
                environment, _ = self._compile()
                try:
                    self._variables = environment.variables_of(self.source)
                except Exception as error:
                    raise ChatTemplateError(_explained(error, None)) from error
            return self._variables

    def _render(
        self, messages: Sequence[Mapping[str, object]], add_generation_prompt: bool, variables: Mapping[str, object]
    ) -> str:
        given: dict[str, Any] = {name: plain(value, name) for name, value in variables.items()}
        given["messages"] = plain(messages, "messages")
        given["add_generation_prompt"] = bool(add_generation_prompt)
        given |= {name: authored(token) for name, token in self._tokens.items()}
        with self._lock:
            environment, template = self._compile()
            environment.meter = Meter(self._limits)
            try:
                return environment.concat(self._pieces(template, given))
            except ChatTemplateError:
                raise
            except Exception as error:
                raise ChatTemplateError(_explained(error, template)) from error

    def _pieces(self, template: Template, given: dict[str, Any]) -> Iterator[str]:
        """The output piece by piece, as long as it is within the limit."""
        n_chars = 0
        for piece in template.root_render_func(template.new_context(given)):
            n_chars += len(piece)
            if n_chars > self._limits.n_chars:
                raise ChatTemplateError(f"the chat template's output is longer than {self._limits.n_chars} characters")
            yield piece

    def _compile(self) -> tuple[Sandbox, Template]:
        if self._fault is not None:
            raise ChatTemplateError(self._fault)
        if self._compiled is None:
            try:
                self._compiled = _compiled(self.source, self._limits, self._now)
            except ChatTemplateError as error:
                self._fault = str(error)
                raise
        return self._compiled


def _compiled(source: str, limits: Limits, now: Callable[[], datetime]) -> tuple[Sandbox, Template]:
    if len(source) > limits.source_bytes or len(source.encode(errors="replace")) > limits.source_bytes:
        raise ChatTemplateError(
            f"the chat template has {len(source)} characters, the limit is {limits.source_bytes} bytes"
        )
    # Here, because importing Jinja costs more than the rest of this package together, and not every run needs it.
    from .sandbox import Sandbox  # noqa: PLC0415

    try:
        environment = Sandbox(limits, now)
        return environment, environment.compile_template(source)
    except ChatTemplateError:
        raise
    except Exception as error:  # a hostile source makes the parser or CPython's compiler raise nearly anything
        raise ChatTemplateError(_explained(error, None)) from error


def _explained(error: Exception, template: Template | None) -> str:
    """One line that says what went wrong, and in which line of the template."""
    from .sandbox import TemplateRaisedError  # noqa: PLC0415 - as above

    message = " ".join(str(error).split())
    if len(message) > _MAX_MESSAGE_CHARS:
        message = message[:_MAX_MESSAGE_CHARS] + "..."
    if isinstance(error, TemplateRaisedError):
        return f"the chat template refuses the conversation: {message}"
    if isinstance(error, (RecursionError, MemoryError)):
        return f"the chat template nests too deeply or is too large ({type(error).__name__})"
    line = getattr(error, "lineno", None) if template is None else _line_of(error, template)
    where = f" at line {line}" if line else ""
    verb = "cannot be compiled" if template is None else "failed"
    return f"the chat template {verb}{where}: {message or type(error).__name__}"


def _line_of(error: Exception, template: Template) -> int | None:
    line = None
    frame = error.__traceback__
    while frame is not None:
        if frame.tb_frame.f_code.co_filename == template.filename:
            line = template.get_corresponding_lineno(frame.tb_lineno)
        frame = frame.tb_next
    return line


def plain(value: object, name: str, depth: int = 0) -> Any:
    """A copy of `value` made of exact dicts, lists, strings, numbers, booleans and None only.

    So nothing that a template can reach has methods of its own. Raises InputError, naming the place, for anything
    else, and for what nests deeper than 64.
    """
    if depth > _MAX_INPUT_DEPTH:
        raise InputError(f"a chat template takes values nested up to {_MAX_INPUT_DEPTH} deep; {name:.60}... is deeper")
    if isinstance(value, str):
        return "".join((value,))
    if value is None or isinstance(value, (bool, float)):
        return value
    if isinstance(value, int) and value.bit_length() <= MAX_INT_BITS:
        return int(value)
    if isinstance(value, Mapping):
        copy = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise InputError(f"a chat template takes mappings with names as keys; {name} has the key {key!r:.40}")
            copy["".join((key,))] = plain(item, f"{name}.{key}", depth + 1)
        return copy
    if isinstance(value, Sequence) and not isinstance(value, (bytes, bytearray, memoryview)):
        return [plain(item, f"{name}[{index}]", depth + 1) for index, item in enumerate(value)]
    raise InputError(f"a chat template takes plain data (as JSON has it); {name} is a {type(value).__name__}")
