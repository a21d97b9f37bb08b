"""What runs here, as `ggml-engine models` and docs/models.md say it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import gguf
import pytest
from architecture_rows import ROWS
from gguf_forge import GGUFForge

from ggml_engine.cli.main import main
from ggml_engine.cli.models_page import page
from ggml_engine.errors import UnsupportedArchitectureError
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.llama_architectures import LLAMA_ARCHITECTURES, Kind
from ggml_engine.models import architectures
from ggml_engine.models.catalogue import Entry, catalogue
from ggml_engine.models.registry import ARCHITECTURES, find_architecture

ROOT = Path(__file__).parents[2]


def test_the_registry_names_each_architecture_once_and_in_order() -> None:
    assert list(ARCHITECTURES) == sorted(set(ARCHITECTURES))
    files = {path.stem for path in Path(architectures.__path__[0]).glob("[a-z]*.py")}
    assert files == {name.replace("-", "_") for name in ARCHITECTURES}


def test_every_name_is_in_the_installed_libllama() -> None:
    package = find_spec("llama_cpp")  # found, not imported: that would load it
    assert package is not None
    assert package.origin is not None
    libraries = (Path(package.origin).parent / "lib").glob("*llama.*")
    (library,) = [path for path in libraries if path.suffix in {".so", ".dylib", ".dll"}]
    names = set(re.findall(rb"[\x20-\x7e]+\0", library.read_bytes()))
    endings = {name.encode() + b"\0" for name in LLAMA_ARCHITECTURES}
    # the linker may keep a short one as the end of a longer one
    missing = [ending for ending in endings if not any(name.endswith(ending) for name in names)]
    assert missing == []


def test_every_name_that_gguf_knows_and_every_native_one_is_there() -> None:
    assert set(gguf.MODEL_ARCH_NAMES.values()) <= set(LLAMA_ARCHITECTURES)
    assert set(ARCHITECTURES) <= set(LLAMA_ARCHITECTURES)
    assert {LLAMA_ARCHITECTURES[name] for name in ARCHITECTURES} == {Kind.ATTENTION}


@pytest.mark.parametrize(
    ("name", "kind", "engine"),
    [
        ("llama", Kind.ATTENTION, "native"),
        ("bloom", Kind.ATTENTION, "llama"),
        ("mamba", Kind.RECURRENT, "llama"),
        ("lfm2", Kind.HYBRID, "llama"),
        ("bert", Kind.ENCODER, None),
        ("t5", Kind.ENCODER_DECODER, None),
        ("dream", Kind.DIFFUSION, None),
        ("eagle3", Kind.DRAFT, None),
        ("wavtokenizer-dec", Kind.SPEECH, None),
        ("clip", Kind.VISION, None),
        ("gptj", Kind.NAME_ONLY, None),
    ],
)
def test_an_entry_says_what_runs_it(name: str, kind: Kind, engine: str | None) -> None:
    (entry,) = [entry for entry in catalogue() if entry.name == name]
    assert (entry.kind, entry.engine) == (kind, engine)


def test_kinds_are_those_of_the_rows() -> None:
    """What the rows say of a memory is tested on libllama."""
    memories = {Kind.ATTENTION: "attention", Kind.HYBRID: "hybrid", Kind.RECURRENT: "recurrent"}
    said = {row.architecture: memories.get(LLAMA_ARCHITECTURES[row.architecture], "none") for row in ROWS.values()}
    assert said == {row.architecture: row.memory for row in ROWS.values()}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_docstring_of_an_architecture_says_what_it_is_and_from_where(name: str) -> None:
    entry = Entry(name, LLAMA_ARCHITECTURES[name])
    assert entry._docstring()[0].startswith(f"`{name}`: ")
    assert entry.models
    assert "llama.cpp's src/models/" in entry.details


@pytest.mark.source_tree
def test_the_page_is_that_of_the_registry() -> None:
    written = (ROOT / "docs/models.md").read_text(encoding="utf-8")
    assert written == page(), "python -m ggml_engine.cli.models_page > docs/models.md"


def test_the_page_counts_what_it_lists() -> None:
    def numbers(label: str) -> list[int]:
        (line,) = re.findall(rf"^\| {re.escape(label)} \| (.*) \|$", page(), re.MULTILINE)
        return [int(number) for number in line.split(" | ")]

    kinds = [numbers(kind.value) for kind in Kind]
    assert [sum(column) for column in zip(*kinds, strict=True)] == numbers("**all**")
    assert numbers("**all**")[0] == len(LLAMA_ARCHITECTURES)
    decoders = numbers("**all decoders**")
    assert decoders[1] == len(ARCHITECTURES)
    assert decoders[0] == sum(decoders[1:])
    native, through, others = re.split(r"^## .*$", page(), flags=re.MULTILINE)[1:]
    assert native.count("\n| `") == decoders[1]
    assert len(re.findall("`[^`]+`", through)) == decoders[2]
    assert len(re.findall("`[^`]+`", others)) == numbers("**all**")[3]


def test_the_command_lists_all_of_them(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["architecture", "runs", "kind", "models"]
    assert len(lines) == 1 + len(LLAMA_ARCHITECTURES)
    assert any(re.fullmatch(r"qwen3 +native +decoder with attention +Qwen 3, dense", line) for line in lines)
    assert any(re.fullmatch(r"mamba +through libllama +decoder with a recurrent state", line) for line in lines)
    assert any(re.fullmatch(r"bert +no +encoder", line) for line in lines)
    assert main(["models", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {row["architecture"]: row["engine"] for row in found} == {entry.name: entry.engine for entry in catalogue()}
    assert {"architecture": "bloom", "engine": "llama", "kind": "decoder with attention", "models": ""} in found


def test_the_command_loads_nothing_native() -> None:
    code = """
