"""Times of attention on disk: kept whole, found again, and nothing that is not theirs is taken for them."""

from __future__ import annotations

import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from ggml_engine.executor import measured_times
from ggml_engine.executor.attention_choice import ROWS, TOKENS
from ggml_engine.models.attention import AttentionForm

SUBJECT = {"cpu": "some processor", "threads": 2, "heads": [9, 3, 64, 64, False, 30]}
TIMES = {form: [[1e-3 * (i + j + 1) for j in range(len(ROWS))] for i in range(len(TOKENS))] for form in AttentionForm}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / "cache" / "attention"
    monkeypatch.setattr(measured_times, "directory", lambda: directory)
    return directory


def kept() -> Path:
    assert measured_times.save(SUBJECT, TIMES)
    return measured_times.path_of(SUBJECT)


def test_what_was_kept_is_found_by_its_subject_alone() -> None:
    assert measured_times.load(SUBJECT) is None
    kept()
    assert measured_times.load(SUBJECT) == TIMES
    assert measured_times.load({**SUBJECT, "threads": 4}) is None


def test_another_format_is_another_file(monkeypatch: pytest.MonkeyPatch) -> None:
    kept()
    monkeypatch.setattr(measured_times, "FORMAT", measured_times.FORMAT + 1)
    assert measured_times.load(SUBJECT) is None


def test_the_file_is_its_owners_alone_and_nothing_is_left_beside_it(cache: Path) -> None:
    path = kept()
    assert os.name == "nt" or stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(cache.iterdir()) == [path]


def changed(change: dict[str, Any]) -> bytes:
    return json.dumps({**json.loads(measured_times.path_of(SUBJECT).read_text()), **change}).encode()


SECONDS = {"matmul": [[1.0] * len(ROWS)] * len(TOKENS)}
DAMAGED = {
    "nothing": lambda: b"",
    "half": lambda: measured_times.path_of(SUBJECT).read_bytes()[:100],
    "no text": lambda: b"\xff\xfe\x00",
    "no object": lambda: b"[1, 2]",
    "deep": lambda: b"[" * 10_000,
    "long": lambda: measured_times.path_of(SUBJECT).read_bytes() + b" " * (1 << 20),
    "another format": lambda: changed({"format": 99}),
    "another subject": lambda: changed({"subject": {**SUBJECT, "cpu": "other"}}),
    "no times": lambda: changed({"seconds": {}}),
    "times that are no object": lambda: changed({"seconds": [1]}),
    "an unknown form": lambda: changed({"seconds": {"guess": SECONDS["matmul"]}}),
    "too few tokens": lambda: changed({"seconds": {"matmul": SECONDS["matmul"][1:]}}),
    "too many rows": lambda: changed({"seconds": {"matmul": [[1.0] * 9] * len(TOKENS)}}),
    "text": lambda: changed({"seconds": {"matmul": [["1"] * len(ROWS)] * len(TOKENS)}}),
    "flags": lambda: changed({"seconds": {"matmul": [[True] * len(ROWS)] * len(TOKENS)}}),
    "zero": lambda: changed({"seconds": {"matmul": [[0] * len(ROWS)] * len(TOKENS)}}),
    "less than zero": lambda: changed({"seconds": {"matmul": [[-1.0] * len(ROWS)] * len(TOKENS)}}),
    "no number": lambda: changed({"seconds": {"matmul": [[float("nan")] * len(ROWS)] * len(TOKENS)}}),
    "without end": lambda: changed({"seconds": {"matmul": [[float("inf")] * len(ROWS)] * len(TOKENS)}}),
    "huge": lambda: changed({"seconds": {"matmul": [[10**400] * len(ROWS)] * len(TOKENS)}}),
    "no table": lambda: changed({"seconds": {"matmul": 3}}),
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
def test_a_file_that_is_not_whole_or_not_ours_is_as_good_as_none(damage: Any) -> None:
    path = kept()
    path.write_bytes(damage())
    assert measured_times.load(SUBJECT) is None
    kept()
    assert measured_times.load(SUBJECT) == TIMES


def test_what_is_no_file_is_not_waited_for() -> None:
    path = kept()
    path.unlink()
    path.mkdir()
    assert measured_times.load(SUBJECT) is None
    assert not measured_times.save(SUBJECT, TIMES)
    path.rmdir()
    if hasattr(os, "mkfifo"):
        os.mkfifo(path)
        assert measured_times.load(SUBJECT) is None


def test_a_directory_that_cannot_be_written_is_no_error(cache: Path) -> None:
    cache.parent.mkdir()
    cache.write_text("a file where the directory should be")
    assert measured_times.load(SUBJECT) is None
    assert not measured_times.save(SUBJECT, TIMES)


@pytest.mark.parametrize("value", ["0", "off", " OFF ", "no", "false"])
def test_the_environment_switches_it_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(measured_times.SWITCH, value)
    assert measured_times.is_switched_off()
    monkeypatch.setenv(measured_times.SWITCH, "on")
    assert not measured_times.is_switched_off()


def test_the_directory_is_where_the_platform_keeps_caches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    if sys.platform.startswith("linux"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert measured_times.directory() == tmp_path / "ggml-engine" / "attention"
        monkeypatch.setenv("XDG_CACHE_HOME", "relative")
        assert measured_times.directory() == Path.home() / ".cache" / "ggml-engine" / "attention"
    assert measured_times.directory().parts[-2:] == ("ggml-engine", "attention")
