"""`docs/models.md` from the registry: `python -m ggml_engine.cli.models_page > docs/models.md`.

A test regenerates the page and compares.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from ggml_engine.ggml.llama_architectures import Kind
from ggml_engine.models.catalogue import Entry, catalogue

_FIRST_LINES = """\
# Models

Made by `python -m ggml_engine.cli.models_page`; change `models/registry.py`, the docstrings of
`models/architectures/` or `ggml/llama_architectures.py`, not this page. `ggml-engine models` shows the same on a
terminal.

An architecture is the value of `general.architecture` in a GGUF file. Native ones have a graph of this package, with
its pool of K/V cells; other decoders run through libllama's own context (`--engine llama`, which `auto` takes for
them). [How an architecture is added](adding-a-model.md).
"""


def page() -> str:
    """The page, in Markdown."""
    return "\n".join(_lines(catalogue())) + "\n"


def _lines(entries: list[Entry]) -> Iterator[str]:
    yield _FIRST_LINES
    yield "| kind | architectures | native | through libllama | not |\n| --- | ---: | ---: | ---: | ---: |"
    decoders = [entry for entry in entries if entry.kind.is_decoder]
    for kind in Kind:
        yield _counts(kind.value, [entry for entry in entries if entry.kind is kind])
    yield _counts("**all decoders**", decoders)
    yield _counts("**all**", entries)
    yield "\n## Native\n\n| architecture | models | what is special, and sources |\n| --- | --- | --- |"
    for entry in entries:
        if entry.engine == "native":
            yield f"| `{entry.name}` | {_cell(entry.models)} | {_cell(entry.details)} |"
    yield "\n## Through libllama\n"
    yield from _names([entry for entry in entries if entry.engine == "llama"])
    yield "\n## Not\n\nlibllama knows these names; they generate no text by themselves.\n"
    yield from _names([entry for entry in entries if entry.engine is None])


def _counts(label: str, entries: list[Entry]) -> str:
    counts = [sum(entry.engine == engine for entry in entries) for engine in ("native", "llama", None)]
    return f"| {label} | {len(entries)} | {' | '.join(map(str, counts))} |"


def _names(entries: list[Entry]) -> Iterator[str]:
    for kind in Kind:
        if names := [f"`{entry.name}`" for entry in entries if entry.kind is kind]:
            yield f"* {kind.value}: {', '.join(names)}"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(page())
