"""`ggml-engine bench` and the script for reused prefixes run on a real model. Times are no test's matter."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ggml_engine.cli.main import main

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_command_measures_a_real_model_beside_llama_cpp_and_whole_processes(
    capsys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)  # it is told of, on stderr
    plot = tmp_path / "speed.svg"
    arguments = ["--quick", "--repetitions", "1", "--threads", "1", "--against", "llama.cpp", "--plot", str(plot)]
    assert main(["bench", "smollm2", "--only", "prefill,shared,start", "--json", *arguments]) == 0
    out, err = capsys.readouterr()
    assert err == f"drawn: {plot}\n"
    (model,) = json.loads(out)["models"]
    assert (model["architecture"], model["n_layer"], model["failed"]) == ("llama", 30, {})
    assert [len(row["series"]) for row in model["rows"]] == [3, 3, 5, 6]
    peak = {series["name"]: series["median"] for series in model["rows"][-1]["series"] if series["unit"] == "bytes"}
    assert set(peak) == {"ours, peak memory", "llama-cpp-python, peak memory"}
    assert all(model["file_bytes"] < n_bytes < 10 * model["file_bytes"] for n_bytes in peak.values())
    assert len(set(peak.values())) == 2  # each process's own, not what this one was when it began them
    assert plot.read_text(encoding="utf-8").lstrip().startswith("<?xml")


@pytest.mark.source_tree
def test_the_script_for_reused_prefixes_reports_differences() -> None:  # R39
    command = [sys.executable, str(BENCHMARKS / "prefix_reuse.py"), "--prompt", "160", "--decoded", "4"]
    done = subprocess.run([*command, "--threads", "1"], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    found = re.findall(r"K/V (\w+) .*of 5 rows: logits +([\d.]+), probabilities +([\d.]+)", done.stdout)
    assert [kv_type for kv_type, _, _ in found] == ["f16", "f16", "q8_0", "q8_0"]
    for _, logits, probabilities in found:
        assert float(logits) < 5
        assert float(probabilities) < 0.5
