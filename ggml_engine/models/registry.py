"""Which architectures have a graph here."""

from __future__ import annotations

from ggml_engine.errors import HyperparameterError, UnsupportedArchitectureError
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.models import gemma3, llama
from ggml_engine.models.architecture import Architecture

ARCHITECTURES: dict[str, Architecture] = {
    module.ARCHITECTURE.name: module.ARCHITECTURE for module in (gemma3, llama)
}  # fmt: skip


def find_architecture(file: GGUFFile) -> Architecture:
    """The architecture that the file names.

    Raises HyperparameterError when it names none, UnsupportedArchitectureError, listing the known ones, when there
    is no graph for it.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        found = "none" if name is None else f"a value of another type ({name!r})"
        raise HyperparameterError("general.architecture", f"a string is needed, the file has {found}")
    if name not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise UnsupportedArchitectureError(
            f"{file.path} holds a {name!r} model; there are graphs for: {known}; engine 'llama' runs what libllama does"
        )
    return ARCHITECTURES[name]
