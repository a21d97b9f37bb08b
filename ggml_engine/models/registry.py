"""Which architectures have a graph here. A file of `architectures` is imported when a model asks for it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, cast

from ggml_engine.errors import HyperparameterError, UnsupportedArchitectureError
from ggml_engine.ggml.llama_architectures import LLAMA_ARCHITECTURES

if TYPE_CHECKING:  # what lists the names loads nothing
    from ggml_engine.ggml.gguf import GGUFFile
    from ggml_engine.models.architecture import Architecture

# values of `general.architecture`; the file of one is named after it, with _ for -
ARCHITECTURES = (
    "apertus",
    "arcee",
    "bailingmoe",
    "cohere2",
    "command-r",
    "deepseek",
    "deepseek2",
    "dots1",
    "ernie4_5",
    "ernie4_5-moe",
    "exaone4",
    "falcon",
    "gemma",
    "gemma2",
    "gemma3",
    "gemma4",
    "glm4",
    "glm4moe",
    "gpt-oss",
    "gpt2",
    "gptneox",
    "granite",
    "granitemoe",
    "hunyuan-dense",
    "internlm2",
    "llama",
    "llama4",
    "minicpm",
    "mistral3",
    "muse-glimmer",
    "nemotron",
    "olmo2",
    "olmoe",
    "phi2",
    "phi3",
    "qwen2",
    "qwen2moe",
    "qwen3",
    "qwen3moe",
    "seed_oss",
    "smollm3",
    "stablelm",
    "starcoder2",
)


def module_name(name: str) -> str:
    """The last part of the name of an architecture's module."""
    return name.replace("-", "_")


def load_architecture(name: str) -> Architecture:
    """The architecture of a name in `ARCHITECTURES`."""
    module = importlib.import_module(f"ggml_engine.models.architectures.{module_name(name)}")
    return cast("Architecture", module.ARCHITECTURE)


def find_architecture(file: GGUFFile) -> Architecture:
    """The architecture that the file names.

    Raises HyperparameterError when it names none, UnsupportedArchitectureError, saying what would run it, when there
    is no graph for it.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str):
        found = "none" if name is None else f"a value of another type ({name!r})"
        raise HyperparameterError("general.architecture", f"a string is needed, the file has {found}")
    if name not in ARCHITECTURES:
        raise UnsupportedArchitectureError(f"{file.path} holds a {_shown(name)} model, {_what_runs(name)}")
    return load_architecture(name)


def _shown(name: str) -> str:
    return repr(name) if len(name) <= 60 else f"{name[:60]!r}..."


def _what_runs(name: str) -> str:
    kind = LLAMA_ARCHITECTURES.get(name)
    if kind is None:
        return "which has no graph here, and which libllama does not know either: nothing here runs it"
    if not kind.is_decoder:
        return f"which is no decoder of text by itself ({kind.value}): nothing here runs it"
    return f"which has no graph here; libllama has one ({kind.value}): engine 'llama' (--engine llama) runs it"
