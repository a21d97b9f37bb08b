"""`ggml-engine check` on the real models, in a process of its own."""

from __future__ import annotations

import json

import pytest
from cli_process import run
from real_models import gemma3_270m, smollm2


@pytest.mark.parametrize("name", ["S", "G"])
def test_the_real_models_pass(name: str) -> None:
    path = smollm2() if name == "S" else gemma3_270m()
    done = run("check", str(path), "--tokens", "40", "--threads", "1", "--json")  # more spin where the machine is busy
    assert done.returncode == 0, done.stderr
    assert done.stderr == b""
    rows = json.loads(done.stdout)
    compared = {(row["mode"], row["against"]) for row in rows if row["bound"] is not None}
    assert {mode for mode, _ in compared} == {"matmul", "flash", "deterministic"}
    assert {against for _, against in compared} >= {"libllama", "alone"}
    assert ("matmul", "naive attention") in compared if name == "S" else "too large" in str(rows)
