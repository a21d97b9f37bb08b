"""The rule that CI has no skipped tests, tried on a small run of pytest in a child process."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"
FILES = {
    "call": "import pytest\n\ndef test_a() -> None:\n    pytest.skip('no such device')\n",
    "mark": "import pytest\n\n@pytest.mark.skip(reason='no such device')\ndef test_a() -> None: ...\n",
    "module": "import pytest\n\npytest.skip('no such device', allow_module_level=True)\n",
    "xfail": "import pytest\n\n@pytest.mark.xfail(reason='no such device')\ndef test_a() -> None:\n    raise OSError\n",
    "passes": "def test_a() -> None: ...\n",
}


def _run(tmp_path: Path, *, ci: bool, arguments: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    shutil.copy(CONFTEST, tmp_path / "conftest.py")
    for name, source in FILES.items():
        (tmp_path / f"test_{name}.py").write_text(source, encoding="utf-8")
    environment = {key: value for key, value in os.environ.items() if key != "CI" and not key.startswith("PYTEST")}
    if ci:
        environment["CI"] = "true"
    # past errors of collection, so that one run shows every way (a mark and a module skip before the call: errors)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "--rootdir=.",
        "--continue-on-collection-errors",
    ]
    return subprocess.run(
        [*command, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def test_every_kind_of_skip_fails_the_run_in_ci_with_its_reason(tmp_path: Path) -> None:
    done = _run(tmp_path, ci=True)
    assert done.returncode == 1, done.stdout
    refused = re.findall(
        r"^(test_\w+)\.py\S*: skipping is not allowed here\. .*no such device", done.stdout, re.MULTILINE
    )
    assert sorted(refused) == ["test_call", "test_mark", "test_module", "test_xfail"], done.stdout
    assert "2 failed, 1 passed, 2 errors in" in done.stdout


def test_skips_pass_on_a_developers_machine(tmp_path: Path) -> None:
    done = _run(tmp_path, ci=False)
    assert done.returncode == 0, done.stdout
    assert "1 passed, 3 skipped, 1 xfailed in" in done.stdout


def test_an_option_refuses_skips_without_ci(tmp_path: Path) -> None:
    done = _run(tmp_path, ci=False, arguments=("--no-skips", "test_call.py"))
    assert done.returncode == 1, done.stdout
