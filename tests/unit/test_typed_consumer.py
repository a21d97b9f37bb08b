"""A program that uses the installed package keeps its types (PEP 561), under mypy's strictest settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """\
import ggml_engine
from ggml_engine import Engine, GenConfig, GGUFError, SamplerConfig

engine = Engine.load("smollm2", ctx=512)
reveal_type(engine)
reveal_type(ggml_engine.__version__)
generation = engine.generate("x", GenConfig(max_tokens=4, sampler=SamplerConfig(temperature=0.0)))
reveal_type(generation)
for piece in generation:
    reveal_type(piece)
reveal_type(engine.conversation().send("x").result())
try:
    ggml_engine.GGUFFile.open("x")
except GGUFError as error:
    reveal_type(error.offset)
"""
REVEALED = [
    "ggml_engine.engine.Engine",
    "str",
    "ggml_engine.control.generation.Generation",
    "str",
    "str",
    "int",
]


def _mypy(tmp_path: Path, program: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-pretty", "--no-error-summary"]
    environment = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "MYPYPATH"}}
    # in a directory of its own: only what is installed can be found
    return subprocess.run(
        [*command, "program.py"],
        cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_types_reach_a_program_through_the_installed_package(tmp_path: Path) -> None:
    done = _mypy(tmp_path, PROGRAM)
    assert done.returncode == 0, done.stdout + done.stderr
    revealed = [line.split('"')[1].removeprefix("builtins.") for line in done.stdout.splitlines() if "Revealed" in line]
    assert revealed == REVEALED, done.stdout
    wrong = _mypy(tmp_path, PROGRAM + "engine.generate(1.5)\nggml_engine.Motor\n")
    assert wrong.returncode == 1
    assert "arg-type" in wrong.stdout
    assert 'has no attribute "Motor"' in wrong.stdout
