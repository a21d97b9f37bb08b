"""K and V in other types than f16 give libllama's bytes on real models: the same rotation, rounding and kernels.

Matched geometry as in test_logits_equal_libllama. libllama stores quantised V for flash attention only.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from engines import executor_over, feed, loaded
from libllama import Oracle, Type
from real_models import gemma3_270m, smollm2

from ggml_engine.models.model import Model

MODELS = {"S": smollm2, "G": gemma3_270m}
N_PREFILL, N_DECODED, N_CELLS = 64, 8, 512
CASES = [("flash", "q8_0", "q8_0"), ("matmul", "q8_0", "f16")]
MORE_CASES = [
    ("flash", "q4_0", "q4_0"),
    ("flash", "bf16", "bf16"),
    ("flash", "q8_0", "f16"),
    ("matmul", "q4_0", "f16"),
    ("matmul", "bf16", "bf16"),
    ("matmul", "f32", "f32"),
]
PARAMETERS = [
    *(pytest.param(*case, id=" ".join(case)) for case in CASES),
    *(pytest.param(*case, id=" ".join(case), marks=pytest.mark.slow) for case in MORE_CASES),
]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Iterator[Model]:
    with loaded(MODELS[request.param](), threads=2) as model:
        yield model


@pytest.mark.parametrize(("form", "k_type", "v_type"), PARAMETERS)
def test_prefill_and_decode_give_the_bytes_of_libllama(model: Model, form: str, k_type: str, v_type: str) -> None:
    tokens = np.random.default_rng(4).integers(5, model.hp.n_vocab - 5, N_PREFILL + N_DECODED).tolist()
    oracle = Oracle(
        Path(model.file.path), n_ctx=N_CELLS, flash=form == "flash", type_k=Type[k_type.upper()],
        type_v=Type[v_type.upper()], n_threads=2, swa_full=True, use_extra_bufts=True,
    )  # fmt: skip
    with oracle, executor_over(model, capacity=N_CELLS, attention=form, k_type=k_type, v_type=v_type) as executor:
        sequence = executor.open()
        ours, theirs = feed(executor, sequence, tokens[:N_PREFILL]), oracle.forward(tokens[:N_PREFILL])
        assert ours.std() > 0.5, "flat logits would hide mistakes"
        assert ours.tobytes() == theirs.tobytes(), f"prefill differs by {np.abs(ours - theirs).max()}"
        for at in range(N_PREFILL, N_PREFILL + N_DECODED):
            ours, theirs = feed(executor, sequence, tokens[at : at + 1]), oracle.forward([tokens[at]], at)
            assert ours.tobytes() == theirs.tobytes(), f"token {at} differs by {np.abs(ours - theirs).max()}"
