"""The part of the package that is compiled; everything else is in pyproject.toml.

Optional: where there is no compiler, or one that does not know the processor's vectors, the install goes on. Attention
and products are computed by ggml's own operations then, and numpy finds the best of a row of logits.
"""

import sys
import zlib
from pathlib import Path

from setuptools import Extension, setup

_SOURCES = sorted(path for path in Path("ggml_engine/native").iterdir() if path.suffix in {".c", ".h", ".inc"})

# By which a test tells what was compiled here from what was compiled before a change; 31 bits are an int everywhere
_CRC = zlib.crc32(b"".join(path.read_bytes() for path in _SOURCES)) & 0x7FFFFFFF

setup(
    ext_modules=[
        Extension(
            "ggml_engine.native._kernels",
            sources=[path.as_posix() for path in _SOURCES if path.suffix == ".c"],
            depends=[path.as_posix() for path in _SOURCES if path.suffix != ".c"],
            define_macros=[("SOURCES_CRC", str(_CRC))],
            # Microsoft's compiler, which knows neither, finds neither attention nor products in the sources
            extra_compile_args=[] if sys.platform == "win32" else ["-O3", "-fvisibility=hidden"],
            optional=True,
        ),
    ]
)
