"""What stands in a model's token embeddings, computed outside of it, and batches with such rows."""

from __future__ import annotations

from collections.abc import Sequence

import gguf
import numpy as np

from ggml_engine.executor.batch import Batch
from ggml_engine.executor.prepared import EmbeddingInput, PreparedSlice
from ggml_engine.models.model import Model


def embeddings_of(model: Model, tokens: Sequence[int]) -> np.ndarray:
    """The rows that the graph looks up for tokens, f32 [tokens, n_embd], scaled as it does, from the file's bytes."""
    name = "token_embd.weight"
    info = model.file.tensors[name]
    raw = np.frombuffer(model.file.tensor_bytes(name), np.uint8).reshape(model.hp.n_vocab, -1)
    rows = gguf.quants.dequantize(raw[list(tokens)], gguf.GGMLQuantizationType(int(info.type))).astype(np.float32)
    if model.hp.embedding_scale != 1.0:
        rows = rows * np.float32(model.hp.embedding_scale)
    return rows


def prepared(model: Model, tokens: Sequence[int], fingerprint: str = "") -> EmbeddingInput:
    return EmbeddingInput(embeddings_of(model, tokens), fingerprint)


def batch_with_prepared(parts: Sequence[tuple[int, Sequence[int] | tuple[EmbeddingInput, int, int]]]) -> Batch:
    """A step of several sequences, all logits wanted: tokens, or positions [start, stop) of embeddings."""
    tokens: list[int] = []
    sequences: list[int] = []
    slices = []
    for sequence, part in parts:
        if isinstance(part, tuple) and isinstance(part[0], EmbeddingInput):
            source, start, stop = part
            slices.append(PreparedSlice(source, start, stop, len(tokens)))
            part = [0] * (stop - start)  # noqa: PLW2901
        tokens += part  # type: ignore[arg-type]
        sequences += [sequence] * len(part)
    return Batch(np.array(tokens, np.int32), np.array(sequences), np.ones(len(tokens), np.bool_), None, tuple(slices))
