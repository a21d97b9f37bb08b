"""The public names of the package: what they are, that they are there, and that importing them is cheap."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

import ggml_engine
from ggml_engine import errors

NAMES = {
    "CacheEntry",
    "Choice",
    "Reply",
    "ServingOptions",
    "ServingRequest",
    "ServingRuntime",
    "SessionInfo",
    "LeastRecentlyUsed",
    "Lookup",
    "Miss",
    "MissReason",
    "PrefixCache",
    "PromptCapture",
    "Protecting",
    "RetentionPolicy",
    "UnderPressure",
    "Conversation",
    "Encoder",
    "Engine",
    "GGUFFile",
    "GenConfig",
    "Generation",
    "SamplerConfig",
    "__version__",
    "EmbeddingInput",
    "PreparedInput",
    "Reason",
    "Runner",
    "RunnerOptions",
    "Session",
    "TokenLogprobs",
    "Update",
}
ERRORS = {
    name
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, Exception) and value.__module__ == errors.__name__
}

# names of modules that are, or load, something native or slow
HEAVY = {
    "numpy",
    "cffi",
    "_cffi_backend",
    "llama_cpp",
    "gguf",
    "jinja2",
    "click",
    "huggingface_hub",
    "importlib.metadata",
}


def _modules_after(statement: str) -> set[str]:
    code = f"import sys; before = set(sys.modules); {statement}; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    return set(done.stdout.split())


def test_the_public_names_are_these_and_every_error() -> None:
    assert set(ggml_engine.__all__) == NAMES | ERRORS
    assert list(ggml_engine.__all__) == sorted(ggml_engine.__all__)


@pytest.mark.parametrize("name", sorted(NAMES - {"__version__"}))
def test_a_public_name_is_the_class_of_that_name(name: str) -> None:
    value = getattr(ggml_engine, name)
    assert inspect.isclass(value)
    assert value.__name__ == name
    assert getattr(ggml_engine, name) is value


@pytest.mark.parametrize("name", sorted(ERRORS))
def test_an_error_of_the_package_is_the_one_that_is_raised(name: str) -> None:
    assert getattr(ggml_engine, name) is getattr(errors, name)


def test_the_tree_in_the_docstring_names_every_error() -> None:
    assert errors.__doc__ is not None
    drawn = {word for word in errors.__doc__.replace("─", " ").split() if word.endswith("Error")}
    assert drawn == ERRORS


def test_the_version_is_that_of_the_installed_distribution() -> None:
    from importlib.metadata import version

    assert ggml_engine.__version__ == version("ggml-engine")


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        ggml_engine.Motor  # noqa: B018


def test_dir_lists_names_that_were_not_used_yet() -> None:
    assert set(ggml_engine.__all__) <= set(dir(ggml_engine))


@pytest.mark.parametrize("statement", ["import ggml_engine", "from ggml_engine import GGUFError, PoolFullError"])
def test_importing_the_package_loads_nothing_native(statement: str) -> None:
    loaded = _modules_after(statement)
    assert "ggml_engine.errors" in loaded
    assert not loaded & HEAVY
    assert {name for name in loaded if name.startswith("ggml_engine")} == {"ggml_engine", "ggml_engine.errors"}


def test_the_cells_load_numpy_and_nothing_native_of_ours() -> None:
    loaded = _modules_after("import ggml_engine.pool.cells, ggml_engine.pool.read_plan")
    assert not loaded & (HEAVY - {"numpy"})
    assert not {name for name in loaded if name.startswith("ggml_engine.ggml")}


def test_lazy_names_are_imported_for_type_checkers_from_the_same_modules() -> None:
    tree = ast.parse(Path(str(ggml_engine.__file__)).read_text(encoding="utf-8"))
    guarded = next(node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    declared = {
        alias.name: node.module for node in guarded.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert declared == ggml_engine._LAZY
    assert declared.keys() == NAMES - {"__version__"}


@pytest.mark.parametrize(
    "name",
    [
        *(
            "hashlib",
            "secrets",
            "random",
            "tempfile",
            "subprocess",
            "asyncio",
            "jinja2",
            "llama_cpp",
            "huggingface_hub",
        ),
        *("ggml_engine.control.saved_file", "ggml_engine.ggml.gbnf", "ggml_engine.executor.llama", "ggml_engine.bench"),
    ],
)
def test_a_start_imports_nothing_that_it_does_not_need(name: str) -> None:
    assert name not in _imported_by_a_start()


@lru_cache(maxsize=1)
def _imported_by_a_start() -> set[str]:
    """Modules that are there when an engine loads and makes its first token."""
    parts = "ggml_engine.engine, ggml_engine.loading, ggml_engine.control.runner, ggml_engine.control.text"
    code = f"import sys; before = set(sys.modules); import {parts}; print(*sorted(set(sys.modules) - before))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())
