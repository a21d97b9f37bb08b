"""The parts of the package that are compiled; everything else is in pyproject.toml.

Optional: where there is no compiler, or one that does not know the processor's vectors, the install goes on. Attention
is computed by ggml's own operations then, and numpy finds the best of a row of logits.
"""

import sys

from setuptools import Extension, setup

_NATIVE = "ggml_engine/native"

setup(
    ext_modules=[
        Extension(
            "ggml_engine.native._cell_attention",
            sources=[
                *(f"{_NATIVE}/cell_attention{kind}.c" for kind in ("", "_avx2", "_neon")),
                f"{_NATIVE}/joint_products.c",
            ],
            depends=[
                f"{_NATIVE}/{name}"
                for name in (
                    "cell_attention.h",
                    "cell_attention.inc",
                    "cell_products.inc",
                    "ggml_tensor.h",
                    "joint_products.h",
                )
            ],
            # Microsoft's compiler, which knows neither, finds no kernel in the sources
            extra_compile_args=[] if sys.platform == "win32" else ["-O3", "-fvisibility=hidden"],
            optional=True,
        ),
        Extension(
            "ggml_engine.native._best_logits",
            sources=[f"{_NATIVE}/best_logits.c"],
            extra_compile_args=[] if sys.platform == "win32" else ["-O3", "-fvisibility=hidden"],
            optional=True,
        ),
    ]
)
