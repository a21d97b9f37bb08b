"""Whatever the loader accepts, runs: mutants of whole models, in child processes, end with an answer or a typed error."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import mutant_child
import pytest
from architecture_rows import model_file
from tiny_models import Q8_0, write_gemma3, write_llama

CONTROL = """
import os, sys
from pathlib import Path
import mutant_child
for run_one in (lambda _: os.kill(os.getpid(), 9), lambda _: 1 // 0, lambda _: 0):
    mutant_child.run_one = run_one
    status = mutant_child.fork_one(Path("any"))
    print(os.WIFSIGNALED(status), os.WEXITSTATUS(status))
"""


def run_python(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), str(Path(mutant_child.__file__).parent)])}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done


def run_mutants(model: Path, folder: Path, n_accepted: int, seed: int, *engine: str) -> dict[str, Any]:
    done = run_python(mutant_child.__file__, str(model), str(folder), str(n_accepted), str(seed), *engine)
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["bad"] == [], f"{found['bad']}\n{done.stderr[-4000:]}"
    return found


def write(folder: Path, kind: str) -> Path:
    path = folder / f"{kind}.gguf"
    if kind == "gemma3":
        return write_gemma3(path, n_layer=2, n_head_kv=2, head_size=16, window=3, softcap=30.0, rope_scale=2.0)
    extras = {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 2.0, "llama.expert_count": 0}
    return write_llama(path, types=Q8_0, biases=True, rope_factors=[1.0] * 8, metadata=extras)


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_accepted_mutants_end_by_themselves(tmp_path: Path, kind: str) -> None:
    found = run_mutants(write(tmp_path, kind), tmp_path, 30, seed=1)
    assert found["ran"] + found["typed"] == 30
    assert found["ran"] > 10
    assert found["refused"] > 10


@pytest.mark.parametrize("kind", ["llama", "gemma3", "lfm2"])
def test_mutants_that_reach_libllama_end_by_themselves(tmp_path: Path, kind: str) -> None:
    model = model_file(kind) if kind == "lfm2" else write(tmp_path, kind)
    found = run_mutants(model, tmp_path, 12, 1, "libllama")
    assert found["ran"] + found["typed"] == 12
    assert found["ran"] > 4
    assert found["refused"] > 4


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_hundreds_of_accepted_mutants_end_by_themselves(tmp_path: Path, kind: str) -> None:
    found = run_mutants(write(tmp_path, kind), tmp_path, 250, seed=2)
    assert found["ran"] + found["typed"] == 250


def test_a_mutant_that_dies_is_told_from_one_that_answers() -> None:
    """The control: a signal, an error of no type, an answer."""
    assert run_python("-c", CONTROL).stdout.splitlines() == ["True 0", f"False {mutant_child.UNTYPED}", "False 0"]