import sys
import ggml_engine.models.architectures as architectures
from ggml_engine.cli.main import main
main(["models", "--json"])
print([name for name in ("numpy", "cffi", "_cffi_backend", "llama_cpp", "jinja2") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("bloom", ("'bloom'", "no graph here", "libllama", "decoder with attention", "--engine llama")),
        ("mamba", ("'mamba'", "recurrent", "--engine llama")),
        ("bert", ("'bert'", "encoder", "nothing here runs it")),
        ("llama9", ("'llama9'", "libllama does not know", "nothing here runs it")),
        ("x" * 5000, ("'" + "x" * 60 + "'...", "nothing here runs it")),
    ],
)
def test_an_architecture_without_a_graph_is_refused_with_what_would_run_it(
    tmp_path: Path, name: str, parts: tuple[str, ...]
) -> None:
    forge = GGUFForge()
    forge.put("general.architecture", name)
    path = forge.write(tmp_path / "model.gguf")
    with GGUFFile.open(path) as file, pytest.raises(UnsupportedArchitectureError) as caught:
        find_architecture(file)
    message = str(caught.value)
    assert str(path) in message
    assert all(part in message for part in parts)
    assert ("--engine" in message) == (Entry(name, LLAMA_ARCHITECTURES.get(name, Kind.NAME_ONLY)).engine == "llama")


def added_lines() -> dict[str, str]:
    """What docs/adding-a-model.md says to add, by the file that it says."""
    text = (ROOT / "docs/adding-a-model.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^`([^`\n]+)`\n\n```diff\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return {
        name: "".join(f"{line[1:]}\n" for line in block.splitlines() if line.startswith("+")) for name, block in blocks
    }


@pytest.mark.source_tree
def test_the_example_of_an_added_architecture_is_what_is_there() -> None:
    added = added_lines()
    assert set(added) == {
        "ggml_engine/models/registry.py",
        "tests/support/architecture_rows.py",
        "ggml_engine/models/architectures/arcee.py",
    }
    for name, lines in added.items():
        assert lines in (ROOT / name).read_text(encoding="utf-8")
    assert added["ggml_engine/models/architectures/arcee.py"] == (
        ROOT / "ggml_engine/models/architectures/arcee.py"
    ).read_text(encoding="utf-8")


@pytest.mark.source_tree
def test_what_the_page_about_adding_names_is_there() -> None:
    text = (ROOT / "docs/adding-a-model.md").read_text(encoding="utf-8")
    paths = set(re.findall(r"\b(?:ggml_engine|models|tests|docs)/[\w/]+(?:\.py|\.md|/)", text))
    assert len(paths) > 12
    missing = [path for path in paths if not any((ROOT / base / path).exists() for base in ("", "ggml_engine"))]
    assert missing == []
    blocks = (ROOT / "ggml_engine/models/blocks.py").read_text(encoding="utf-8")
    (steps,) = re.findall(r"has the steps: ([^;]+);", text)
    assert [step for step in re.findall(r"`(\w+)`", steps) if f"    def {step}(" not in blocks] == []
