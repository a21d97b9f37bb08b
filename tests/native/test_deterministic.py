"""Deterministic mode: a sequence's logits are the same bits whatever runs beside it and wherever its cells lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from architecture_rows import model_file
from engines import Logits, batch_of, executor_over, feed, loaded
from tiny_models import F16, F32, VOCAB, write_gemma3, write_llama

from ggml_engine.models.model import Model

TOKENS: list[list[int]] = np.random.default_rng(3).integers(3, VOCAB, (5, 150)).tolist()
# Weights in floats: their kernels round by the number of rows, which is what whole tiles of rows are for.
CASES = [("llama", F32), ("llama", F16), ("gemma3", F32), ("gemma3", F16)]
# How many rows an expert gets depends on the batch, whatever the number of rows in a step is.
EXPERTS = ["llama experts", "qwen3moe q4_k and q6_k", "qwen3moe q4_0", "gpt-oss mxfp4"]
GEOMETRIES = [(64, 256), (64, 64), (128, 64)]


@pytest.fixture(
    scope="module", params=[*CASES, *EXPERTS], ids=[*(f"{kind} {types.name}" for kind, types in CASES), *EXPERTS]
)
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("tiny") / "model.gguf"
    kind, types = (request.param, None) if isinstance(request.param, str) else request.param
    if types is None:
        path = model_file(kind)
    elif kind == "llama":
        write_llama(path, types=types)
    else:
        write_gemma3(path, window=40, n_layer=3, pattern=2, types=types)
    with loaded(path, threads=1) as model:
        yield model


@pytest.fixture(
    scope="module", params=GEOMETRIES, ids=[f"runs of {run}, blocks of {block}" for run, block in GEOMETRIES]
)
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"deterministic": True, "capacity": 2048, "run": request.param[0], "read_block": request.param[1]}


@pytest.fixture(scope="module")
def alone(model: Model, options: dict[str, Any]) -> list[Logits]:
    """The logits of every token, each sequence in an executor of its own: 70 tokens, then one by one."""
    found = []
    for tokens in TOKENS:
        with executor_over(model, **options) as executor:
            sequence = executor.open()
            found.append(
                np.concatenate([feed(executor, sequence, tokens[:70]), feed(executor, sequence, tokens[70:], 1)])
            )
    return found


def test_decoding_in_a_batch_is_decoding_alone(model: Model, options: dict[str, Any], alone: list[Logits]) -> None:
    with executor_over(model, **options) as executor:
        sequences = [executor.open() for _ in TOKENS]
        for i, sequence in enumerate(sequences):
            assert feed(executor, sequence, TOKENS[i][:70]).tobytes() == alone[i][:70].tobytes()
        for at in range(70, 150):
            logits = executor.forward(batch_of([(s, [TOKENS[i][at]]) for i, s in enumerate(sequences)]))
            assert logits.tobytes() == b"".join(alone[i][at].tobytes() for i in range(5))


@pytest.mark.parametrize("chunk", [1, 3, 8, 40, 150])
def test_a_prefill_in_other_chunks_is_the_same(
    model: Model, options: dict[str, Any], alone: list[Logits], chunk: int
) -> None:
    with executor_over(model, **options) as executor:
        assert feed(executor, executor.open(), TOKENS[0], chunk).tobytes() == alone[0].tobytes()


def test_a_prefill_beside_decodes_is_the_same(model: Model, options: dict[str, Any], alone: list[Logits]) -> None:
    with executor_over(model, **options) as executor:
        a, b = executor.open(), executor.open()
        feed(executor, a, TOKENS[0][:70])
        logits = executor.forward(batch_of([(a, TOKENS[0][70:71]), (b, TOKENS[1][:99])]))
        assert logits[0].tobytes() == alone[0][70].tobytes()
        assert logits[1:].tobytes() == alone[1][:99].tobytes()


def test_a_clone_a_rewind_and_cells_elsewhere_are_the_same(
    model: Model, options: dict[str, Any], alone: list[Logits]
) -> None:  # R73
    with executor_over(model, **options) as executor:
        parked, source = executor.open(), executor.open()
        feed(executor, parked, TOKENS[4][:29])
        feed(executor, source, TOKENS[0][:90])
        clone = executor.clone(source, 75)
        beside = executor.open()
        feed(executor, beside, TOKENS[2][:7])  # between the clone's prefix and what follows
        executor.rewind(source, 60)
        assert feed(executor, clone, TOKENS[0][75:140], 1).tobytes() == alone[0][75:140].tobytes()
        assert feed(executor, source, TOKENS[0][60:], 4).tobytes() == alone[0][60:].tobytes()
        assert executor.cache.cells_of(source)[0] > 0, "its cells lie where they do alone"  # type: ignore[attr-defined]


def test_cells_that_descend_are_the_same(model: Model, options: dict[str, Any], alone: list[Logits]) -> None:  # R73
    """Placement ascends while it can: here the pool's end is reached, and the sequence goes on at its beginning."""
    with executor_over(model, **{**options, "capacity": 256}) as executor:
        parked, sequence = executor.open(), executor.open()
        feed(executor, parked, TOKENS[4][:100])
        feed(executor, sequence, TOKENS[0][:110])
        executor.close(parked)
        assert feed(executor, sequence, TOKENS[0][110:], 1).tobytes() == alone[0][110:].tobytes()
        cells = executor.cache.cells_of(sequence)  # type: ignore[attr-defined]
        assert cells[-1] < cells[0], "they ascend: nothing is shown"
