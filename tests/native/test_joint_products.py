"""Products of one input are one operation in steps of few tokens, and to the bit what ggml makes of them one by one."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from compilers import has_compiler
from engines import executor_over, feed, loaded, running
from graphs import Bench, random
from libllama import Oracle
from saved_models import SavedModel, write_model
from tiny_models import F16, Q4_0, VOCAB, write_gemma3, write_llama
from wide_llama import LEFT_OUT, SIZES

from ggml_engine.errors import GraphError
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.ggml import library
from ggml_engine.ggml.joint_kernel import JointKernel, find_joint_kernel
from ggml_engine.ggml.library import ffi
from ggml_engine.ggml.ops import Tensor
from ggml_engine.ggml.panels import Panels
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.models import joint

F32, Q4_1, Q5_0 = TensorType.F32, TensorType.Q4_1, TensorType.Q5_0
Q5_1, Q8_0 = TensorType.Q5_1, TensorType.Q8_0
TYPES = [F32, TensorType.F16, TensorType.BF16, TensorType.Q4_0, Q4_1, Q5_0, Q5_1, Q8_0]
ROWS = (64, 16, 300, 7)
TOKENS: list[int] = np.random.default_rng(5).integers(3, VOCAB, 12).tolist()
NO_WORK = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})


@pytest.fixture(scope="module")
def kernel() -> JointKernel:
    found = find_joint_kernel(library.load())
    assert found is not None, "python setup.py build_ext --inplace"
    return found


def test_the_operation_is_there_where_a_compiler_is() -> None:
    if has_compiler():
        assert find_joint_kernel(library.load()) is not None


def both(
    kernel: JointKernel, kinds: Sequence[TensorType], n_tokens: int, n_threads: int, *, norms: bool, adds: bool
) -> tuple[list[npt.NDArray[Any]], list[npt.NDArray[Any]]]:
    """The products of random weights, joint and one by one, in one graph."""
    bench = Bench(max_tensors=64, n_threads=n_threads)
    b = bench.builder
    x = bench.input(random(n_tokens, 96, seed=1))
    weights = [bench.input(random(n, 96, seed=i), kind) for i, (n, kind) in enumerate(zip(ROWS, kinds, strict=False))]
    norm = bench.input(random(96, seed=2)) if norms else None
    added = bench.input(random(n_tokens, ROWS[0], seed=3)) if adds else None
    found = b.joint_products(
        kernel, x, weights, 2, norm=None if norm is None else (norm, 1e-5), added=added, names="abcd"[: len(weights)]
    )
    y = x if norm is None else b.mul(b.rms_norm(x, 1e-5), norm)
    alone = [b.mul_mat(weight, y) for weight in weights]
    alone = alone if added is None else [b.add(each, added) for each in alone]
    values = bench.run_all(*found, *alone)
    return values[: len(found)], values[len(found) :]


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("n_threads", [1, 2, 3])
def test_each_product_is_that_of_ggml_to_the_bit(kernel: JointKernel, kind: TensorType, n_threads: int) -> None:
    for n_tokens in (n for n in (1, 2, 3, 4, 5, 7, 33) if kernel.takes(kind, n)):
        for norms, adds in ((False, False), (True, False), (False, True), (True, True)):
            kinds = [kind] * (1 if adds else 4)
            found, alone = both(kernel, kinds, n_tokens, n_threads, norms=norms, adds=adds)
            assert [each.tobytes() for each in found] == [each.tobytes() for each in alone], (n_tokens, norms, adds)


@pytest.mark.parametrize("norms", [False, True])
def test_weights_of_several_types_go_together(kernel: JointKernel, norms: bool) -> None:
    for kinds in ([Q8_0, F32, Q4_1, TensorType.F16], [Q4_1, Q8_0, Q5_1], [F32, TensorType.BF16]):
        found, alone = both(kernel, kinds, 1, 2, norms=norms, adds=False)
        assert [each.tobytes() for each in found] == [each.tobytes() for each in alone]


def test_types_of_panels_that_read_activations_differently_go_together(kernel: JointKernel) -> None:
    kinds = [kind for kind in (Q8_0, Q5_0, Q4_1, Q5_1) if kernel.takes(kind, 33)]
    if kinds:
        found, alone = both(kernel, kinds, 33, 2, norms=True, adds=False)
        assert [each.tobytes() for each in found] == [each.tobytes() for each in alone]


def test_types_that_ggml_multiplies_in_tiles_are_taken_with_one_token_only(kernel: JointKernel) -> None:
    assert [kind.name for kind in TYPES if kernel.takes(kind, 1)] == [kind.name for kind in TYPES]
    assert [kind for kind in (F32, TensorType.BF16, TensorType.Q4_0) if kernel.takes(kind, 2)] == []
    assert kernel.takes(TensorType.Q6_K, 4)
    assert not kernel.takes(TensorType.Q6_K, 5)
    alone = JointKernel(library.load(), 1)  # without panels
    assert [kind for kind in (Q5_0, Q8_0) if alone.takes(kind, 2)] == []
    assert alone.takes(Q4_1, 4)
    assert not alone.takes(Q4_1, 5)


def test_panels_take_steps_of_any_length(kernel: JointKernel) -> None:
    panels = Panels.find()
    if platform.machine() in {"x86_64", "AMD64"}:
        assert panels is not None, "every such processor since 2013 has some"
    if panels is None:
        return
    assert [kind for kind in (Q4_1, Q5_1, Q5_0) if not kernel.takes(kind, 512)] == []
    assert kernel.takes(Q8_0, 512) == (panels.name != "avx2")


def test_panels_that_do_not_agree_with_ggml_are_not_used(kernel: JointKernel, monkeypatch: pytest.MonkeyPatch) -> None:
    panels = Panels.find()
    if panels is None:
        return
    asked = []

    def disagree(weight: TensorType, dot: int, pack: int) -> bool:
        asked.append(weight)
        return False

    monkeypatch.setattr(Panels, "agree", staticmethod(disagree))
    other = JointKernel(library.load(), 1, panels)
    assert not other.takes(Q4_1, 5)
    assert not other.takes(Q4_1, 9)
    assert asked == [Q4_1]  # once
    assert kernel.takes(Q4_1, 5)


def test_what_cannot_be_computed_is_refused(kernel: JointKernel) -> None:
    def refused(match: str, make: Callable[[Bench], dict[str, Any]]) -> None:
        bench = Bench()
        given: dict[str, Any] = {"x": bench.zeros(F32, 64, 1), "weights": [bench.zeros(Q8_0, 64, 8)], "n_threads": 1}
        with pytest.raises(GraphError, match=match):
            bench.builder.joint_products(kernel, **(given | make(bench)))

    refused("row lengths", lambda bench: {"weights": [bench.zeros(Q8_0, 32, 8)]})
    refused("1 to 4", lambda _: {"weights": []})
    refused("1 to 4", lambda bench: {"weights": [bench.zeros(Q8_0, 64, 8)] * 5})
    refused("f32", lambda bench: {"x": bench.zeros(TensorType.F16, 64, 1)})
    refused("matrix", lambda bench: {"x": bench.zeros(F32, 64, 1, 2)})
    refused("not of 2 tokens", lambda bench: {"x": bench.zeros(F32, 64, 2), "weights": [bench.zeros(F32, 64, 8)]})
    refused("threads", lambda _: {"n_threads": 0})
    refused("norm", lambda bench: {"norm": (bench.zeros(F32, 32), 1e-5)})
    refused("added", lambda bench: {"added": bench.zeros(F32, 9, 1)})
    refused("added", lambda bench: {"added": bench.zeros(F32, 16, 1), "weights": [bench.zeros(Q8_0, 64, 8)] * 2})


# ---- in graphs


def operations(executor: GgmlExecutor) -> Counter[str]:
    """Of the newest step's graph, those that compute something."""
    assert executor._current is not None
    b = executor._current.inputs._b
    nodes = [b.base.ggml_graph_node(b.cgraph, i) for i in range(executor._current.graph.n_nodes)]
    found = Counter(ffi.string(b.base.ggml_op_desc(node)).decode() for node in nodes)
    return Counter({name: n for name, n in found.items() if name not in NO_WORK})


