"""The allow-list of tensor types says of each what ggml says, and each weight type of it can really be multiplied."""

from __future__ import annotations

import math

import gguf
import numpy as np
import numpy.typing as npt
import pytest
from graphs import NUMPY_TYPES, Bench, random

from ggml_engine.errors import AllocationError
from ggml_engine.ggml import backends, library
from ggml_engine.ggml.library import ffi
from ggml_engine.ggml.ops import FLOAT_TYPES, MATMUL_TYPES
from ggml_engine.ggml.ops.experts import TOGETHER_TYPES
from ggml_engine.ggml.tensor_types import TYPES_BY_NUMBER, TensorType, describe_refusal

BY_NAME = {kind.name: kind for kind in TensorType}
N_ROWS, N_COLUMNS, ROW = 5, 3, 512

# The types that ggml declares and we do not: what it only computes with.
NOT_STORED = {"GGML_TYPE_Q8_1", "GGML_TYPE_Q8_K", "GGML_TYPE_COUNT"}

# gguf-py has no numpy form of these yet
NO_NUMPY_FORM = {"Q1_0", "Q2_0"}


@pytest.mark.parametrize("name", BY_NAME)
def test_sizes_and_names_are_ggmls(name: str) -> None:
    kind, base = BY_NAME[name], library.load().base
    assert base.ggml_blck_size(int(kind)) == kind.block_size
    assert base.ggml_type_size(int(kind)) == kind.block_bytes
    assert base.ggml_row_size(int(kind), 3 * kind.block_size) == kind.row_bytes(3 * kind.block_size)
    assert ffi.string(base.ggml_type_name(int(kind))).decode().lower() == name.lower()


def test_every_type_of_ggml_is_listed_or_refused_with_a_reason() -> None:
    enum = ffi.typeof("enum ggml_type").elements
    listed = {f"GGML_TYPE_{kind.name}": int(kind) for kind in TensorType}
    assert {name: number for number, name in enum.items() if name not in NOT_STORED} == listed
    for number in set(range(-2, 60)) - set(TYPES_BY_NUMBER):
        assert str(number) in describe_refusal(number)


def test_every_number_that_ggml_knows_by_name_and_can_store_is_listed() -> None:
    base = library.load().base
    count = {name: number for number, name in ffi.typeof("enum ggml_type").elements.items()}["GGML_TYPE_COUNT"]
    known = {number for number in range(count) if base.ggml_blck_size(number)}
    assert known - {9, 15} == set(TYPES_BY_NUMBER)  # Q8_1 and Q8_K


@pytest.mark.parametrize("name", BY_NAME)
def test_a_row_of_part_of_a_block_is_refused(name: str) -> None:
    kind = BY_NAME[name]
    assert kind.tensor_bytes((2 * kind.block_size, 3, 2)) == 12 * kind.block_bytes
    if kind.block_size > 1:
        with pytest.raises(ValueError, match="whole number"):
            kind.row_bytes(kind.block_size + 1)


def quantised(values: npt.NDArray[np.float32], kind: TensorType) -> npt.NDArray[np.uint8]:
    """By ggml's own quantiser, with an importance of one everywhere."""
    base = library.load().base
    rows, columns = values.shape
    raw = np.zeros(kind.tensor_bytes((columns, rows)), np.uint8)
    importance = np.ones(columns, np.float32)
    written = base.ggml_quantize_chunk(
        int(kind), ffi.from_buffer("float[]", values), ffi.from_buffer(raw, require_writable=True), 0, rows, columns,
        ffi.from_buffer("float[]", importance),
    )  # fmt: skip
    assert written == raw.nbytes
    return raw


# ggml's quantisers of these build search tables for 20 seconds; every bit pattern of theirs is valid but for the scales
DRAWN = {"IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M"}


def drawn(rows: int, columns: int, kind: TensorType) -> npt.NDArray[np.uint8]:
    """Random blocks whose values are about one."""
    seed = [rows, columns, int(kind)]
    n_blocks = rows * columns // kind.block_size
    blocks = np.random.default_rng(seed).integers(0, 256, (n_blocks, kind.block_bytes), np.uint8)
    if kind == TensorType.IQ1_M:
        # the f16 scale lies in the top nibbles of the last four words: 0x3000 is 0.125
        blocks[:, -7::2] &= 0x0F
        blocks[:, -1] |= 0x30
    else:
        scale = np.float16(0.125 if kind == TensorType.IQ1_S else 0.02)
        blocks[:, :2] = np.frombuffer(scale.tobytes(), np.uint8)
    return blocks.ravel()


