"""Turns `declarations.h` into `_bindings.py`, the out-of-line ABI module of cffi.

Run `python -m ggml_engine.ggml.build_bindings` after changing the declarations; pre-commit does, and a test compares.
The generated module parses no C when it is imported (about 1 ms, where parsing the text costs some tens).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import cffi

HERE = Path(__file__).resolve().parent
DECLARATIONS = HERE / "declarations.h"
BINDINGS = HERE / "_bindings.py"


def declarations() -> str:
    """The C declarations without comments."""
    return re.sub(r"/\*.*?\*/", "", DECLARATIONS.read_text(encoding="utf-8"), flags=re.DOTALL)


def generate(target: Path) -> None:
    """Write the generated module to `target`."""
    ffi = cffi.FFI()
    ffi.set_source("ggml_engine.ggml._bindings", None)
    ffi.cdef(declarations())
    ffi.emit_python_code(str(target))


def main() -> int:
    """Regenerate in place."""
    generate(BINDINGS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
