"""The name of the processor, as Linux gives it."""

from __future__ import annotations

import pytest

from ggml_engine.bench.machine import cpu_name, cpu_name_in


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("processor\t: 0\nmodel\t\t: 17\nmodel name\t: A Processor @ 2GHz\nmodel name\t: B\n", "A Processor @ 2GHz"),
        ("processor\t: 0\nHardware\t: A Board\n", "A Board"),
        ("processor\t: 0\nmodel name\t:\n", ""),
        ("", ""),
    ],
    ids=["x86", "arm", "no name", "nothing"],
)
def test_the_name_is_found_where_there_is_one(text: str, name: str) -> None:
    assert cpu_name_in(text) == name


def test_every_processor_has_some_name() -> None:
    assert cpu_name()
