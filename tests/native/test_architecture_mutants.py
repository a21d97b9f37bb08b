"""No file ends the process, whatever it says of a model of any architecture: `architecture_mutants`, in child processes.

The model is that of the architecture's first row. The default lane tries a few mutants of each, the slow one many; all of
them (13 s for each architecture): `python tests/support/architecture_mutants.py 0 1 FILE`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import architecture_mutants
import pytest
from architecture_rows import ROWS, model_file

from ggml_engine.models.registry import ARCHITECTURES

N_OF_EACH = 12
N_SLOW = 150
N_BATCHES = 6
BATCHES = [ARCHITECTURES[first::N_BATCHES] for first in range(N_BATCHES)]


def first_row(architecture: str) -> Path:
    return model_file(next(name for name, row in ROWS.items() if row.architecture == architecture))


def run_mutants(n: int, seed: int, *architectures: str) -> dict[str, Any]:
    """Figures of each architecture; fails on what was no typed error and no answer."""
    root = Path(__file__).parents[2]
    script = architecture_mutants.__file__
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(Path(script).parent)])}
    files = [first_row(name) for name in architectures]
    command = [sys.executable, script, str(n), str(seed), *map(str, files)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3000, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    assert list(found) == [file.stem for file in files]
    bad = {name: figures["bad"] for name, figures in found.items() if figures["bad"]}
    assert bad == {}, done.stderr[-4000:]
    assert {name: figures["later"] for name, figures in found.items() if figures["later"]} == {}
    return found


@pytest.mark.parametrize("batch", BATCHES, ids=[f"{batch[0]} and {len(batch) - 1} more" for batch in BATCHES])
def test_some_mutants_of_every_architecture_are_refused_or_run(batch: tuple[str, ...]) -> None:
    found = run_mutants(N_OF_EACH, 1, *batch)
    for figures in found.values():
        assert figures["refused"] + figures["ran"] == N_OF_EACH + 1
    assert sum(figures["refused"] for figures in found.values()) > 3 * len(batch)
    assert sum(figures["ran"] for figures in found.values()) > 0


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_many_mutants_of_an_architecture_are_refused_or_run(architecture: str) -> None:
    (figures,) = run_mutants(N_SLOW, 2, architecture).values()
    assert figures["refused"] > N_SLOW // 4
    assert figures["ran"] > 0


def test_the_keys_that_are_tried_are_those_that_the_architecture_reads() -> None:
    keys = architecture_mutants.asked_keys(first_row("gpt-oss"))
    assert {
        "gpt-oss.block_count",
        "gpt-oss.rope.scaling.factor",
        "gpt-oss.expert_used_count",
        "gpt-oss.attention.causal",
        "gpt-oss.attention.sliding_window_pattern",  # which this file does not have
    } <= set(keys)


CONTROL = """
import os, sys, tempfile
from pathlib import Path
import architecture_mutants as mutants
endings = [lambda: os.kill(os.getpid(), 9), lambda: 1 // 0, lambda: mutants.NOT_FINITE, lambda: mutants.RAN]
mutants.images = lambda *_: [(str(i), b"") for i in range(4)]
mutants.run_one = lambda *_: endings[len(tried)]()
tried = []
fork = mutants.fork_one
def counted(*arguments):
    status = fork(*arguments)
    tried.append(status)
    return status
mutants.fork_one = counted
with tempfile.TemporaryDirectory() as folder:
    found = mutants.try_all(Path("any"), 0, 0, Path(folder))
print(found["ran"], found["bad"])
"""


def test_what_must_not_be_is_told_from_an_answer() -> None:
    """The control: a signal, an error of no type, logits that are no numbers, an answer."""
    root = Path(__file__).parents[2]
    folder = Path(architecture_mutants.__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(folder)])}
    done = subprocess.run([sys.executable, "-c", CONTROL], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1 ['0: exit -9', '1: exit 12', '2: logits are no numbers']"
