"""A second layout of weights: steps of many tokens compute with it, and exactly as with a file that is stored so."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from adapters import write_adapter
from engines import Logits, batch_of, executor_over, feed, loaded
from forged_models import taken_apart
from gguf import GGMLQuantizationType, quants
from native_buffers import recorded_buffers
from quantised import blocks_of
from saved_models import SavedModel, write_model
from tiny_models import VOCAB
from wide_llama import EXPERTS, LEFT_OUT, SIZES

from ggml_engine import loading
from ggml_engine.control.machine_memory import MachineMemory
from ggml_engine.errors import AllocationError, CancelledError, OptionError
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.executor.options import ExecutorOptions
from ggml_engine.ggml.backends import Buffer, buffer_type_name
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.models.adapter import load_adapter
from ggml_engine.models.adapter_set import AdapterSet
from ggml_engine.models.model import Model, load_model
from ggml_engine.models.prefill_weights import MIN_TOKENS

TOKENS: list[int] = np.random.default_rng(8).integers(3, VOCAB, 40).tolist()
FLOATS = ["f16", "bf16", "f32"]
OPTIONS: dict[str, Any] = {"capacity": 64 * MIN_TOKENS, "k_type": "f32", "v_type": "f32"}


def written(path: Path, kind: str, *, experts: bool = False, tied: bool = True) -> Path:
    dropped = (*LEFT_OUT, r"^output\.weight") if tied else LEFT_OUT
    metadata = SIZES | (EXPERTS if experts else {})
    return write_model(
        SavedModel("llama", metadata, drop=dropped, types={r"ffn_gate_inp\.": "F32", r"\.weight": kind}), path
    )


@pytest.fixture(scope="module", params=["Q4_1", "Q5_0", "Q4_K"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in a type; the output is the embedding's matrix."""
    return written(tmp_path_factory.mktemp("models") / f"{request.param}.gguf", request.param)


@pytest.fixture(scope="module")
def q4_1(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("models") / "q4_1.gguf", "Q4_1")


def stored_as(path: Path, layout: str) -> Path:
    """The same model with the values of its layers' matrices stored in another type."""
    kind = TensorType[layout.upper()]
    forge = taken_apart(path)
    for tensor in forge.tensors:
        if not str(tensor.name).startswith("blk.") or len(tensor.shape) != 2 or tensor.kind == TensorType.F32:
            continue
        source = TensorType(tensor.kind)
        raw = np.frombuffer(tensor.data, np.uint8).reshape(tensor.shape[1], source.row_bytes(tensor.shape[0]))
        values = quants.dequantize(raw, GGMLQuantizationType(tensor.kind)).astype(np.float32)
        tensor.kind, tensor.data = int(kind), blocks_of(values, kind).tobytes()
    return forge.write(path.with_name(f"{path.stem}-{layout}.gguf"))


def answers(path: Path, layout: str = "off", chunk: int = 512, tokens: list[int] = TOKENS) -> Logits:
    with loaded(path, threads=2, prefill_weights=layout) as model, executor_over(model, **OPTIONS) as executor:
        return feed(executor, executor.open(), tokens, chunk)


def error(found: Logits, expected: Logits) -> float:
    return float(np.square(found - expected).mean() / expected.var())


@pytest.mark.parametrize("layout", FLOATS)
def test_a_long_step_is_that_of_a_file_stored_so(path: Path, layout: str) -> None:
    found = answers(path, layout)
    assert found.tobytes() == answers(stored_as(path, layout)).tobytes()
    assert found.tobytes() != answers(path).tobytes()


def test_quantised_once_more_it_is_nearly_so(path: Path) -> None:
    # ggml's quantiser of steps and that of files round halves differently
    found, expected = answers(path, "q8_0"), answers(stored_as(path, "q8_0"))
    assert error(found, expected) < 1e-3
    assert found.tobytes() != answers(path).tobytes()


@pytest.mark.parametrize("layout", FLOATS)
def test_float_layouts_come_closer_to_what_the_values_mean(path: Path, layout: str) -> None:
    meant = answers(stored_as(path, "f32"))
    assert error(answers(path, layout), meant) < 0.5 * error(answers(path), meant)


@pytest.mark.parametrize("chunk", [1, MIN_TOKENS - 1])
def test_short_steps_compute_with_the_ordinary_weights(path: Path, chunk: int) -> None:
    tokens = TOKENS[: 2 * chunk]
    assert answers(path, "bf16", chunk, tokens).tobytes() == answers(path, "off", chunk, tokens).tobytes()


