"""README.md is run: its Python example, its first command, and every command line that it shows is accepted."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    """The fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def command_lines() -> list[list[str]]:
    """Arguments of every `ggml-engine` that begins a line, or a part of a chain of commands, in a block."""
    lines = [line for block in (*blocks("bash"), *blocks("text")) for line in block.splitlines()]
    parts = [shlex.split(part) for line in lines if "ggml-engine " in line for part in line.split(" && ")]
    return [part[1:] for part in parts if part and part[0] in {"ggml-engine", ".venv/bin/ggml-engine"}]


def spelled_options() -> set[str]:
    """Options in the table of `run`."""
    rows = re.findall(r"^\| (`-.*?) \| ", README, re.MULTILINE)
    return {
        option for row in rows for code in re.findall(r"`(.+?)`", row) for option in re.findall(r"^--?\w[\w-]*", code)
    }


def run_module(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, input="", capture_output=True, text=True, timeout=300, check=False
    )


def example_with(text: str) -> str:
    """The one Python example that has this text."""
    (found,) = (block for block in blocks("python") if text in block)
    return found


def test_the_readme_shows_one_command_for_the_answer_and_one_for_the_tests() -> None:
    answer, tests = (block.strip() for block in blocks("bash"))
    for command in (answer, tests):
        assert "\n" not in command
        assert command.startswith("python3 -m venv .venv && .venv/bin/pip install -e ")
    assert ".venv/bin/ggml-engine run smollm2" in answer
    assert tests.endswith('.venv/bin/python -m pytest -n 2 --dist loadfile -m "not slow"')


def test_the_first_python_example_runs(tmp_path: Path) -> None:
    example, *_ = blocks("python")
    (tmp_path / "example.py").write_text(example, encoding="utf-8")
    done = run_module("-W", "error", "example.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert len(done.stdout.split()) > 20, done.stdout
    assert done.stderr == ""


def test_the_example_of_sessions_runs(tmp_path: Path) -> None:
    example = example_with("clone_async(8)")
    (tmp_path / "example.py").write_text(example, encoding="utf-8")
    done = run_module("-W", "error", "example.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("length") == 3
    assert done.stderr == ""


def test_the_example_of_prefixes_runs(tmp_path: Path) -> None:
    example = example_with("capture.at_end()")
    (tmp_path / "example.py").write_text(example, encoding="utf-8")
    done = run_module("-W", "error", "example.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    evaluated = [(int(n), int(total)) for n, total in re.findall(r"evaluated (\d+) of (\d+)", done.stdout)]
    assert len(evaluated) == 3
    assert evaluated[0][0] == evaluated[0][1]
    assert evaluated[1][0] < evaluated[1][1] // 2  # the system message was there
    assert evaluated[2][0] == 1
    assert done.stderr == ""


def test_the_example_of_embeddings_runs(tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(example_with("engine.embed("), encoding="utf-8")
    done = run_module("-W", "error", "example.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert done.stderr == ""


def test_the_example_of_a_restart_evaluates_one_token_the_second_time(tmp_path: Path) -> None:
    example = example_with("cache.save(")
    (tmp_path / "example.py").write_text(example, encoding="utf-8")
    for start, (loaded, is_first) in enumerate([("nothing loaded: missing", True), ("loaded 1 prefixes", False)]):
        done = run_module("-W", "error", "example.py", cwd=tmp_path)
        assert done.returncode == 0, (start, done.stderr)
        assert loaded in done.stdout
        ((n, total),) = re.findall(r"evaluated (\d+) of (\d+)", done.stdout)
        assert int(n) == (int(total) if is_first else 1)
        assert "['prefix-cache', 'seasons']" in done.stdout
        assert done.stderr == ""


def test_the_example_of_many_sequences_runs(tmp_path: Path) -> None:
    example = example_with("Batch.of_sequence")
    (tmp_path / "example.py").write_text(example, encoding="utf-8")
    done = run_module("-W", "error", "example.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 3
    assert done.stderr == ""


def test_the_first_command_ends_with_an_answer(tmp_path: Path) -> None:
    program, *arguments = shlex.split(blocks("bash")[0].rsplit(" && ", maxsplit=1)[-1])
    assert program == ".venv/bin/ggml-engine"
    done = run_module("-m", "ggml_engine.cli", *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) > 5, done.stdout


@pytest.mark.parametrize("arguments", command_lines(), ids=" ".join)
def test_a_command_line_is_accepted(arguments: list[str]) -> None:
    from ggml_engine.cli.main import cli

    name, *rest = arguments
    command = cli.commands[name]
    if "--help" not in rest:
        # parses and checks, runs nothing
        command.make_context(name, rest)


def test_the_table_of_options_names_options_of_run() -> None:
    from ggml_engine.cli.main import cli

    accepted = {
        spelling
        for param in cli.commands["run"].params
        if isinstance(param, click.Option)
        for spelling in (*param.opts, *param.secondary_opts)
    }
    spelled = spelled_options()
    assert {"--greedy", "--no-mmap", "--json-schema", "-n"} <= spelled
    assert spelled <= accepted


@pytest.mark.source_tree
def test_the_layout_names_what_is_there() -> None:
    (layout,) = (block for block in blocks("text") if block.startswith("ggml_engine/ "))
    for line in layout.splitlines():
        names, _, _ = line.strip().partition("   ")
        inside = ROOT / "ggml_engine" if line.startswith("  ") else ROOT
        for name in re.split(r",\s+|\s{2,}", names):
            assert (inside / name.split(" ")[0]).exists(), name
