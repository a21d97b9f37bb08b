"""The versions that a report of a fault should name."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ggml_engine.errors import LibraryError


def version_line() -> str:
    """Versions of the package, of the loaded ggml, and of the package that ships it."""
    return f"ggml-engine {_of('ggml-engine')}, ggml {_ggml()}, llama-cpp-python {_of('llama-cpp-python')}"


def _of(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return "(not installed)"


def _ggml() -> str:
    from ggml_engine.ggml.library import load  # noqa: PLC0415 - native

    try:
        return load().version
    except LibraryError:
        return "(not usable)"
