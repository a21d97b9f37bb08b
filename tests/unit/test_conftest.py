"""The rule that CI has no skipped tests, tried on a small run of pytest in a child process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
SKIPPING = {
    "call": "import pytest\n\ndef test_a() -> None:\n    pytest.skip('no such device')\n",
    "mark": "import pytest\n\n@pytest.mark.skip(reason='no such device')\ndef test_a() -> None: ...\n",
    "module": "import pytest\n\npytest.skip('no such device', allow_module_level=True)\n",
    "xfail": "import pytest\n\n@pytest.mark.xfail(reason='no such device')\ndef test_a() -> None:\n    raise OSError\n",
}


def _run(tmp_path: Path, source: str, *, ci: bool) -> subprocess.CompletedProcess[str]:
    shutil.copy(CONFTEST, tmp_path / "conftest.py")
    (tmp_path / "test_it.py").write_text(source + "\n\ndef test_b() -> None: ...\n", encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key != "CI" and not key.startswith("PYTEST")}
    if ci:
        environment["CI"] = "true"
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), str(tmp_path)]
    return subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("way", SKIPPING)
def test_a_skip_fails_the_run_in_ci_with_its_reason(tmp_path: Path, way: str) -> None:
    done = _run(tmp_path, SKIPPING[way], ci=True)
    assert done.returncode != 0, done.stdout
    assert "skipping is not allowed here" in done.stdout
    assert "no such device" in done.stdout


def test_a_skip_passes_on_a_developers_machine(tmp_path: Path) -> None:
    done = _run(tmp_path, SKIPPING["call"], ci=False)
    assert done.returncode == 0, done.stdout
    assert "1 passed, 1 skipped" in done.stdout


def test_a_run_without_skips_passes_in_ci(tmp_path: Path) -> None:
    done = _run(tmp_path, "", ci=True)
    assert done.returncode == 0, done.stdout
    assert "1 passed" in done.stdout
