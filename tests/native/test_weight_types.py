"""Models whose matrices are in one tensor type each, beside libllama on the same file: the same bytes of logits.

Two layers, 256 wide, so that super-blocks fill rows; embeddings, attention, feed-forward, output and, in the second
model, experts are in the type. Runs of one cell and 512 cells, as libllama has them; matmul over V in columns.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import Logits, feed, loaded, running
from forged_models import find_tensor, taken_apart
from libllama import Oracle
from saved_models import SavedModel, write_model
from tiny_models import VOCAB
from wide_llama import EXPERTS, LEFT_OUT, SIZES

from ggml_engine.errors import WeightError
from ggml_engine.ggml.backends import buffer_type_name, cpu_device, extra_buffer_types
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.ops import MATMUL_TYPES
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.models.model import Model

N_CELLS = 512
TOKENS: list[int] = np.random.default_rng(5).integers(3, VOCAB, 21).tolist()
PIECES = (TOKENS[:17], *([token] for token in TOKENS[17:]))  # one product of many columns, some of one
TYPES = sorted(kind.name for kind in MATMUL_TYPES)
STORAGE_ONLY = sorted(kind.name for kind in set(TensorType) - MATMUL_TYPES)
ROUTER = {r"ffn_gate_inp\.": "F32"}


def write(path: Path, kind: str, *, experts: bool = False, **options: Any) -> Path:
    metadata = SIZES | (EXPERTS if experts else {})
    model = SavedModel("llama", metadata, drop=LEFT_OUT, types={**ROUTER, r"\.weight": kind}, **options)
    return write_model(model, path)


def types_of(path: Path) -> dict[str, str]:
    """Types of the tensors that are no vectors and choose no experts."""
    with GGUFFile.open(path) as file:
        return {
            name: info.type.name
            for name, info in file.tensors.items()
            if len(info.shape) > 1 and "ffn_gate_inp" not in name
        }


def ours(path: Path, *, repack: bool) -> Logits:
    options: dict[str, Any] = {"attention": "matmul", "v_layout": "columns", "k_type": "f32", "v_type": "f32"}
    with running(path, repack=repack, capacity=N_CELLS, run=1, **options) as executor:
        sequence = executor.open()
        return np.concatenate([feed(executor, sequence, piece) for piece in PIECES])


def theirs(path: Path, *, repack: bool) -> Logits:
    starts = itertools.accumulate(map(len, PIECES), initial=0)
    with Oracle(path, n_ctx=N_CELLS, use_extra_bufts=repack) as oracle:
        return np.concatenate([oracle.forward(piece, start) for piece, start in zip(PIECES, starts, strict=False)])


def check_logits(path: Path, *, repack: bool) -> None:
    found, expected = ours(path, repack=repack), theirs(path, repack=repack)
    assert np.isfinite(expected).all()
    assert expected.std() > 0.5, "flat logits would hide mistakes"
    assert np.abs(np.diff(expected, axis=0)).mean() > 0.25 * expected.std(), "logits hardly depend on the tokens"
    assert found.tobytes() == expected.tobytes(), f"differs by at most {np.abs(found - expected).max()}"


def rearranged(model: Model) -> set[str]:
    """Tensors in a form other than the file's."""
    extra = {
        buffer_type_name(model.libraries, found)
        for found in extra_buffer_types(model.libraries, cpu_device(model.libraries))
    }
    base = model.libraries.base
    return {
        name
        for name, tensor in model.weights.items()
        if buffer_type_name(model.libraries, base.ggml_backend_buffer_get_type(tensor.ptr.buffer)) in extra
    }


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
@pytest.mark.parametrize("kind", TYPES)
def test_a_model_in_every_type_has_libllamas_logits(kind: str, experts: bool, tmp_path: Path) -> None:
    path = write(tmp_path / "model.gguf", kind, experts=experts)
    types = types_of(path)
    assert set(types.values()) == {kind}
    assert {"token_embd.weight", "output.weight", "blk.1.attn_output.weight"} <= set(types)
    assert ("blk.1.ffn_down_exps.weight" in types) == experts
    check_logits(path, repack=False)
    with loaded(path, threads=1) as model:
        is_rearranged = bool(rearranged(model))
    if is_rearranged:  # the kernels are others
        check_logits(path, repack=True)


def test_kernels_over_rearranged_weights_are_among_them(tmp_path: Path) -> None:
    """Else the second half of the test above would compare nothing."""
    for experts in (False, True):
        with loaded(write(tmp_path / "model.gguf", "Q4_0", experts=experts), threads=1) as model:
            names = rearranged(model)
        down = "ffn_down_exps" if experts else "ffn_down"
        assert {"output.weight", "blk.0.attn_q.weight", f"blk.1.{down}.weight"} <= names
        assert "token_embd.weight" not in names


@pytest.mark.parametrize("experts", [False, True], ids=["dense", "experts"])
def test_scales_beside_weights_count(experts: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """NVFP4 files have one for every matrix and every expert, and what activations are scaled by where they are FP4."""
    without = write(tmp_path / "without.gguf", "NVFP4", experts=experts)
    scales: dict[str, Any] = {"keep": (r"scale$",), "added": {"output.scale": (1,), "output.input_scale": (1,)}}
    path = write(tmp_path / "with.gguf", "NVFP4", experts=experts, **scales)
    with GGUFFile.open(path) as file:
        names = set(file.tensors)
    ffn = "ffn_up_exps" if experts else "ffn_up"
    assert {"output.scale", "blk.0.attn_v.scale", f"blk.1.{ffn}.scale", f"blk.1.{ffn}.input_scale"} <= names
    check_logits(path, repack=False)
    assert not [record.getMessage() for record in caplog.records if "is not used" in record.getMessage()]
    assert ours(path, repack=False).tobytes() != ours(without, repack=False).tobytes()


@pytest.mark.parametrize("name", ["blk.1.ffn_down.weight", "token_embd.weight"])
@pytest.mark.parametrize("kind", STORAGE_ONLY)
def test_a_type_that_no_matrix_may_have_is_refused(kind: str, name: str, tmp_path: Path) -> None:
    forge = taken_apart(write(tmp_path / "model.gguf", "F32"))
    tensor = find_tensor(forge, name)
    tensor.kind = int(TensorType[kind])
    tensor.data = bytes(TensorType[kind].tensor_bytes(tensor.shape))
    path = forge.write(tmp_path / "other.gguf")
    reason = rf"{re.escape(name)}.*has type {kind}, which is not allowed where"
    with pytest.raises(WeightError, match=reason), loaded(path, threads=1):
        pass
