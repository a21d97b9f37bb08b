"""Our C declarations are those of the headers that llama-cpp-python installs, and the committed module is theirs."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import c_headers
import pytest
from c_headers import Declarations

from ggml_engine.ggml import build_bindings, library
from ggml_engine.ggml.library import ffi

# Fields that we declare as int where the header has an enum that we need no value of.
ENUMS_AS_INT = {
    ("ggml_tensor", "op"): "enum ggml_op",
    ("llama_model_params", "split_mode"): "enum llama_split_mode",
    ("llama_model_params", "load_mode"): "enum llama_load_mode",
    ("llama_model_params", "lazy_mode"): "enum llama_lazy_mode",
    ("llama_context_params", "ctx_type"): "enum llama_context_type",
    ("llama_context_params", "rope_scaling_type"): "enum llama_rope_scaling_type",
    ("llama_context_params", "pooling_type"): "enum llama_pooling_type",
    ("llama_context_params", "attention_type"): "enum llama_attention_type",
    ("llama_context_params", "flash_attn_type"): "enum llama_flash_attn_type",
}
SECTION = re.compile(r"/\* ==== lib(ggml-base|ggml-cpu|ggml|llama):")


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> Declarations:
    return c_headers.read(c_headers.preprocessed(tmp_path_factory.mktemp("headers")))


@pytest.fixture(scope="module")
def ours() -> Declarations:
    return c_headers.read(build_bindings.declarations())


def differences(ours: Declarations, headers: Declarations) -> list[str]:
    """What is declared otherwise, one line each."""
    found = []
    for name, prototype in ours.functions.items():
        if headers.functions.get(name) != prototype:
            found.append(f"{name}: ours {prototype}, the header's {headers.functions.get(name)}")
    for name, values in ours.enums.items():
        if headers.enums.get(name) != values:
            found.append(f"enum {name}: ours {values}, the header's {headers.enums.get(name)}")
    for name, fields in ours.structs.items():
        theirs = headers.structs.get(name)
        expected = [(field, ENUMS_AS_INT.get((name, field), kind)) for field, kind in fields]
        if theirs != expected:
            found.append(f"struct {name}: ours {expected}, the header's {theirs}")
    for name, meaning in ours.typedefs.items():
        if name in headers.typedefs and headers.typedefs[name] != meaning:
            found.append(f"typedef {name}: ours {meaning}, the header's {headers.typedefs[name]}")
    return found


def test_every_prototype_enum_struct_and_typedef_is_the_headers(ours: Declarations, headers: Declarations) -> None:
    assert differences(ours, headers) == []


def test_the_comparison_sees_everything_that_is_declared(ours: Declarations) -> None:
    text = build_bindings.declarations()
    assert len(ours.functions) == len(set(re.findall(r"\b(\w+)\([^*]", re.sub(r"typedef[^;]*\(\*[^;]*;", "", text))))
    assert set(ours.structs) == set(re.findall(r"struct (\w+) \{", text))
    assert set(ours.enums) == set(re.findall(r"enum (\w+) \{", text))
    assert len(ours.functions) > 100


MUTATIONS = {
    "a parameter's type": ("struct ggml_tensor * a, float eps)", "struct ggml_tensor * a, double eps)"),
    "a return type": ("int64_t ggml_blck_size(", "int32_t ggml_blck_size("),
    "two parameters swapped": ("size_t offset, size_t size);", "int offset, size_t size);"),
    "a lost const": ("void ggml_backend_tensor_set(struct ggml_tensor * tensor, const void * data", "void ggml_backend_tensor_set(struct ggml_tensor * tensor, void * data"),
    "an enum for an int": ("enum ggml_prec prec);", "int prec);"),
    "an unknown function": ("void ggml_free(", "void ggml_freed("),
    "an enum value": ("GGML_TYPE_MXFP4 = 39", "GGML_TYPE_MXFP4 = 38"),
    "a missing enum value": ("GGML_PREC_BF16 = 15, ", ""),
    "fields swapped": ("bool no_alloc;\n    bool load_mtp;", "bool load_mtp;\n    bool no_alloc;"),
    "an array's length": ("struct ggml_tensor * src[10];", "struct ggml_tensor * src[8];"),
    "a missing field": ("    bool load_mtp;\n", ""),
    "a typedef": ("typedef int32_t llama_token;", "typedef int64_t llama_token;"),
    "a callback": ("typedef bool (*ggml_abort_callback)(void * data);", "typedef void (*ggml_abort_callback)(void * data);"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_declaration_is_told(name: str, headers: Declarations) -> None:
    before, after = MUTATIONS[name]
    text = build_bindings.declarations()
    assert before in text
    assert differences(c_headers.read(text.replace(before, after, 1)), headers)


# ---- layout, as the compiler has it


def struct_names(ours: Declarations) -> list[str]:
    return [f"struct {name}" for name in ours.structs]


def layout_program(names: list[str]) -> str:
    lines = []
    for name in names:
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        for field, _ in ffi.typeof(name).fields:
            member = f"(({name} *) 0)->{field}"
            lines.append(f'printf("{name}.{field} %zu %zu\\n", offsetof({name}, {field}), sizeof({member}));')
    body = "\n    ".join(lines)
    return f"#include <stdio.h>\n#include <stddef.h>\n{c_headers.include_all()}int main(void) {{\n    {body}\n    return 0;\n}}\n"


def our_layout(names: list[str]) -> list[str]:
    lines = []
    for name in names:
        lines.append(f"{name} {ffi.sizeof(name)}")
        for field, about in ffi.typeof(name).fields:
            lines.append(f"{name}.{field} {ffi.offsetof(name, field)} {ffi.sizeof(about.type)}")
    return lines


def test_every_struct_is_laid_out_as_the_compiler_lays_out_the_headers(tmp_path: Path, ours: Declarations) -> None:
    names = struct_names(ours)
    wanted = {
        f"struct {name}" for name in ("ggml_tensor", "llama_model_params", "ggml_backend_dev_props", "llama_token_data")
    }
    assert wanted <= set(names)
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text(layout_program(names))
    command = [c_headers.compiler(), "-I", str(c_headers.include_directory()), "-o", str(program), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    printed = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout.splitlines()
    assert printed == our_layout(names)


# ---- symbols


def declared_by_library() -> dict[str, set[str]]:
    """Function names by the library of their section in declarations.h."""
    pieces = SECTION.split(build_bindings.DECLARATIONS.read_text(encoding="utf-8"))
    found: dict[str, set[str]] = {}
    preamble = pieces[0]
    for name, text in zip(pieces[1::2], pieces[2::2], strict=True):
        cleaned = re.sub(r"/\*.*?\*/", "", preamble + "/* */" + text.partition("*/")[2], flags=re.DOTALL)
        found.setdefault(name, set()).update(re.findall(r"^[\w* ]+?\b(\w+)\(", cleaned, flags=re.MULTILINE))
    return found


def exported(path: Path) -> set[str]:
    """The functions that a library defines itself; dlsym would find those of its dependencies, too."""
    tool = shutil.which("nm")
    if tool is None:
        raise FileNotFoundError("nm (binutils) is needed to list the symbols of a library")
    options = ["-gU"] if sys.platform == "darwin" else ["-D", "--defined-only"]
    lines = subprocess.run([tool, *options, str(path)], check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[-1].partition("@")[0].removeprefix("_" if sys.platform == "darwin" else "") for line in lines}


def test_every_function_is_exported_by_the_library_of_its_section(ours: Declarations) -> None:
    sections = declared_by_library()
    assert set().union(*sections.values()) == set(ours.functions)
    directory = library.find_directory()
    for name, functions in sections.items():
        assert functions - exported(directory / library.library_file(name)) == set()


def test_every_function_can_be_looked_up(ours: Declarations) -> None:
    libraries = library.load()
    handles = {"ggml-base": libraries.base, "ggml": libraries.registry, "llama": libraries.llama}
    handles["ggml-cpu"] = libraries.registry  # which it is a part of: it may lie there twice, under two names
    for name, functions in declared_by_library().items():
        for function in functions:
            assert ffi.typeof(getattr(handles[name], function)).kind == "function"


# ---- the generated module


def test_the_committed_module_is_what_the_declarations_generate(tmp_path: Path, capsys: Any) -> None:
    # cffi has written the same text since 1.4 (its `_version = 0x2601` names that format); should a newer one write
    # another, regenerate with it and raise the lower bound in pyproject.toml.
    target = tmp_path / "_bindings.py"
    build_bindings.generate(target)
    committed = build_bindings.BINDINGS.read_bytes()
    assert target.read_bytes() == committed, "run: python -m ggml_engine.ggml.build_bindings"


def test_a_changed_declaration_changes_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = tmp_path / "declarations.h"
    changed.write_text(build_bindings.DECLARATIONS.read_text().replace("float eps);", "double eps);"))
    monkeypatch.setattr(build_bindings, "DECLARATIONS", changed)
    build_bindings.generate(tmp_path / "_bindings.py")
    assert (tmp_path / "_bindings.py").read_bytes() != build_bindings.BINDINGS.read_bytes()


def test_generating_in_place_writes_next_to_the_declarations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_bindings, "BINDINGS", tmp_path / "_bindings.py")
    assert build_bindings.main() == 0
    assert (tmp_path / "_bindings.py").is_file()
