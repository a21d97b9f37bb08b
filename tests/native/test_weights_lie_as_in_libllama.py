"""A matrix is held rearranged where libllama holds it so: in every type, whatever its number of rows, experts as well.

libllama says how large its buffers are, to a hundredth of a MiB: less than any matrix here takes.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path

import numpy as np
import pytest
from engines import loaded
from forged_models import taken_apart
from saved_models import SavedModel, write_model
from tiny_models import write_llama

from ggml_engine.ggml.backends import buffer_type_name
from ggml_engine.ggml.ops import MATMUL_TYPES
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.reference.libllama import Libllama

EXPERTS = {
    "block_count": 1, "context_length": 64, "embedding_length": 256, "feed_forward_length": 256,
    "attention.head_count": 4, "attention.head_count_kv": 2, "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0, "expert_count": 4, "expert_used_count": 2,
}  # fmt: skip


@pytest.fixture(scope="module", params=["tied", "odd rows", "experts"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("base") / "model.gguf"
    if request.param == "experts":
        dropped = ("rope_freqs", r"\.bias$")
        return write_model(SavedModel("llama", EXPERTS, drop=dropped, types={r"\.weight": "F32"}), path)
    sizes = {"n_layer": 1, "n_embd": 256, "n_head": 4, "n_ff": 512}
    if request.param == "tied":
        return write_llama(path, n_head_kv=2, tied=True, **sizes)
    # K and V of 130 rows, an output of 323: no multiples of 8
    return write_llama(path, n_head_kv=1, head_size=130, n_vocab=323, **sizes)


def in_type(base: Path, kind: TensorType, path: Path) -> Path:
    """The model with every matrix whose rows fill blocks in a type; what they hold is of no matter."""
    forge = taken_apart(base)
    for tensor in forge.tensors:
        if len(tensor.shape) > 1 and tensor.shape[0] % kind.block_size == 0:
            tensor.kind, tensor.data = int(kind), bytes(kind.tensor_bytes(tensor.shape))
    return forge.write(path)


@pytest.mark.parametrize("kind", sorted(MATMUL_TYPES), ids=lambda kind: kind.name)
def test_rearranged_weights_are_those_of_libllama(
    base: Path, kind: TensorType, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = in_type(base, kind, tmp_path / "typed.gguf")
    with caplog.at_level(logging.DEBUG, "ggml_engine.native"):
        Libllama(path, n_ctx=64, use_extra_bufts=True).close()
    theirs = {name: float(mib) for name, mib in re.findall(r"(\w+) model buffer size = +([\d.]+) MiB", caplog.text)}
    assert theirs, "libllama says no more how large its buffers are"
    ours: dict[str, dict[int, int]] = {}
    with loaded(path, threads=1) as model:
        lib = model.libraries
        for tensor in model.weights.values():
            where = buffer_type_name(lib, lib.base.ggml_backend_buffer_get_type(tensor.ptr.buffer))
            n_bytes = tensor.type.tensor_bytes(tensor.ne)
            assert where in {"CPU_Mapped", "CPU"} or n_bytes > 0.01 * 2**20, "too small to show in libllama's figure"
            ours.setdefault(where, {})[hash(tensor.ptr)] = n_bytes
    for name in (set(ours) | set(theirs)) - {"CPU_Mapped", "CPU"}:
        assert name in theirs
        assert np.isclose(sum(ours.get(name, {}).values()) / 2**20, theirs[name], rtol=0, atol=0.0051), name
