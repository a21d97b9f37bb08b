"""The one part of the package that is compiled; everything else is in pyproject.toml.

Optional: where there is no compiler, or one that does not know the processor's vectors, the install goes on, and
attention is computed by ggml's own operations.
"""

from setuptools import Extension, setup

setup(
    ext_modules=[
        Extension(
            "ggml_engine.native._cell_attention",
            sources=["ggml_engine/native/cell_attention.c", "ggml_engine/native/cell_attention_avx2.c"],
            depends=["ggml_engine/native/cell_attention.h", "ggml_engine/native/cell_attention.inc"],
            extra_compile_args=["-O3", "-fvisibility=hidden"],
            optional=True,
        )
    ]
)
