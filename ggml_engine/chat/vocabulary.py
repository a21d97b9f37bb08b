"""The filters and tests that a chat template may use, by name.

Those whose cost is not bounded by a measured input are our own (`operations`) or missing; the rest are Jinja's, behind
a measurement. The names with `#` are for `syntax`, which puts them into the rewritten tree.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import TYPE_CHECKING, Any, cast

from jinja2 import filters, pass_context, pass_environment, tests
from jinja2.runtime import Context

from . import operations as ops
from .limits import Meter, Metered, Stream

if TYPE_CHECKING:
    from .sandbox import Sandbox


def _metered(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter over a function whose first argument is the meter."""

    @pass_environment
    def run(environment: Sandbox, *args: Any, **kwargs: Any) -> Any:
        return function(environment.meter, *args, **kwargs)

    return run


def _text_filter(function: Callable[..., str]) -> Callable[..., Any]:
    """A filter over a metered string function: whatever it is applied to is printed first."""

    @pass_environment
    def run(environment: Sandbox, value: Any, *args: Any, **kwargs: Any) -> str:
        return function(environment.meter, ops.as_text(environment.meter, value), *args, **kwargs)

    return run


def _weighed(function: Callable[..., Any], passed: str = "") -> Callable[..., Any]:
    """One of Jinja's own filters or tests whose cost and result grow with all that is inside its arguments."""

    @pass_context
    def run(context: Context, *args: Any, **kwargs: Any) -> Any:
        environment = cast("Sandbox", context.environment)
        environment.meter.spend(8 * environment.meter.weigh(*args, *kwargs.values()).n_values)
        return _finished(function(*_passed(passed, context), *args, **kwargs))

    return run


def _counted(function: Callable[..., Any], passed: str = "") -> Callable[..., Any]:
    """One of Jinja's own filters that looks at each item of a sequence, not into them.

    What it may call for each (a filter, a test, a look-up) is metered itself.
    """

    @pass_context
    def run(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        environment = cast("Sandbox", context.environment)
        if isinstance(value, Sized):
            environment.meter.new_list(8 * len(value), 16)
        environment.meter.weigh(*args, *kwargs.values())
        return _finished(function(*_passed(passed, context), value, *args, **kwargs))

    return run


def _passed(passed: str, context: Context) -> tuple[Any, ...]:
    return {"context": (context,), "environment": (context.environment,)}.get(passed, ())


def _finished(result: Any) -> Any:
    return Stream(list(result)) if isinstance(result, Iterator) else ops.checked(result)


def _tick(meter: Meter, work: int) -> str:
    meter.spend(work)
    return ""


def _operand(meter: Meter, value: Any) -> Any:
    meter.weigh(value)
    return value


def _arguments(meter: Meter, value: Any) -> Any:
    """What stands behind `*` or `**` in a call, before Python unpacks it."""
    if not isinstance(value, (list, tuple, dict)):
        raise TypeError(f"arguments are unpacked from a list or a mapping, not from a {type(value).__name__}")
    meter.new_list(len(value))
    return value


def _as_list(meter: Meter, value: Any) -> list[Any]:
    if isinstance(value, Sized):
        meter.new_list(len(value), 80 if isinstance(value, (str, range)) else 8)
    return list(value)


@pass_environment
def _first(environment: Sandbox, value: Iterable[Any]) -> Any:
    for item in value:
        return item
    return environment.undefined("no first item, the sequence is empty")


def _as_string(meter: Meter, value: Any) -> str:
    return ops.as_text(meter, value)


def _joined(meter: Meter, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    items = value if attribute is None else [item[attribute] for item in value]
    return ops.join(meter, ops.as_text(meter, d), items, convert=True)


def _escaped(meter: Meter, text: str) -> str:
    meter.new_text(len(text) * 6, text)
    return html.escape(text).replace("&quot;", "&#34;").replace("&#x27;", "&#39;")


FILTERS: dict[str, Callable[..., Any]] = {
    "#arguments": _metered(_arguments),
    "#concat": _metered(ops.concatenated),
    "#iterate": _metered(Metered),
    "#operand": _metered(_operand),
    "#slice": _metered(ops.sliced),
    "#tick": _metered(_tick),
    "e": _text_filter(_escaped),
    "escape": _text_filter(_escaped),
    "first": _first,
    "indent": _metered(ops.indent),
    "join": _metered(_joined),
    "list": _metered(_as_list),
    "replace": _text_filter(ops.replace),
    "round": _metered(ops.rounded),
    "safe": _metered(_as_string),
    "string": _metered(_as_string),
    "sum": _metered(ops.total),
    "tojson": _metered(ops.to_json),
    "trim": _text_filter(ops.strip),
    **{name: _text_filter(ops.STRING_METHODS[name]) for name in ("capitalize", "lower", "title", "upper")},
    **{name: filters.FILTERS[name] for name in ("count", "d", "default", "length")},
    **{name: _counted(filters.FILTERS[name]) for name in ("items", "reverse")},
    **{
        name: _counted(filters.FILTERS[name], "context")
        for name in ("map", "reject", "rejectattr", "select", "selectattr")
    },
    "last": _counted(filters.FILTERS["last"], "environment"),
    **{name: _weighed(filters.FILTERS[name]) for name in ("abs", "dictsort", "float", "int")},
    **{name: _weighed(filters.FILTERS[name], "environment") for name in ("max", "min", "sort", "unique")},
}
# Tests that look at no more than the kind of a value, or at a number.
_CHEAP_TESTS = (
    *("boolean", "callable", "defined", "false", "float", "integer", "iterable", "mapping", "none", "number", "sameas"),
    *("sequence", "string", "true", "undefined"),
)
_DEEP_TESTS = (
    *("!=", "<", "<=", "==", ">", ">=", "eq", "equalto", "ge", "greaterthan", "gt", "in", "le", "lessthan", "lower"),
    *("lt", "ne", "upper"),
)
TESTS: dict[str, Callable[..., Any]] = {
    **{name: cast("Callable[..., Any]", tests.TESTS[name]) for name in _CHEAP_TESTS},
    **{name: _weighed(cast("Callable[..., Any]", tests.TESTS[name])) for name in _DEEP_TESTS},
    "divisibleby": ops.is_multiple,
    "even": lambda value: ops.is_multiple(value, 2),
    "odd": lambda value: not ops.is_multiple(value, 2),
}
