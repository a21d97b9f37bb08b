"""The archives hold the package and nothing else; the links at the top of the repository are only a view."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest
from compilers import has_compiler

pytestmark = pytest.mark.source_tree

ROOT = Path(__file__).parents[2]
LINKS = ("cli", "models", "pool")
COMPILED = "ggml_engine/native/_kernels"
KERNEL_SOURCES = {
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "ggml_engine" / "native").glob("*")  # none where the source tree is gone
    if path.suffix in {".c", ".h", ".inc"}
}


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with a source archive and the wheel that was built from it."""
    copy = tmp_path_factory.mktemp("source") / "tree"
    # what git would check out, links included; a build in place would leave its traces there
    ignored = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "__pycache__", "*.gguf", "*.so", "*.pyd")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=ignored)
    built = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built), str(copy)]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return built


def test_the_wheel_holds_only_the_package(archives: Path) -> None:
    (wheel,) = archives.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (entry_points,) = (archive.read(name).decode() for name in names if name.endswith("/entry_points.txt"))
        (metadata,) = (archive.read(name).decode() for name in names if name.endswith(".dist-info/METADATA"))
    assert not wheel.name.endswith("-any.whl"), "it holds what was compiled for one Python on one platform"
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"ggml_engine"}
    package = ROOT / "ggml_engine"
    sources = {path.relative_to(ROOT).as_posix() for path in package.rglob("*.py")}
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    compiled = {f"{COMPILED}{suffix}"} if has_compiler() else set()
    assert {name for name in names if name.startswith("ggml_engine/")} == sources | compiled | {
        "ggml_engine/py.typed",
        "ggml_engine/ggml/declarations.h",
        f"{COMPILED}.pyi",
    }
    assert "ggml-engine = ggml_engine.cli.main:main" in entry_points
    assert "License-Expression: MIT" in metadata
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_what_is_compiled_in_place_was_compiled_from_these_sources() -> None:
    """Or every other test would speak of code that is no longer there."""
    if not has_compiler():
        return
    from ggml_engine.native import _kernels

    sources = b"".join((ROOT / name).read_bytes() for name in sorted(KERNEL_SOURCES))
    assert zlib.crc32(sources) & 0x7FFFFFFF == _kernels.SOURCES_CRC, "python setup.py build_ext --inplace"


def test_the_source_archive_can_run_its_tests_and_holds_no_link(archives: Path) -> None:
    (source,) = archives.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        members = archive.getmembers()
    names = {member.name.partition("/")[2] for member in members}
    assert all(member.isfile() or member.isdir() for member in members)
    assert not {name for name in names if name.split("/")[0] in LINKS}
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "ggml_engine/ggml/declarations.h"} <= names
    assert KERNEL_SOURCES | {"setup.py", f"{COMPILED}.pyi"} <= names
    assert any(name.endswith(".inc") for name in KERNEL_SOURCES)
    tests = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("*.py")}
    assert tests <= names
    assert not {name for name in names if "__pycache__" in name or name.endswith((".pyc", ".gguf", ".so", ".pyd"))}


@pytest.mark.parametrize("name", LINKS)
def test_a_part_at_the_top_of_the_repository_is_a_relative_link_into_the_package(name: str) -> None:
    link = ROOT / name
    # where links cannot be made, git leaves a file with the target as its text
    target = os.readlink(link) if link.is_symlink() else link.read_text(encoding="utf-8")
    assert target == f"ggml_engine/{name}"
    assert (ROOT / target / "__init__.py").is_file()


@pytest.mark.parametrize("name", LINKS)
@pytest.mark.parametrize("statement", ["import {}", "from {} import thing", "import {}.thing"])
def test_an_import_through_a_link_is_refused_by_the_linter(name: str, statement: str) -> None:
    command = [sys.executable, "-m", "ruff", "check", "--select=TID251", "--output-format=concise"]
    done = subprocess.run(
        [*command, "--stdin-filename", str(ROOT / "ggml_engine" / "snippet.py"), "-"],
        input=f"{statement.format(name)}\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"ggml_engine.{name}" in done.stdout


def test_the_linter_looks_at_each_file_once() -> None:
    command = [sys.executable, "-m", "ruff", "check", "--show-files", str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    files = [Path(line) for line in done.stdout.splitlines()]
    assert ROOT / "ggml_engine" / "engine.py" in files
    assert len({file.resolve() for file in files}) == len(files)
    assert not {file for file in files if file.relative_to(ROOT).parts[0] in LINKS}
