"""Requests are checked here: a field that nobody knows, or that cannot be honoured, is an error that names it.

Nothing is converted: a number in quotes is no number, NaN is none, and true is no 1. A field may be null where the API
has it so; that is the same as leaving it out. One fault is enough: a list is read up to its first (`Many`), since
millions of them in one body would hold up every other request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Final, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from ggml_engine.server.errors import HttpProblem

_UNSUPPORTED: Final = frozenset(("unsupported_parameter", "extra_forbidden", "union_tag_invalid"))
_MAX_SHOWN: Final = 300

Model = TypeVar("Model", bound=BaseModel)
Value = TypeVar("Value")
Many = Annotated[list[Value], Field(fail_fast=True)]
"""A list of a request."""


class RequestModel(BaseModel):
    """A part of a request: strict, and closed to fields that it does not know."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True)


def unsupported(why: str) -> PydanticCustomError:
    """The error of a field or value that the API has and this server does not."""
    return PydanticCustomError("unsupported_parameter", "{why}", {"why": why})


def invalid(why: str) -> PydanticCustomError:
    """The error of a value that cannot be."""
    return PydanticCustomError("invalid_value", "{why}", {"why": why})


def _refuse(value: object) -> object:
    if value is not None:
        raise unsupported("is not supported by this server")
    return value


def only(*allowed: object) -> Callable[[object], object]:
    """A check that a value is one of those that ask for nothing else than what is done anyway."""

    def check(value: object) -> object:
        if value is not None and not any(value == each and type(value) is type(each) for each in allowed):
            wanted = " or ".join(repr(each) for each in allowed)
            raise unsupported(f"of {value!r:.60} is not supported by this server, only {wanted}")
        return value

    return check


Refused = Annotated[Any, AfterValidator(_refuse)]
"""A field of the API that is an error here, unless it is null."""
NoEffect = Any
"""A field that has no effect on the result, and that clients send."""
Disabled = Annotated[Any, AfterValidator(only(False))]
"""A switch that may only be off."""


def validated(kind: type[Model], body: object) -> Model:
    """The request as a model. Raises HttpProblem (400) that names the field."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _problem(error, body) from None


def _problem(error: ValidationError, body: object) -> HttpProblem:
    """The error that says most: what is not supported first, then what lies deepest (unions have one per member)."""
    found = [(each, _place(each, body)) for each in error.errors(include_url=False, include_input=False)]
    each, place = max(found, key=lambda pair: (pair[0]["type"] in _UNSUPPORTED, len(pair[1])))
    param = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in place).lstrip(".") or None
    message = each["msg"]
    name = "the request" if param is None else param
    if each["type"] == "extra_forbidden":
        return HttpProblem(400, "unsupported_parameter", f"{name} is not a parameter of this server", param)
    if each["type"] == "unsupported_parameter":
        return HttpProblem(400, "unsupported_parameter", f"{name} {message}"[:_MAX_SHOWN], param)
    if each["type"] == "union_tag_invalid":
        context = each["ctx"]
        if context["discriminator"] == "'role'":
            message = f"{name}: the role {context['tag']!r:.60} is none of {context['expected_tags']}"
            return HttpProblem(400, "invalid_value", message, param)
        message = f"{name} of type {context['tag']!r:.60} is not supported by this server"
        return HttpProblem(400, "unsupported_parameter", message, param)
    if each["type"] == "missing":
        return HttpProblem(400, "missing_required_parameter", f"{name} is required", param)
    message = message[:1].lower() + message[1:]
    return HttpProblem(400, "invalid_value", f"{name}: {message}"[:_MAX_SHOWN], param)


def _place(each: ErrorDetails, body: object) -> list[str | int]:
    """The way to the value through the request itself: pydantic's own has the names of union members in it."""
    place: list[str | int] = []
    value = body
    steps = each["loc"]
    for number, step in enumerate(steps):
        if isinstance(step, str) and isinstance(value, dict):
            if step in value:
                value = value[step]
                place.append(step)
            elif number == len(steps) - 1 and each["type"] == "missing":
                place.append(step)
        elif isinstance(step, int) and isinstance(value, list) and step < len(value):
            value = value[step]
            place.append(step)
    return place
