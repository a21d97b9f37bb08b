"""Frozen values whose classes are made quickly.

Owns `dataclass`: the standard library's `dataclass(frozen=True, slots=True)`, with less to compile.
The standard one compiles six functions for each class, half a millisecond; loading a model makes some seventy classes,
which was a sixth of the time to a first token. Here only `__init__` is compiled; the others are shared, or closures.
Fields, `replace`, `asdict`, `match` and `pickle` work as ever, since the standard one still collects the fields.
Classes that can be changed, and those with `order`, `InitVar` or a dict, take the standard one.
"""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable
    from dataclasses import Field, dataclass
else:

    def dataclass(*, frozen: bool, slots: bool, eq: bool = True, kw_only: bool = False) -> Callable[[type], type]:
        """A decorator that makes a class of frozen values, as `dataclasses.dataclass` of the same arguments does."""
        if not (frozen and slots):
            raise TypeError("only for frozen classes with slots: take dataclasses.dataclass for others")
        return lambda cls: _made(cls, eq=eq, kw_only=kw_only)


__all__ = ["dataclass"]

T = TypeVar("T")


def _made(cls: type[T], *, eq: bool, kw_only: bool) -> type[T]:
    cls.__doc__ = cls.__doc__ or cls.__name__  # the standard one would import and ask `inspect` for a signature
    own = dict(vars(cls))
    made = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True, kw_only=kw_only)(cls)
    fields = dataclasses.fields(cast("Any", made))
    methods: dict[str, Any] = {"__init__": _init(made, fields), "__repr__": _repr}
    methods |= {"__setattr__": _refuse_to_set, "__delattr__": _refuse_to_delete}
    methods |= {"__getstate__": _state, "__setstate__": _restore}
    if eq:
        compared = [field.name for field in fields if field.compare]
        hashed = [field.name for field in fields if (field.compare if field.hash is None else field.hash)]
        methods |= {"__eq__": _eq(_values(compared)), "__hash__": _hash(_values(hashed))}
    for name, method in methods.items():
        if name not in own or (name == "__hash__" and own[name] is None):  # what the class says itself stays
            setattr(made, name, method)
    return made


def _init(cls: type, fields: tuple[Field[Any], ...]) -> Any:
    """`__init__` with the fields as its parameters; the values are set through the slots, past the refusal."""
    names: dict[str, Any] = {"missing": dataclasses.MISSING}
    positional: list[str] = ["self"]
    keyword: list[str] = []
    body: list[str] = []
    for field in fields:
        name = field.name
        names[f"set_{name}"] = getattr(cls, name).__set__
        parameter, value = name, name
        if field.default is not dataclasses.MISSING:
            names[f"default_{name}"] = field.default
            parameter = f"{name}=default_{name}"
        elif field.default_factory is not dataclasses.MISSING:
            names[f"make_{name}"] = field.default_factory
            parameter, value = f"{name}=missing", f"make_{name}() if {name} is missing else {name}"
        if not field.init:
            raise TypeError(f"{cls.__name__}.{name}: every field is a parameter here")
        (keyword if field.kw_only else positional).append(parameter)
        body.append(f"  set_{name}(self, {value})")
    if hasattr(cls, "__post_init__"):
        body.append("  self.__post_init__()")
    parameters = ", ".join([*positional, *(["*", *keyword] if keyword else [])])
    head = [f"def make({', '.join(names)}):", f" def __init__({parameters}):"]
    source = "\n".join([*head, *(body or ["  pass"]), " return __init__"])
    found: dict[str, Any] = {}
    exec(source, {}, found)  # made of the fields' names alone, as the standard one's is
    init = found["make"](**names)
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    return init


def _values(names: list[str]) -> Callable[[Any], Any]:
    """The values of some fields as a tuple."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda value: tuple(getattr(value, name) for name in names)


def _eq(values: Callable[[Any], Any]) -> Any:
    def __eq__(self: object, other: object) -> Any:  # noqa: N807  # becomes the class's own
        return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

    return __eq__


def _hash(values: Callable[[Any], Any]) -> Any:
    def __hash__(self: object) -> int:  # noqa: N807  # becomes the class's own
        return hash(values(self))

    return __hash__


def _repr(self: Any) -> str:
    shown = (f"{field.name}={getattr(self, field.name)!r}" for field in dataclasses.fields(self) if field.repr)
    return f"{self.__class__.__qualname__}({', '.join(shown)})"


def _refuse_to_set(_self: object, name: str, _value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(_self: object, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _restore(self: Any, state: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)
