"""The examples run, and show what they say they show."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.source_tree

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(name: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / name), *arguments], capture_output=True, text=True, timeout=400, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_fan_out_reads_the_trunk_once() -> None:
    shown = run("fan_out.py", "--trunk-tokens", "600", "--max-tokens", "8")
    assert "4 clones" in shown
    added = re.search(r"(\d+) cells more", shown)
    assert added is not None
    assert int(added[1]) <= 24  # what the trunk itself decoded meanwhile
    counts = re.search(r"evaluated (\d+) prompt tokens in all; without sharing it had been (\d+)", shown)
    assert counts is not None
    assert int(counts[2]) - int(counts[1]) == 4 * 600
    assert int(counts[1]) < 700


def test_the_assistant_edits_and_cancels() -> None:
    shown = run("assistant.py", "--max-tokens", "6")
    assert "[work]" in shown
    assert "[home]" in shown
    turns = re.findall(r"\[(\w+)\] (\w+): (\d+) tokens were kept, (\d+) read", shown)
    assert sorted(turn[:2] for turn in turns[:4]) == sorted(2 * [("home", "length"), ("work", "length")])
    for name, _, kept, read in turns[2:4]:
        assert int(kept) > int(read) > 0, name  # an edit and a retry read only what is new
    # one button, one question that cut a reply off, and its own reply
    assert sorted(turn[:2] for turn in turns[4:]) == [("home", "cancelled"), ("home", "length"), ("work", "cancelled")]
    assert "failed" not in shown
