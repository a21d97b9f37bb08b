"""Which architectures have a graph here. A file of `architectures` is imported when a model asks for it."""

from __future__ import annotations

import importlib
from typing import cast

from ggml_engine.errors import HyperparameterError, UnsupportedArchitectureError
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


def load_architecture(name: str) -> Architecture:
    """The architecture of a name in `ARCHITECTURES`."""
    module = importlib.import_module(f"ggml_engine.models.architectures.{name.replace('-', '_')}")
    return cast("Architecture", module.ARCHITECTURE)


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
    return load_architecture(name)