def bytes_of(values: npt.NDArray[np.float32], kind: TensorType) -> npt.NDArray[np.uint8]:
    if kind == TensorType.F32:
        return values.view(np.uint8).ravel()
    if kind.name in DRAWN:
        return drawn(*values.shape, kind)
    return quantised(values, kind)


def meaning(raw: npt.NDArray[np.uint8], kind: TensorType) -> npt.NDArray[np.float32]:
    """By gguf-py where it can; else by ggml's get_rows."""
    if kind.name in NO_NUMPY_FORM:
        return by_get_rows(raw, kind)
    rows = raw.reshape(N_ROWS, -1)
    if kind in NUMPY_TYPES:
        return rows.view(NUMPY_TYPES[kind]).astype(np.float32)
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(int(kind)))


def by_get_rows(raw: npt.NDArray[np.uint8], kind: TensorType) -> npt.NDArray[np.float32]:
    bench = Bench()
    weight = bench.raw_input(raw, kind, ROW, N_ROWS)
    return bench.run(bench.builder.get_rows(weight, bench.input(np.arange(N_ROWS), TensorType.I32)))


def nmse(found: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    return float(((found - expected) ** 2).sum() / (expected.astype(np.float64) ** 2).sum())


@pytest.mark.parametrize("n_columns", [1, N_COLUMNS, 40])
@pytest.mark.parametrize("name", sorted(kind.name for kind in MATMUL_TYPES))
def test_a_weight_of_every_allowed_type_multiplies(name: str, n_columns: int) -> None:
    kind = BY_NAME[name]
    raw, b = bytes_of(random(N_ROWS, ROW), kind), random(n_columns, ROW, seed=1)
    bench = Bench(n_threads=2)
    weight = bench.raw_input(raw, kind, ROW, N_ROWS)
    found = bench.run(bench.builder.mul_mat(weight, bench.input(b))).reshape(n_columns, N_ROWS)
    expected = b.astype(np.float64) @ meaning(raw, kind).astype(np.float64).T
    # b is rounded to the type's partner, q8_0 or q8_K at the coarsest (2e-5 of its square, 3e-4 of five sums that
    # happen to cancel); another row or scale would give one or more
    assert nmse(found, expected) < 2e-3


@pytest.mark.parametrize("name", sorted(kind.name for kind in MATMUL_TYPES))
def test_products_apart_do_not_depend_on_what_other_tokens_chose(name: str) -> None:
    """For docs/determinism.md: an expert that many tokens chose gives each what it gives one alone."""
    kind, n_expert, n_rows, n_tokens = BY_NAME[name], 3, 32, 40
    raw = bytes_of(random(n_expert * n_rows, ROW), kind)
    x, preference = random(n_tokens, 1, ROW, seed=1), random(n_tokens, n_expert, seed=2)

    def product(tokens: slice, *, apart: bool, n_threads: int = 1) -> npt.NDArray[np.float32]:
        bench = Bench(n_threads=n_threads)
        b, weight = bench.builder, bench.raw_input(raw, kind, ROW, n_rows, n_expert)
        chosen = b.top_k(bench.input(preference[tokens]), 2)
        multiply = b.mul_mat_id_apart if apart else b.mul_mat_id
        return bench.run(multiply(weight, bench.input(x[tokens]), chosen)).reshape(-1, 2, n_rows)

    whole = product(slice(n_tokens), apart=True)
    assert whole.tobytes() == product(slice(n_tokens), apart=True, n_threads=2).tobytes()
    for tokens in (slice(1), slice(3, 10), slice(8), slice(11, 27)):
        assert product(tokens, apart=True).tobytes() == whole[tokens].tobytes()
    if kind not in TOGETHER_TYPES:
        assert product(slice(n_tokens), apart=False).tobytes() == whole.tobytes()
    assert nmse(product(slice(n_tokens), apart=False), whole) < 1e-6


@pytest.mark.parametrize("name", sorted(kind.name for kind in MATMUL_TYPES))
def test_rows_of_every_allowed_type_are_read_as_their_meaning(name: str) -> None:
    kind = BY_NAME[name]
    raw = bytes_of(random(N_ROWS, ROW), kind)
    assert nmse(by_get_rows(raw, kind), meaning(raw, kind)) < 1e-10
    # ternary types of normal weights keep the outermost third only; a wrong row would give two
    if name in DRAWN:
        assert 0.3 < meaning(raw, kind).std() < 3
    else:
        assert nmse(meaning(raw, kind), random(N_ROWS, ROW)) < 0.8


@pytest.mark.parametrize("name", sorted(kind.name for kind in MATMUL_TYPES))
def test_keys_and_values_of_every_allowed_type_can_be_attended(name: str) -> None:
    kind = BY_NAME[name]
    size, rows, heads = 256, 7, 2
    raw_k, raw_v = bytes_of(random(rows, size), kind), bytes_of(random(rows, size, seed=1), kind)
    q = random(heads, 3, size, seed=2)
    bench = Bench()
    k = bench.raw_input(raw_k, kind, size, rows, 1)
    v = bench.raw_input(raw_v, kind, size, rows, 1)
    mask = bench.input(np.zeros((3, rows)), TensorType.F16)
    found = bench.run(bench.builder.flash_attention(bench.input(q), k, v, mask, 1 / math.sqrt(size)))
    bench = Bench()
    every = bench.input(np.arange(rows), TensorType.I32)
    tensors = [bench.raw_input(raw, kind, size, rows) for raw in (raw_k, raw_v)]
    keys, values = bench.run_all(*(bench.builder.get_rows(tensor, every) for tensor in tensors))
    scores = np.einsum("hqd,rd->qhr", q.astype(np.float64), keys) / math.sqrt(size)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    assert nmse(found, np.einsum("qhr,rd->qhd", weights, values)) < 2e-4


@pytest.mark.parametrize("kind", sorted(MATMUL_TYPES))
def test_the_cpu_says_itself_that_it_can_multiply_by_every_allowed_type(kind: TensorType) -> None:
    bench = Bench()
    product = bench.builder.mul_mat(bench.zeros(kind, ROW, N_ROWS), bench.zeros(TensorType.F32, ROW, 2))
    assert backends.supports_op(bench.libraries, backends.cpu_device(bench.libraries), product)
    bench.builder.free()


def test_the_types_that_no_weight_may_have_are_the_plain_integers_and_f64() -> None:
    assert {kind.name for kind in set(TensorType) - MATMUL_TYPES} == {"I8", "I16", "I32", "I64", "F64"}
    assert FLOAT_TYPES < MATMUL_TYPES


def test_the_repacked_weights_of_the_cpu_multiply_alike() -> None:
    libraries = library.load()
    device = backends.cpu_device(libraries)
    a, b = random(32, 256), random(N_COLUMNS, 256, seed=1)
    n_tried = 0
    for kind in (TensorType.Q4_0, TensorType.Q8_0, TensorType.Q4_K):
        expected = b.astype(np.float64) @ gguf.quants.dequantize(
            quantised(a, kind).reshape(32, -1), gguf.GGMLQuantizationType(int(kind))
        ).T.astype(np.float64)
        for buffer_type in backends.extra_buffer_types(libraries, device):
            n_tried += multiplies_in(buffer_type, kind, a, b, expected)
    assert n_tried or not backends.extra_buffer_types(libraries, device)


def multiplies_in(
    buffer_type: object, kind: TensorType, a: npt.NDArray[np.float32], b: npt.NDArray[np.float32],
    expected: npt.NDArray[np.float64],
) -> bool:  # fmt: skip
    from ggml_engine.ggml.ops import GraphBuilder, TensorContext

    libraries = library.load()
    device = backends.cpu_device(libraries)
    weights = TensorContext(libraries, 1)
    weight = weights.new_tensor("weight", kind, 256, 32)
    try:
        buffer = backends.allocate_tensors(libraries, buffer_type, [weight])
    except AllocationError:
        return False  # AMX lists itself where the kernel refuses it
    builder = GraphBuilder(libraries, 4, 1)
    right = builder.input("b", TensorType.F32, 256, len(b))
    product = builder.output(builder.mul_mat(weight, right), "product")
    supported = backends.supports_op(libraries, device, product)
    if supported:
        backends.set_data(libraries, weight, quantised(a, kind))
        backend = backends.Backend(libraries, device, 1)
        graph = backends.Graph(builder, [backend], "repacked")
        backends.set_data(libraries, right, b)
        graph.compute()
        assert nmse(backends.get_array(libraries, product), expected) < 2e-4
        graph.free()
        backend.free()
    builder.free()
    buffer.free()
    weights.free()
    return supported
