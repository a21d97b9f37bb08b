"""The Jinja environment of a chat template: an immutable sandbox in which every operation is metered.

This module and those it imports (`syntax`, `vocabulary`, `operations`) need jinja2, so they are imported when the first
template is used. Invariants: what is not listed (a node, filter, test, method, callable) is refused; no constant is
folded at compile time, when nothing is metered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from types import BuiltinMethodType, MethodType
from typing import Any, cast

from jinja2 import Template, TemplateError, meta, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.lexer import Token, TokenStream
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext, Macro, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from ggml_engine.errors import ChatTemplateError

from . import operations as ops
from .limits import Limits, Meter
from .syntax import Rewriter, check
from .text import Text
from .vocabulary import FILTERS, TESTS

FILENAME = "<chat template>"
_MAX_MACRO_DEPTH = 50
_ASKS_FOR_A_VALUE = frozenset({"defined", "undefined", "default", "d"})


class TemplateRaisedError(TemplateError):
    """The template called `raise_exception`."""


class _Format:
    """`text.format`, looked up but not yet called."""

    __slots__ = ("template",)

    def __init__(self, template: str) -> None:
        self.template = template


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: marks the model's own words for training; only its content counts."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own declaration

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class _TokenCap(Extension):
    """Ends the parsing of a source that has too many tokens, before they are a syntax tree."""

    def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
        limit = cast("Sandbox", self.environment).limits.n_tokens
        for n_tokens, token in enumerate(stream):
            if n_tokens >= limit:
                raise ChatTemplateError(f"the chat template has more than {limit} tokens")
            yield token


@pass_context
def _printed(context: Context, value: Any) -> str:
    environment = cast("Sandbox", context.environment)
    return ops.as_text(environment.meter, value)


def _raise_exception(message: Any) -> None:
    raise TemplateRaisedError(str(message) if isinstance(message, (str, int, float)) else type(message).__name__)


def _kind(value: Any) -> str:
    return "str" if isinstance(value, str) else type(value).__name__


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of one chat template. `meter` counts the rendering that is under way; one at a time."""

    intercepted_binops = frozenset(ops.BINARY)

    def __init__(self, limits: Limits, now: Callable[[], datetime]) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # folding would compute constants at compile time, unmetered
            finalize=_printed,
            extensions=[LoopControlExtension, _Generation, _TokenCap],
            cache_size=0,
        )
        self.limits = limits
        self.meter = Meter(limits)
        self.literals: list[Text] = []
        self.filters = dict(FILTERS)
        self.tests = dict(TESTS)
        self._now = now
        self.globals = {
            "dict": dict,
            "namespace": Namespace,
            "raise_exception": _raise_exception,
            "range": ops.bounded_range,
            "strftime_now": self._strftime_now,
        }
        self._functions = list(self.globals.values())

    def _strftime_now(self, pattern: str) -> str:
        return ops.formatted_time(self._now, pattern)

    def concat(self, pieces: Iterable[str]) -> str:
        """The text of a macro's or a block's buffer."""
        return ops.concatenated(self.meter, pieces)

    def wrap_str_format(self, value: Any) -> Any:
        if isinstance(value, BuiltinMethodType) and value.__name__ == "format" and isinstance(value.__self__, str):
            return _Format(value.__self__)
        return None

    def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
        raise SecurityError(f"the attribute {attribute!r} of a {_kind(obj)} is not a template's to read")

    def getitem(self, obj: Any, argument: Any) -> Any:
        if not isinstance(argument, (str, int)):
            self.meter.weigh(argument)
        return super().getitem(obj, argument)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ARG002 - Jinja's signature
        return ops.BINARY[operator](self.meter, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Calls what a template may call: listed methods of plain values, macros, and the listed functions."""
        for name in ("_loop_vars", "_block_vars"):  # Jinja's, for functions that take the context; none here does
            kwargs.pop(name, None)
        if isinstance(function, Macro):
            return self._call_macro(context, function, args, kwargs)
        self.meter.weigh(*args, *kwargs.values())
        if isinstance(function, _Format):
            return ops.format_text(self.meter, function.template, args, kwargs)
        if isinstance(function, Undefined) or any(function is known for known in self._functions):
            return context.call(function, *args, **kwargs)
        if isinstance(function, (BuiltinMethodType, MethodType)):
            return self._call_method(context, function, args, kwargs)
        raise SecurityError(f"a {type(function).__name__} cannot be called")

    def _call_macro(self, context: Context, macro: Macro, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        meter = self.meter
        if meter.macro_depth >= _MAX_MACRO_DEPTH:
            raise ChatTemplateError(f"the chat template nests macro calls deeper than {_MAX_MACRO_DEPTH}")
        meter.macro_depth += 1
        try:
            return context.call(macro, *args, **kwargs)
        finally:
            meter.macro_depth -= 1

    def _call_method(self, context: Context, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        owner, name = method.__self__, method.__name__
        if isinstance(owner, str) and name in ops.STRING_METHODS:
            return ops.STRING_METHODS[name](self.meter, owner, *args, **kwargs)
        if name in ops.CONTAINER_METHODS.get(type(owner), ()):
            if name not in {"get", "items", "keys", "values"}:
                self.meter.weigh(owner)
            return context.call(method, *args, **kwargs)
        if isinstance(owner, LoopContext) and name in {"changed", "cycle"}:
            return context.call(method, *args, **kwargs)
        raise SecurityError(f"the method {name!r} of a {_kind(owner)} cannot be called")

    # --- compiling

    def variables_of(self, source: str) -> frozenset[str]:
        """The names that a template takes from outside; `source` has been compiled before.

        One that it sets itself is one of them where it asks whether there is a value.
        """
        tree = self.parse(source)
        own = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
        asked = {
            question.node.name
            for question in tree.find_all((nodes.Test, nodes.Filter))
            if question.name in _ASKS_FOR_A_VALUE and isinstance(question.node, nodes.Name)
        }
        return frozenset(meta.find_undeclared_variables(tree)) - self.globals.keys() - (own - asked)

    def compile_template(self, source: str) -> Template:
        """The template of `source`; a hostile source provokes nearly any exception here."""
        tree = self.parse(source)
        check(tree, self.limits.n_nodes)
        rewriter = Rewriter()
        tree = rewriter.visit(tree)
        self.literals = rewriter.literals
        tree.set_environment(self)
        return Template.from_code(self, self.compile(tree, filename=FILENAME), dict(self.globals))
