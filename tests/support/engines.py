"""Executors over model files, for tests: opened and closed with the test, what they computed as arrays."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from ggml_engine.control.embedding import Embedding
from ggml_engine.executor import options as options_module
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.executor.llama import LlamaExecutor
from ggml_engine.executor.llama_options import LlamaOptions
from ggml_engine.executor.options import ExecutorOptions
from ggml_engine.executor.protocol import Executor
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.llama_model import LlamaModel
from ggml_engine.models.model import Model, load_model

Logits = npt.NDArray[np.float32]
_defaults: dict[str, Any] = {}


@contextmanager
def form_by_default(attention: str) -> Iterator[None]:
    """Executors for which a test asks for no form, nor for what goes with one form only, have this one."""
    with patch.dict(_defaults, attention=attention):
        yield


@contextmanager
def loaded(path: Path, **options: Any) -> Iterator[Model]:
    """A model; what was opened is freed."""
    with GGUFFile.open(path, mmap=options.pop("mmap", True)) as file:
        model = load_model(file, **options)
        try:
            yield model
        finally:
            model.free()


@contextmanager
def executor_over(model: Model, **options: Any) -> Iterator[GgmlExecutor]:
    """An executor; when the test ends well, every cell is accounted for.

    Deterministic mode may have any geometry here: over short runs it is right, only not the same to the bit.
    """
    if not {"attention", "v_layout", "v_type", "deterministic"} & options.keys():
        options = {**_defaults, **options}
    with patch.object(options_module, "DETERMINISTIC_GRAIN", 1):
        executor = GgmlExecutor(model, ExecutorOptions(**options))
    try:
        yield executor
        cells = executor.cache
        for sequence in cells.open_sequences:
            executor.close(sequence)
        assert cells.free_cells == cells.capacity
    finally:
        executor.close_all()


@contextmanager
def running(path: Path, *, threads: int = 1, repack: bool = True, **options: Any) -> Iterator[GgmlExecutor]:
    """An executor over a model that is loaded for it."""
    with loaded(path, threads=threads, repack=repack) as model, executor_over(model, **options) as executor:
        yield executor


def feed(executor: Executor, sequence: int, tokens: Sequence[int], chunk: int = 512) -> Logits:
    """Append tokens in chunks: the logits of all of them, [tokens, n_vocab]."""
    pieces = [tokens[start : start + chunk] for start in range(0, len(tokens), chunk)]
    return np.concatenate([executor.forward(Batch.of_sequence(sequence, piece, logits="all")) for piece in pieces])


def embedded(executor: Executor, texts: Sequence[Sequence[int]], pooling: Any, *, normalize: bool = False) -> Any:
    """Embeddings of texts, computed at once."""
    work = Embedding([np.array(text, np.int32) for text in texts], pooling, normalize=normalize)
    while work.step(executor):
        pass
    return work.result()


def batch_of(parts: Sequence[tuple[int, Sequence[int]]], order: Sequence[int] | None = None) -> Batch:
    """A step of several sequences, all logits wanted; `order` rearranges the tokens."""
    tokens = np.concatenate([np.asarray(tokens, np.int32) for _, tokens in parts])
    sequences = np.concatenate([np.full(len(tokens), sequence, np.int32) for sequence, tokens in parts])
    if order is not None:
        tokens, sequences = tokens[list(order)], sequences[list(order)]
    return Batch(tokens, sequences, np.ones(tokens.size, np.bool_))


@contextmanager
def libllama_running(path: Path, **options: Any) -> Iterator[LlamaExecutor]:
    """As `running`, in libllama's own context."""
    with GGUFFile.open(path) as file:
        model = LlamaModel.load(file, device="cpu", rehearsed=False)  # half a second that most tests do without
        try:
            executor = LlamaExecutor(model, LlamaOptions(**{"threads": 1, "attention": "matmul", **options}))
            try:
                yield executor
            finally:
                executor.close_all()
        finally:
            model.free()
