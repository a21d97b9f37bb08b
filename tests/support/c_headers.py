"""Reads C declarations into plain values, so that ours can be compared with those of the installed headers.

Types become text with every typedef resolved (`struct ggml_backend *`), enums name their values, structs list their
fields in order. System headers are replaced by a prelude of a dozen typedefs: no libc's attributes are met.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pycparser import c_ast, c_parser

# name: bytes, on the 64-bit machines that the libraries are built for
BASIC = {
    "bool": 1, "int8_t": 1, "uint8_t": 1, "int16_t": 2, "uint16_t": 2, "int32_t": 4, "uint32_t": 4, "int64_t": 8,
    "uint64_t": 8, "size_t": 8, "ptrdiff_t": 8, "intptr_t": 8, "uintptr_t": 8, "FILE": 0,
}  # fmt: skip
PRELUDE = "".join(f"typedef int {name};\n" for name in BASIC)
HEADERS = ("ggml.h", "ggml-alloc.h", "ggml-backend.h", "ggml-cpu.h", "gguf.h", "llama.h")
SYSTEM_HEADERS = ("stddef.h", "stdint.h", "stdbool.h", "stdio.h", "stdlib.h", "string.h", "assert.h")


@dataclass
class Declarations:
    """What a C text declares."""

    functions: dict[str, str] = field(default_factory=dict)
    enums: dict[str, dict[str, int]] = field(default_factory=dict)
    structs: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    typedefs: dict[str, str] = field(default_factory=dict)


def include_directory() -> Path:
    """Where llama-cpp-python installed its headers."""
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("llama_cpp is not installed")
    directory = Path(next(iter(spec.submodule_search_locations))).parent / "include"
    if not (directory / "llama.h").is_file():
        raise FileNotFoundError(f"{directory} holds no llama.h")
    return directory


def compiler() -> str:
    """The C compiler: `CC`, cc or gcc."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        if name and (found := shutil.which(name)):
            return found
    raise FileNotFoundError("a C compiler is needed to read the headers")


def include_all() -> str:
    """The C lines that include the headers."""
    return "".join(f'#include "{name}"\n' for name in HEADERS)


def preprocessed(work: Path) -> str:
    """The installed headers after the preprocessor, without the system's."""
    empty = work / "system"
    empty.mkdir()
    for name in SYSTEM_HEADERS:
        (empty / name).write_text("")
    source = work / "all.c"
    source.write_text(include_all())
    command = [compiler(), "-E", "-P", "-nostdinc", "-I", str(empty), "-I", str(include_directory())]
    command += ["-D__attribute__(x)=", "-D__extension__=", str(source)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


class _Reader:
    def __init__(self) -> None:
        self.found = Declarations()
        self._typedefs: dict[str, c_ast.Node] = {}
        self._values: dict[str, int] = {}

    def read(self, text: str) -> Declarations:
        tree = c_parser.CParser().parse(PRELUDE + text)
        for node in tree.ext:
            self._collect(node)
            if isinstance(node, c_ast.Typedef):
                self._typedefs[node.name] = node.type
                if node.name not in BASIC:
                    self.found.typedefs[node.name] = self.type_text(node.type)
            elif isinstance(node, c_ast.Decl) and isinstance(node.type, c_ast.FuncDecl):
                self.found.functions[node.name] = self.type_text(node.type)
        return self.found

    def _collect(self, node: c_ast.Node) -> None:
        """Enums and structs that are defined anywhere inside of a declaration."""
        if isinstance(node, c_ast.Enum) and node.values is not None:
            self._enum(node)
        for _, child in node.children():
            self._collect(child)
        if isinstance(node, c_ast.Struct) and node.decls is not None and node.name:
            self.found.structs[node.name] = [(decl.name, self.type_text(decl.type)) for decl in node.decls]

    def _enum(self, node: c_ast.Enum) -> None:
        following, values = 0, {}
        for entry in node.values.enumerators:
            if entry.value is not None:
                following = self.number(entry.value)
            values[entry.name] = self._values[entry.name] = following
            following += 1
        if node.name:
            self.found.enums[node.name] = values

    def number(self, node: c_ast.Node) -> int:
        """The value of a constant expression."""
        if isinstance(node, c_ast.Constant):
            return int(node.value.rstrip("uUlL"), 0)
        if isinstance(node, c_ast.ID):
            return self._values[node.name]
        if isinstance(node, c_ast.UnaryOp):
            if node.op == "sizeof":
                return BASIC[self.type_text(node.expr.type)]
            return {"-": lambda n: -n, "+": lambda n: n, "~": lambda n: ~n}[node.op](self.number(node.expr))
        if isinstance(node, c_ast.BinaryOp):
            left, right = self.number(node.left), self.number(node.right)
            return {
                "+": left + right, "-": left - right, "*": left * right, "<<": left << max(right, 0), "|": left | right,
                "/": left // right if right else 0,
            }[node.op]  # fmt: skip
        raise ValueError(f"no constant: {type(node).__name__}")

    def type_text(self, node: c_ast.Node) -> str:
        """A type as text, names of parameters left out, typedefs resolved."""
        inner = getattr(node, "type", None)
        if isinstance(node, c_ast.IdentifierType):
            name = " ".join(node.names)
            known = name in self._typedefs and name not in BASIC
            text = self.type_text(self._typedefs[name]) if known else name
        elif isinstance(node, (c_ast.Struct, c_ast.Union, c_ast.Enum)):
            text = f"{type(node).__name__.lower()} {node.name}"
        elif isinstance(node, c_ast.PtrDecl):
            text = " ".join([self.type_text(inner), "*", *node.quals])
        elif isinstance(node, c_ast.ArrayDecl):
            size = "" if node.dim is None else str(self.number(node.dim))
            text = f"{self.type_text(inner)} [{size}]"
        elif isinstance(node, c_ast.FuncDecl):
            text = f"{self.type_text(inner)} ({', '.join(self._parameters(node))})"
        elif isinstance(node, c_ast.TypeDecl):
            text = " ".join([*node.quals, self.type_text(inner)])
        else:  # a parameter, a field, the operand of sizeof
            text = self.type_text(inner)
        return text

    def _parameters(self, node: c_ast.FuncDecl) -> Iterator[str]:
        for parameter in node.args.params if node.args else []:
            if isinstance(parameter, c_ast.EllipsisParam):
                yield "..."
                continue
            text = self.type_text(parameter)
            if text != "void":
                yield re.sub(r" \[\d*\]$", " *", text)  # an array parameter is a pointer


def read(text: str) -> Declarations:
    """The declarations of a preprocessed C text."""
    return _Reader().read(text)
