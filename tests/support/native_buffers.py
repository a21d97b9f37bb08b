"""The native buffers that a test makes."""

from __future__ import annotations

import weakref
from typing import Any

import pytest

from ggml_engine.ggml.backends import Buffer


def recorded_buffers(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Buffer]]:
    """Every one that is made from now on, added as it is made."""
    made: list[weakref.ref[Buffer]] = []
    start = Buffer.__init__

    def recorded(self: Buffer, *arguments: Any, **options: Any) -> None:
        start(self, *arguments, **options)
        made.append(weakref.ref(self))

    monkeypatch.setattr(Buffer, "__init__", recorded)
    return made
