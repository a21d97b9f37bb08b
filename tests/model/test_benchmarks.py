"""The benchmark of the prefix cache runs, and what it says of numerics is within bounds. Times are no test's matter."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.source_tree

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_the_benchmark_of_prefix_reuse_reports_times_and_differences() -> None:  # R39
    command = [sys.executable, str(BENCHMARKS / "prefix_reuse.py"), "--prompt", "160", "--turns", "2", "--decoded", "4"]
    done = subprocess.run([*command, "--threads", "1"], capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    assert re.search(r"first token of 160 tokens: .* warm / cold 1/\d+ .* in 2 turns\), bar 1/30", done.stdout)
    found = re.findall(r"K/V (\w+) .*of 5 rows: logits +([\d.]+), probabilities +([\d.]+)", done.stdout)
    assert [kv_type for kv_type, _, _ in found] == ["f16", "f16", "q8_0", "q8_0"]
    for _, logits, probabilities in found:
        assert float(logits) < 5
        assert float(probabilities) < 0.5
