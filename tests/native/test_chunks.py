"""`llama4`'s chunks of 8192 positions, over their border, and files of it that cannot be.

Chunks of other sizes: tests/unit/test_masks.py, the walks, and `TestWindows` in test_four_families.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from architecture_rows import ROWS, model_file
from engines import running
from forged_models import drop_key, drop_tensors, find_tensor, set_key, taken_apart
from gguf_forge import INT64, GGUFForge
from libllama import Type
from libllama_sequences import SequencesOracle
from saved_models import write_model
from tiny_models import VOCAB

from ggml_engine.errors import HyperparameterError, ModelError, WeightError
from ggml_engine.executor.batch import Batch
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.models.model import load_model
from ggml_engine.pool.window import Window

CHUNK, N_CELLS = 8192, 8448
STEPS = (300, *(512,) * 15, 200, 70, 1, 1)  # to 7980, to 8180, over the border in one step to 8250, and two more
NARROW = {"embedding_length": 32, "feed_forward_length": 32, "expert_feed_forward_length": 32,
          "attention.head_count": 1, "attention.head_count_kv": 1}  # fmt: skip
Change = Callable[[GGUFForge], object]


@pytest.mark.slow
def test_a_prompt_longer_than_a_chunk_is_libllamas(tmp_path: Path) -> None:
    """The layers with chunks read one chunk where libllama masks the others: sums of other lengths round differently."""
    model = ROWS["llama4"].model
    path = write_model(replace(model, metadata={**model.metadata, **NARROW}), tmp_path / "llama4.gguf")
    rng = np.random.default_rng(5)
    kinds = {"type_k": Type.F32, "type_v": Type.F32}
    options = {"attention": "matmul", "k_type": "f32", "v_type": "f32", "run": 1, "capacity": N_CELLS}
    with (
        SequencesOracle(path, n_ctx=N_CELLS, flash=False, use_extra_bufts=True, n_sequences=1, **kinds) as oracle,
        running(path, **options) as executor,
    ):
        sequence, length = executor.open(), 0
        for n in STEPS:
            tokens = rng.integers(3, VOCAB, n).tolist()
            before = executor.n_rows_read
            found = executor.forward(Batch.of_sequence(sequence, tokens, logits="all"))
            expected = oracle.append([(0, tokens)])
            length += n
            if length <= CHUNK:
                assert found.tobytes() == expected.tobytes(), f"to {length}"
            else:
                errors = np.square(found - expected).mean(axis=1) / np.square(expected).mean()
                assert errors.max() < 1e-6, f"to {length}: {errors}"
        assert length == 8252
        # the padded rows of everything, and of the second chunk
        assert executor.n_rows_read - before == N_CELLS + 256


def test_three_layers_of_four_have_chunks() -> None:
    with running(model_file("llama4"), capacity=64) as executor:
        assert executor.cache.windows == (Window(0), Window(CHUNK, True))  # type: ignore[attr-defined]
        assert executor.cache.window_of_layer == (1, 1, 1, 0)


def value(name: str, number: object, **kind: int) -> Change:
    return lambda forge: set_key(forge, f"llama4.{name}", number, **kind)


def missing(name: str) -> Change:
    return lambda forge: drop_key(forge, f"llama4.{name}")


def flat(name: str) -> Change:
    def change(forge: GGUFForge) -> None:
        tensor = find_tensor(forge, name)
        tensor.shape = (tensor.shape[0], tensor.shape[1] * tensor.shape[2])

    return change


NAN = float("nan")
REFUSED: list[tuple[str, Change, type[ModelError], str]] = [
    ("no chunks", value("attention.sliding_window", 0), HyperparameterError, "attention.sliding_window"),
    ("chunks of -1", value("attention.sliding_window", -1, kind=INT64), HyperparameterError, "attention.sliding_window"),
    ("flags for two layers", value("attention.sliding_window_pattern", [True, False]), HyperparameterError, "4 layers"),
    ("no step", missing("interleave_moe_layer_step"), HyperparameterError, "interleave_moe_layer_step"),
    ("step -1", value("interleave_moe_layer_step", -1, kind=INT64), HyperparameterError, "interleave_moe_layer_step"),
    ("step 0", value("interleave_moe_layer_step", 0), WeightError, "blk.1.ffn_gate.weight"),
    ("step 1", value("interleave_moe_layer_step", 1), WeightError, "blk.0.ffn_gate_inp.weight"),
    ("no experts", value("expert_count", 0), HyperparameterError, "expert_count"),
    ("more used than there are", value("expert_used_count", 5), HyperparameterError, "expert_used_count"),
    ("no width", missing("expert_feed_forward_length"), HyperparameterError, "expert_feed_forward_length"),
    ("base 0", value("rope.freq_base_swa", 0.0), HyperparameterError, "rope.freq_base_swa"),
    ("base NaN", value("rope.freq_base_swa", NAN), HyperparameterError, "rope.freq_base_swa"),
    ("half of a head", value("rope.dimension_count", 8), HyperparameterError, "rope.dimension_count"),
    ("other heads of V", value("attention.value_length", 8), HyperparameterError, "attention.value_length"),
    ("no shared expert", lambda forge: drop_tensors(forge, "blk.1.ffn_up_shexp.weight"), WeightError, "ffn_up_shexp"),
    ("flat experts", flat("blk.3.ffn_down_exps.weight"), WeightError, "blk.3.ffn_down_exps.weight"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "part"), [row[1:] for row in REFUSED], ids=[row[0] for row in REFUSED])
def test_what_cannot_be_is_said(tmp_path: Path, change: Change, error: type[ModelError], part: str) -> None:
    forge = taken_apart(model_file("llama4"))
    change(forge)
    with GGUFFile.open(forge.write(tmp_path / "changed.gguf")) as file, pytest.raises(error) as caught:
        load_model(file, threads=1)
    assert part in str(caught.value)
