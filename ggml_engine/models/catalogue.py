"""What runs here, by name: every architecture with a graph of ours, and every one that libllama knows.

Loads nothing native: what a native architecture is comes from the docstring of its file.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib import resources

from ggml_engine.ggml.llama_architectures import LLAMA_ARCHITECTURES, Kind
from ggml_engine.models.registry import ARCHITECTURES, module_name


@dataclass(frozen=True, slots=True)
class Entry:
    """An architecture: a value of `general.architecture`.

    `engine` is what runs it by default: "native", "llama", or None for nothing here.
    """

    name: str
    kind: Kind

    @property
    def engine(self) -> str | None:
        """Native where there is a graph here, libllama's context for its other decoders."""
        if self.name in ARCHITECTURES:
            return "native"
        return "llama" if self.kind.is_decoder else None

    @property
    def models(self) -> str:
        """The models that people know it by; empty for one without a graph here."""
        return self._docstring()[0].partition(": ")[2].removesuffix(".") if self.engine == "native" else ""

    @property
    def details(self) -> str:
        """What is special, and the sources, in a line; empty for one without a graph here."""
        return " ".join(" ".join(self._docstring()[1:]).split()) if self.engine == "native" else ""

    def _docstring(self) -> list[str]:
        file = resources.files("ggml_engine.models.architectures") / f"{module_name(self.name)}.py"
        return (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").splitlines()


def catalogue() -> list[Entry]:
    """All of them, by name."""
    return [Entry(name, kind) for name, kind in LLAMA_ARCHITECTURES.items()]
