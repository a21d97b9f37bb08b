"""What every executor over a model refuses of a step before anything changes: ggml and libllama die of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import ContextLengthError, InputError
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.inputs import check_tokens
from ggml_engine.executor.prepared import EmbeddingInput, PreparedInput
from ggml_engine.executor.protocol import Executor


def accepts_embeddings(prepared: PreparedInput, n_embd: int, fingerprint: Callable[[], str]) -> bool:
    """Whether it is embeddings of this width, made for the model that `fingerprint` names or for any."""
    return (
        prepared.kind is EmbeddingInput.kind
        and isinstance(prepared, EmbeddingInput)
        and prepared.rows.shape == (prepared.size(), n_embd)
        and (not prepared.fingerprint or prepared.fingerprint == fingerprint())
    )


def check_batch(executor: Executor, batch: Batch, n_embd: int) -> None:
    """Raise InputError for a number of tokens, token ids and prepared inputs that the executor cannot compute."""
    limit = executor.max_batch_tokens
    if not 0 < batch.n_tokens <= limit:
        raise InputError(f"a step has 1 to {limit} tokens (max_batch_tokens), this one has {batch.n_tokens}")
    check_tokens(batch.tokens, executor.n_vocab)
    for piece in batch.prepared:
        if not executor.accepts(piece.source) or piece.stop > piece.source.size():
            raise InputError(f"{piece.source.kind} that are not rows of {n_embd} numbers made for this model")


def check_positions(positions: npt.NDArray[np.integer[Any]], limit: int, architecture: str) -> None:
    """Raise ContextLengthError for a position that the model has no vector for; `limit` 0 is none."""
    if limit and (needed := int(positions.max()) + 1) > limit:
        raise ContextLengthError(needed, limit, f"a sequence of this {architecture} model")