def of_step(path: Path, n_tokens: int, **options: Any) -> Counter[str]:
    with running(path, capacity=64, attention="matmul", **options) as executor:
        feed(executor, executor.open(), TOKENS[:n_tokens])
        return operations(executor)


def test_a_token_passes_four_products_and_one_rotation_a_layer_and_no_norm(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", n_layer=3, types=F16)
    one, several = of_step(path, 1), of_step(path, 5)
    # q, k and v; scores and mix; output; gate and up; down
    assert one["CUSTOM"] == 3 * 4 + 1
    assert one["MUL_MAT"] == 3 * 2
    assert one["ROPE"] == 3
    assert not one["ADD"] + one["RMS_NORM"] + one["MUL"]
    assert several["MUL_MAT"] == 3 * 9 + 1
    assert several["CUSTOM"] == 0
    assert one.total() < 0.6 * several.total()


def test_norms_of_heads_and_of_what_is_added_stay(tmp_path: Path) -> None:
    one = of_step(write_gemma3(tmp_path / "tiny.gguf", n_layer=2, types=F16), 1)
    assert one["CUSTOM"] == 2 * 4 + 1
    assert one["RMS_NORM"] == 2 * 4  # q, k, behind attention, behind the feed-forward
    assert one["ROPE"] == 2 * 2


def test_rearranged_weights_are_multiplied_one_by_one(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", types=Q4_0)
    assert of_step(path, 1)["MUL_MAT"] == 2 * 9 + 1
    assert of_step(path, 1, repack=False)["MUL_MAT"] == 2 * 2


@pytest.mark.parametrize("options", [{"biases": True}, {"tied": True}, {"rope_factors": [1.0, 2.0] * 4}], ids=str)
@pytest.mark.parametrize("attention", ["matmul", "flash", "cells"])
def test_steps_of_one_token_are_the_same_without_it(
    tmp_path: Path, attention: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_llama(tmp_path / "tiny.gguf", types=F16, head_size=16, **options)
    found = []
    with loaded(path, threads=2) as model:
        for is_there in (True, False):
            if not is_there:
                monkeypatch.setattr(joint, "find_joint_kernel", lambda _: None)
            with executor_over(model, capacity=64, attention=attention) as executor:
                found.append(feed(executor, executor.open(), TOKENS, chunk=1))
                assert bool(operations(executor)["MUL_MAT"] > 4) == (not is_there)
    assert found[0].tobytes() == found[1].tobytes()


@pytest.mark.parametrize("repack", [True, False])
@pytest.mark.parametrize("n_tokens", [1, 2, 3, 5, 12])
def test_a_file_of_mixed_types_is_libllamas_to_the_bit(tmp_path: Path, n_tokens: int, repack: bool) -> None:
    """As files of medium quality are: other types for v and down, some of which are rearranged."""
    types = {
        r"attn_q": "Q4_K", r"attn_k": "Q4_1", r"attn_v": "Q6_K", r"ffn_gate": "Q4_0", r"ffn_up": "Q5_K",
        r"ffn_down": "Q8_0", r"attn_output": "Q5_1", r"\.weight": "Q6_K",
    }  # fmt: skip
    path = write_model(SavedModel("llama", SIZES, drop=LEFT_OUT, types=types), tmp_path / "mixed.gguf")
    with Oracle(path, n_ctx=512, use_extra_bufts=repack) as oracle:
        expected = np.concatenate([oracle.forward(TOKENS[i : i + n_tokens], i) for i in range(0, 12, n_tokens)])
    options: dict[str, Any] = {"attention": "matmul", "v_layout": "columns", "k_type": "f32", "v_type": "f32"}
    with running(path, repack=repack, capacity=512, run=1, **options) as executor:
        found = feed(executor, executor.open(), TOKENS, chunk=n_tokens)
        assert operations(executor)["CUSTOM"] > 0
    assert found.tobytes() == expected.tobytes()


def test_a_norm_or_product_that_others_read_is_computed_for_them(kernel: JointKernel) -> None:
    bench = Bench(max_tensors=64, n_threads=2)
    b = bench.builder
    x, weight, norm = bench.input(random(1, 96)), bench.input(random(32, 96), Q8_0), bench.input(random(96, seed=2))
    added = bench.input(random(1, 32, seed=3))

    class Products(joint.JointProducts):
        def takes(self, x: Tensor, weight: Tensor) -> bool:
            return True

    products = Products(b, kernel, 2)
    y = b.mul(b.rms_norm(x, 1e-5), norm)
    products.note_norm(y, x, norm, 1e-5)
    (product,) = products.multiply(y, {"w": weight}).values()
    summed = products.add(added, product, "sum")
    assert summed is not None
    assert products.add(summed, added, "again") is None
    found = bench.run_all(summed, product, y)
    assert [each.tobytes() for each in found] == [each.tobytes() for each in _plainly()]


def _plainly() -> list[npt.NDArray[Any]]:
    bench = Bench(max_tensors=64, n_threads=2)
    b = bench.builder
    x, weight, norm = bench.input(random(1, 96)), bench.input(random(32, 96), Q8_0), bench.input(random(96, seed=2))
    added = bench.input(random(1, 32, seed=3))
    y = b.mul(b.rms_norm(x, 1e-5), norm)
    product = b.mul_mat(weight, y)
    return bench.run_all(b.add(product, added), product, y)
