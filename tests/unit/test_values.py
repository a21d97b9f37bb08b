"""Classes of frozen values: made quickly, and like those of the standard library in everything else."""

from __future__ import annotations

import builtins
import copy
import dataclasses
import pickle
from dataclasses import FrozenInstanceError, field

import pytest

from ggml_engine.values import dataclass


@dataclass(frozen=True, slots=True)
class Ours:
    """Some fields."""

    a: int
    b: str = "b"
    c: list[int] = field(default_factory=list, compare=False)
    d: float = field(default=0.5, repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Standard:
    """The same, made by the standard library."""

    a: int
    b: str = "b"
    c: list[int] = field(default_factory=list, compare=False)
    d: float = field(default=0.5, repr=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A base."""

    n: int

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ValueError(f"n is {self.n}")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoreSizes(Sizes):
    """With a field more."""

    m: int = 2


@dataclass(frozen=True, slots=True, eq=False)
class Handle:
    """Equal to itself alone."""

    n: int


@dataclass(frozen=True, slots=True)
class Empty:
    """Without fields."""


def test_it_looks_like_one_of_the_standard_library() -> None:
    ours, standard = Ours(1, d=2.0), Standard(1, d=2.0)
    assert repr(ours) == repr(standard).replace("Standard", "Ours")
    assert [f.name for f in dataclasses.fields(ours)] == [f.name for f in dataclasses.fields(standard)]
    assert dataclasses.asdict(ours) == dataclasses.asdict(standard)
    assert Ours.__match_args__ == Standard.__match_args__
    assert Ours.__slots__ == Standard.__slots__
    assert Ours.__init__.__qualname__ == "Ours.__init__"
    assert not hasattr(ours, "__dict__")


def test_values_are_equal_and_hash_by_the_fields_that_are_compared() -> None:
    assert Ours(1, c=[1]) == Ours(1, c=[2])
    assert hash(Ours(1, c=[1])) == hash(Ours(1, c=[2])) == hash(Standard(1))
    assert Ours(1) != Ours(2)
    assert Ours(1) != Standard(1)
    assert Empty() == Empty()
    assert len({Sizes(n=1), Sizes(n=1), MoreSizes(n=1)}) == 2
    assert Handle(1) != Handle(1)


def test_fields_can_be_neither_set_nor_deleted() -> None:
    value = Ours(1)
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'a'"):
        value.a = 2  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'a'"):
        del value.a
    assert value.a == 1


def test_defaults_are_made_anew_for_each_value() -> None:
    assert Ours(1).c is not Ours(1).c
    assert Ours(1, "x", [3], 4.0).c == [3]


def test_a_value_is_checked_when_it_is_made_and_when_it_is_replaced() -> None:
    with pytest.raises(ValueError, match="n is 0"):
        Sizes(n=0)
    with pytest.raises(ValueError, match="n is -1"):
        dataclasses.replace(MoreSizes(n=1), n=-1)
    assert dataclasses.replace(MoreSizes(n=1), m=5) == MoreSizes(n=1, m=5)


def test_missing_and_unknown_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'a'"):
        Ours()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="unexpected keyword argument 'e'"):
        Ours(1, e=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        Sizes(1)  # type: ignore[misc]


def test_values_are_copied_and_pickled() -> None:
    value = Ours(1, "x", [3], 4.0)
    assert copy.copy(value).c is value.c
    assert copy.deepcopy(value).c == [3]
    assert copy.deepcopy(value).c is not value.c
    assert pickle.loads(pickle.dumps(value)) == value


def test_what_it_is_not_for_is_refused() -> None:
    with pytest.raises(TypeError, match="only for frozen classes with slots"):
        dataclass(frozen=False, slots=True)
    with pytest.raises(TypeError, match="every field is a parameter"):

        @dataclass(frozen=True, slots=True)
        class Wrong:
            n: int = field(init=False)


def test_one_function_is_compiled_for_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []
    compile_and_run = builtins.exec
    monkeypatch.setattr(
        builtins, "exec", lambda source, *names: (compiled.append(source), compile_and_run(source, *names))
    )

    @dataclass(frozen=True, slots=True)
    class Quick:
        """With all that a value has."""

        n: int

    assert Quick(3) == Quick(3)
    assert len(compiled) == 1