def test_the_border_is_where_it_is_said_to_be(q4_1: Path) -> None:
    tokens = TOKENS[:MIN_TOKENS]
    assert (
        answers(q4_1, "bf16", 512, tokens).tobytes() == answers(stored_as(q4_1, "bf16"), "off", 512, tokens).tobytes()
    )


def test_many_sequences_in_a_step_are_many_tokens(q4_1: Path) -> None:
    def decoded(path: Path, layout: str) -> Logits:
        with loaded(path, threads=2, prefill_weights=layout) as model, executor_over(model, **OPTIONS) as executor:
            return executor.forward(batch_of([(executor.open(), [token]) for token in TOKENS[:MIN_TOKENS]]))

    found = decoded(q4_1, "bf16")
    assert found.tobytes() == decoded(stored_as(q4_1, "bf16"), "off").tobytes()
    assert found.tobytes() != decoded(q4_1, "off").tobytes()


def test_adapters_change_the_products_of_both(q4_1: Path) -> None:
    file = write_adapter(q4_1.with_name("adapter.gguf"), q4_1, names=r"(attn_\w+|ffn_\w+)\.weight$")

    def adapted(path: Path, layout: str, tokens: list[int]) -> Logits:
        with loaded(path, threads=2, prefill_weights=layout) as model:
            adapter = load_adapter(model, file)
            with executor_over(model, **OPTIONS) as executor:
                return feed(executor, executor.open(AdapterSet.of([(adapter, 0.7)])), tokens)

    assert adapted(q4_1, "f32", TOKENS).tobytes() == adapted(stored_as(q4_1, "f32"), "off", TOKENS).tobytes()
    assert error(adapted(q4_1, "f32", TOKENS), answers(q4_1, "f32")) > 0.05, "the adapter hardly shows"
    assert adapted(q4_1, "f32", TOKENS[:5]).tobytes() == adapted(q4_1, "off", TOKENS[:5]).tobytes()


def test_experts_router_embedding_and_output_stay_as_they_are(tmp_path: Path) -> None:
    path = written(tmp_path / "experts.gguf", "Q4_1", experts=True, tied=False)
    with loaded(path, threads=1, prefill_weights="bf16") as model:
        assert model.prefill is not None
        layers = {f"blk.{il}.attn_{part}.weight" for il in (0, 1) for part in ("q", "k", "v", "output")}
        assert set(model.prefill.tensors) == layers
        assert {tensor.type for tensor in model.prefill.tensors.values()} == {TensorType.BF16}
        assert set(model.weights_for(512)) == set(model.weights)
    assert answers(path, "f16").tobytes() == answers(stored_as(path, "f16")).tobytes()


