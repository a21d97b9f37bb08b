"""What the processes inherit that the benchmark starts."""

from __future__ import annotations

import pytest

from ggml_engine.bench.start import child_environment


def test_processes_keep_their_bytecode_where_python_is_told_to_keep_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    environment = child_environment("/somewhere")
    assert "PYTHONDONTWRITEBYTECODE" not in environment
    assert environment["PYTHONPYCACHEPREFIX"] == "/somewhere"


def test_else_they_inherit_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    assert "PYTHONPYCACHEPREFIX" not in child_environment("/somewhere")
