"""The group and its small commands; and that help needs nothing heavy."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import ggml_engine.cli.devices as devices_module
import ggml_engine.cli.pull as pull_module
from ggml_engine.cli.main import main
from ggml_engine.errors import DownloadError

HEAVY = [
    "numpy",
    "matplotlib",
    "cffi",
    "_cffi_backend",
    "jinja2",
    "llama_cpp",
    "gguf",
    "huggingface_hub",
    "ctypes.util",
    "asyncio",
]


@pytest.mark.parametrize(
    "args",
    [
        ["--help"],
        ["run", "--help"],
        ["batch", "--help"],
        ["embed", "--help"],
        ["pull", "--help"],
        ["devices", "-h"],
        ["models", "-h"],
        ["check", "--help"],
        ["bench", "--help"],
        [],
    ],
    ids=str,
)
def test_help_imports_nothing_native_or_heavy(args: list[str]) -> None:
    code = f"""
import sys
from ggml_engine.cli.main import main
main({args!r})
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


def test_help_names_the_commands_and_is_code_0(capsys) -> None:
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Usage: ggml-engine [OPTIONS] COMMAND")
    assert all(
        f"\n  {name} " in out for name in ("run", "batch", "embed", "pull", "devices", "models", "check", "bench")
    )


@pytest.mark.parametrize("args", [[], ["--nonsense"], ["pull"], ["devices", "x"], ["models", "x"]], ids=str)
def test_a_wrong_use_is_code_2_and_says_so_on_stderr(capsys, args: list[str]) -> None:
    assert main(args) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Usage: ggml-engine" in err


def test_version_names_all_three(monkeypatch, capsys) -> None:
    import ggml_engine.cli.version as version_module

    monkeypatch.setattr(version_module, "_ggml", lambda: "1.2.3")
    assert main(["--version"]) == 0
    assert " ggml 1.2.3, llama-cpp-python " in capsys.readouterr().out


DEVICES = [
    {"name": "CPU", "kind": "cpu", "description": "A\nCPU", "memory_free": 1 << 20, "memory_total": 2 << 20},
    {"name": "Metal0", "kind": "gpu", "description": "G", "memory_free": 0, "memory_total": 0},
]


def test_devices_are_a_table_or_json(monkeypatch, capsys) -> None:
    monkeypatch.setattr(devices_module, "find_devices", lambda: DEVICES)
    assert main(["devices"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "name    kind  description  memory free  memory total",
        "CPU     cpu   A CPU        1.0 MiB      2.0 MiB",
        "Metal0  gpu   G            0.0 MiB      0.0 MiB",
    ]
    assert main(["devices", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == DEVICES


def test_pull_prints_the_path_and_nothing_else(monkeypatch, capsys) -> None:
    def fetch(source, progress, directory, revision):
        progress(1, 2)
        progress(1, None)
        assert (source, directory, revision) == ("a/b:Q4_K_M", "d", "v1")
        return Path("d/a/b/model.gguf")

    monkeypatch.setattr(pull_module, "fetch", fetch)
    assert main(["pull", "a/b:Q4_K_M", "--directory", "d", "--revision", "v1"]) == 0
    assert capsys.readouterr() == (f"{Path('d/a/b/model.gguf')}\n", "")


def test_a_failed_pull_is_one_line_and_code_1(monkeypatch, capsys) -> None:
    def fetch(*_args):
        raise DownloadError("there is no repository a/b")

    monkeypatch.setattr(pull_module, "fetch", fetch)
    assert main(["pull", "a/b"]) == 1
    assert capsys.readouterr() == ("", "ggml-engine: error: there is no repository a/b\n")


def test_a_hub_that_does_not_answer_is_one_line_and_code_1(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound and not listening: connections are refused
        endpoint = f"http://127.0.0.1:{free.getsockname()[1]}"
        done = subprocess.run(
            [sys.executable, "-m", "ggml_engine.cli", "pull", "a/b", "--directory", str(tmp_path)],
            capture_output=True, text=True, check=False, timeout=90, env={**os.environ, "HF_ENDPOINT": endpoint},
        )  # fmt: skip
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"ggml-engine: error: fetching a/b failed: .*\n", done.stderr)


def test_ctrl_c_in_a_pull_is_code_130_without_a_traceback(monkeypatch, capsys) -> None:
    def fetch(*_args):
        raise KeyboardInterrupt

    monkeypatch.setattr(pull_module, "fetch", fetch)
    assert main(["pull", "a/b"]) == 130
    assert capsys.readouterr() == ("", "\n")
