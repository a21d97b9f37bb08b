"""Embeddings of the real models beside libllama's, and that they mean something."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import batch_of, embedded, running
from libllama_embeddings import reference_embeddings
from real_models import gemma3_270m, smollm2

from ggml_engine import Engine

GEOMETRY: dict[str, Any] = {
    "attention": "matmul", "v_layout": "columns", "k_type": "f32", "v_type": "f32", "capacity": 512, "run": 1,
}  # fmt: skip
TEXTS = (
    "The cat sat on the mat and purred.",
    "A kitten was purring on the rug.",
    "Interest rates of central banks rose last year.",
)


@pytest.mark.parametrize("model", [smollm2, gemma3_270m], ids=["S", "G"])
def test_embeddings_are_libllamas(model: Any) -> None:
    path: Path = model()
    with Engine.load(path, threads=1, ctx=512) as engine:
        ids = [engine.vocabulary.encode(text, add_special=True, parse_special=False).tolist() for text in TEXTS]
    expected = reference_embeddings(path, ids, "none")
    with running(path, **GEOMETRY) as executor:
        found = executor.forward_hidden(batch_of([(executor.open(), text) for text in ids]))
    with running(path, **GEOMETRY) as executor:  # again in the first cells
        pooled = embedded(executor, ids, "mean", normalize=False)
    assert found.tobytes() == np.concatenate(expected).tobytes()
    means = np.stack(reference_embeddings(path, ids, "mean"))
    assert np.square(pooled - means).sum() < 1e-10 * np.square(means).sum()  # libllama adds up in f32


def test_alike_texts_are_nearer_to_each_other() -> None:
    with Engine.load(smollm2(), threads=1, ctx=512) as engine:
        rows = np.asarray(engine.embed(TEXTS))
    near, far = float(rows[0] @ rows[1]), max(float(rows[0] @ rows[2]), float(rows[1] @ rows[2]))
    assert near > far