def test_matrices_that_are_floats_already_stay_as_they_are(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = written(tmp_path / "floats.gguf", "F16")
    with loaded(path, threads=1, prefill_weights="bf16") as model:
        assert model.prefill is None
        assert model.weights_for(512) is model.weights
    assert "prefill_weights changes nothing" in caplog.text


def test_matrices_larger_than_a_piece_are_converted_whole(q4_1: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = answers(q4_1, "bf16")
    monkeypatch.setattr("ggml_engine.models.prefill_weights._PIECE_ELEMENTS", 256 * 100)
    assert answers(q4_1, "bf16").tobytes() == expected.tobytes()


# ---- memory, and what is refused


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[weakref.ref[Buffer]]]:
    """Every native buffer made during the test."""
    made = recorded_buffers(monkeypatch)
    yield made
    assert all(buffer() is None or buffer()._ptr is None for buffer in made)  # type: ignore[union-attr]


def matrix_elements(model: Model) -> int:
    return sum(
        int(np.prod(info.shape))
        for name, info in model.file.tensors.items()
        if name.startswith("blk.") and len(info.shape) == 2
    )


@pytest.mark.parametrize(("layout", "bits"), [("f16", 16), ("bf16", 16), ("f32", 32), ("q8_0", 8.5)])
def test_its_memory_is_told_and_freed_with_the_model(
    q4_1: Path, buffers: list[weakref.ref[Buffer]], layout: str, bits: float
) -> None:
    with loaded(q4_1, threads=1, prefill_weights=layout) as model, executor_over(model, **OPTIONS) as executor:
        n_bytes = executor.stats()["prefill_weight_bytes"]
        assert n_bytes == matrix_elements(model) * bits / 8
        assert executor.description["prefill_weights"] == layout
    assert buffers
    with loaded(q4_1, threads=1) as model, executor_over(model, **OPTIONS) as executor:
        assert executor.stats()["prefill_weight_bytes"] == 0
        assert executor.description["prefill_weights"] == "off"


def test_what_does_not_fit_is_refused_before_anything_is_taken(
    q4_1: Path, buffers: list[weakref.ref[Buffer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with GGUFFile.open(q4_1) as file:
        model = load_model(file, threads=1, prefill_weights="bf16", memory_available=1 << 30)
        n_bytes = model.prefill.n_bytes  # type: ignore[union-attr]
        model.free()
        buffers.clear()
        with pytest.raises(AllocationError, match=rf"'bf16' takes {n_bytes / 2**20:.1f} MiB .* are available"):
            load_model(file, threads=1, prefill_weights="bf16", memory_available=n_bytes - 1)
        assert all(made.n_bytes == 0 for ref in buffers if (made := ref()) is not None)
        monkeypatch.setattr(loading, "machine_memory", lambda: MachineMemory(1 << 30, 1 << 10))
        with pytest.raises(AllocationError, match="are available"):
            loading.load_executor(file, threads=1, ctx=16, prefill_weights="bf16")


@pytest.mark.parametrize("after", [0, 3, 15, 25])
def test_cancelling_frees_both(q4_1: Path, buffers: list[weakref.ref[Buffer]], after: int) -> None:
    calls: list[int] = []

    def cancel() -> bool:
        calls.append(1)
        return len(calls) > after

    with GGUFFile.open(q4_1) as file, pytest.raises(CancelledError, match="cancelled"):
        load_model(file, threads=1, cancel=cancel, prefill_weights="bf16")
    assert len(calls) == after + 1
    assert buffers


def test_progress_counts_both(q4_1: Path) -> None:
    seen: list[tuple[int, int]] = []
    with loaded(
        q4_1, threads=1, prefill_weights="f32", progress=lambda done, total: seen.append((done, total))
    ) as model:
        assert model.prefill is not None
        assert len(seen) == len(model.weights) + len(model.prefill.tensors)
        assert seen[-1][0] - seen[len(model.weights) - 1][0] == model.prefill.n_bytes
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    assert {total for _, total in seen} == {seen[-1][0]}


def test_deterministic_mode_takes_one_layout(q4_1: Path) -> None:
    reason = "deterministic mode.* cannot go with prefill_weights 'bf16'"
    with loaded(q4_1, threads=1, prefill_weights="bf16") as model, pytest.raises(OptionError, match=reason):
        GgmlExecutor(model, ExecutorOptions(capacity=256, deterministic=True))
    with GGUFFile.open(q4_1) as file, pytest.raises(OptionError, match=reason):
        loading.load_executor(file, deterministic=True, prefill_weights="bf16")


def test_unknown_layouts_are_refused_and_so_is_libllamas_engine(q4_1: Path) -> None:
    with GGUFFile.open(q4_1) as file:
        with pytest.raises(OptionError, match="prefill_weights is off, f16, bf16, f32 or q8_0, asked for 'q4_0'"):
            load_model(file, prefill_weights="q4_0")  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="prefill_weights is off"):
            loading.load_executor(file, engine="llama", prefill_weights="BF16")  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="prefill_weights 'bf16' is for the native engine, and engine 'llama'"):
            loading.load_executor(file, engine="llama", prefill_weights="bf16")


def test_every_layout_has_its_own_fingerprint(q4_1: Path) -> None:
    names = set()
    for layout in ("off", *FLOATS, "q8_0"):
        with loaded(q4_1, threads=1, prefill_weights=layout) as model, executor_over(model, **OPTIONS) as executor:
            names.add(executor.fingerprint)
    assert len(names) == 5


def test_it_lies_rearranged_where_ggml_has_a_form_for_its_type(q4_1: Path) -> None:
    with loaded(q4_1, threads=1, prefill_weights="q8_0") as model:
        assert model.prefill is not None
        base = model.libraries.base
        kinds = {
            buffer_type_name(model.libraries, base.ggml_backend_buffer_get_type(tensor.ptr.buffer))
            for tensor in model.prefill.tensors.values()
        }
    stored = stored_as(q4_1, "q8_0")
    with loaded(stored, threads=1) as model:
        expected = {
            buffer_type_name(model.libraries, base.ggml_backend_buffer_get_type(model.weights[name].ptr.buffer))
            for name in ("blk.0.attn_q.weight", "blk.1.ffn_down.weight")
        }
    assert len(kinds) == len(expected) == 1
    assert {name.replace("CPU_Mapped", "CPU") for name in expected} == kinds
