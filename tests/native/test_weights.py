"""Weights lie where they compute fastest, are copied only where they must be, and go when they are let go."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from architecture_rows import model_file
from engines import executor_over, feed, loaded, running
from forged_models import find_tensor, taken_apart
from gguf_forge import GGUFForge
from native_buffers import recorded_buffers
from tiny_models import F16, F32, Q4_0, VOCAB, write_gemma3, write_llama

from ggml_engine.errors import CancelledError, GGUFError
from ggml_engine.ggml.backends import Buffer, buffer_type_name, cpu_device, extra_buffer_types
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.library import ffi
from ggml_engine.models.model import Model, load_model

TOKENS = [5, 9, 13, 200, 301, 7]


@pytest.fixture
def buffers(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Buffer]]:
    """Every native buffer made during the test."""
    return recorded_buffers(monkeypatch)


def n_alive(buffers: list[weakref.ref[Buffer]]) -> int:
    return sum(1 for made in buffers if (buffer := made()) is not None and buffer._ptr is not None)


def answers(model: Model) -> bytes:
    with executor_over(model, capacity=16) as executor:
        return feed(executor, executor.open(), TOKENS).tobytes()


def buffer_types(model: Model) -> dict[str, str]:
    base = model.libraries.base
    return {
        name: buffer_type_name(model.libraries, base.ggml_backend_buffer_get_type(tensor.ptr.buffer))
        for name, tensor in model.weights.items()
    }


def address(memory: memoryview) -> int:
    return int(ffi.cast("uintptr_t", ffi.from_buffer(memory)))


@pytest.mark.parametrize("mmap", [True, False])
def test_a_tensor_is_the_files_own_memory(tmp_path: Path, mmap: bool) -> None:
    with loaded(write_llama(tmp_path / "tiny.gguf", types=F16), mmap=mmap, threads=1) as model:
        assert model.weights.n_bytes_copied == 0
        for name, tensor in model.weights.items():
            memory = model.file.tensor_bytes(name)
            assert int(ffi.cast("uintptr_t", tensor.ptr.data)) == address(memory)
            assert tensor.span_bytes == memory.nbytes


@pytest.mark.parametrize("change", ["delete", "truncate", "overwrite"])
def test_a_copied_file_may_change_or_go(tmp_path: Path, change: str) -> None:
    path = write_llama(tmp_path / "tiny.gguf")
    with loaded(path, threads=1) as model:
        expected = answers(model)
    with loaded(path, mmap=False, threads=1) as model:
        if change == "delete":
            path.unlink()
        elif change == "truncate":
            os.truncate(path, 100)
        else:
            path.write_bytes(b"\xff" * path.stat().st_size)
        assert answers(model) == expected


def test_a_mapped_file_may_be_deleted_and_closed(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf")
    with GGUFFile.open(path) as file:
        model = load_model(file, threads=1)
        expected = answers(model)
    path.unlink()
    assert answers(model) == expected  # the buffer keeps the mapping
    model.free()
    model.free()


def test_products_lie_rearranged_where_ggml_has_a_form_for_them(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", types=Q4_0)
    with loaded(path, threads=1) as model:
        extra = {
            buffer_type_name(model.libraries, found)
            for found in extra_buffer_types(model.libraries, cpu_device(model.libraries))
        }
        types = buffer_types(model)
        rearranged = {name for name, kind in types.items() if kind in extra}
        # libllama asks the same question, and every CPU that wheels are built for has a form of Q4_0
        assert "blk.0.attn_q.weight" in rearranged
        assert "token_embd.weight" not in rearranged, "rows are looked up in the file's layout"
        assert not any(name.endswith("norm.weight") for name in rearranged)
        held = [model.file.tensors[name].n_bytes for name in rearranged]
        assert model.weights.n_bytes_copied == sum(held)
    with loaded(path, threads=1, repack=False) as model:
        assert set(buffer_types(model).values()) == {"CPU_Mapped"}
        assert model.weights.n_bytes_copied == 0


@pytest.mark.parametrize("row", ["qwen3moe q4_0", "qwen3moe q8_0", "qwen3moe q4_k and q6_k"])
@pytest.mark.usefixtures("in_matmul_form")
def test_experts_lie_rearranged_where_ggml_has_a_form_for_them_and_answer_alike(row: str) -> None:
    found = []
    for repack in (True, False):
        with loaded(model_file(row), threads=2, repack=repack) as model:
            types = buffer_types(model)
            experts = {kind for name, kind in types.items() if "_exps." in name}
            if not repack:
                assert experts == {"CPU_Mapped"}
            elif row.endswith("q4_0"):  # the others have forms on some processors only
                assert experts == {"CPU_REPACK"}
            with executor_over(model, capacity=64) as executor:
                found.append(feed(executor, executor.open(), list(range(5, 45))))
    rearranged, plain = found
    assert np.square(rearranged - plain).mean() < 1e-4 * np.square(plain).mean()


@pytest.mark.parametrize("types", [F32, Q4_0])
def test_tied_embeddings_are_one_memory_unless_one_of_them_is_rearranged(tmp_path: Path, types: Any) -> None:
    with loaded(write_gemma3(tmp_path / "tiny.gguf", types=types), threads=1) as model:
        weights = model.weights
        shared = weights["output.weight"].ptr.data == weights["token_embd.weight"].ptr.data
        assert shared == (buffer_types(model)["output.weight"] == "CPU_Mapped")
        assert len(weights) == len(model.file.tensors) + 1


def test_progress_counts_up_to_all_bytes(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "tiny.gguf", types=Q4_0, tied=True)
    seen: list[tuple[int, int]] = []
    with loaded(path, threads=1, progress=lambda done, total: seen.append((done, total))) as model:
        n_bytes = sum(model.file.tensors[tensor.name].n_bytes for tensor in model.weights.values())
        assert len(seen) == len(model.weights) > 10
    done = [at for at, _ in seen]
    assert done == sorted(set(done))
    assert {total for _, total in seen} == {done[-1]} == {n_bytes}


@pytest.mark.parametrize("types", [F32, Q4_0])
@pytest.mark.parametrize("after", [0, 1, 7, 15])
def test_cancelling_a_load_frees_what_it_had(
    tmp_path: Path, buffers: list[weakref.ref[Buffer]], types: Any, after: int
) -> None:
    path = write_llama(tmp_path / "tiny.gguf", types=types)
    calls: list[int] = []

    def cancel() -> bool:
        calls.append(1)
        return len(calls) > after

    with GGUFFile.open(path) as file, pytest.raises(CancelledError, match="cancelled"):
        load_model(file, threads=1, cancel=cancel)
    assert len(calls) == after + 1
    assert buffers
    assert n_alive(buffers) == 0


def test_an_exception_of_the_progress_callback_frees_what_there_was(
    tmp_path: Path, buffers: list[weakref.ref[Buffer]]
) -> None:
    def progress(done: int, total: int) -> None:
        if done > total // 2:
            raise KeyError("mine")

    with GGUFFile.open(write_llama(tmp_path / "tiny.gguf")) as file, pytest.raises(KeyError, match="mine"):
        load_model(file, threads=1, progress=progress)
    assert n_alive(buffers) == 0


def test_freeing_a_model_frees_every_buffer(tmp_path: Path, buffers: list[weakref.ref[Buffer]]) -> None:
    with loaded(write_gemma3(tmp_path / "tiny.gguf", types=Q4_0), threads=1) as model:
        expected = answers(model)
        alive = n_alive(buffers)
        assert alive >= 2  # mapped and rearranged; the executor's are gone
        assert answers(model) == expected
        assert n_alive(buffers) == alive
    assert n_alive(buffers) == 0


def split(whole: Path, folder: Path, n_parts: int) -> Path:
    """The model in `n_parts` files, as llama-gguf-split names them; the first has the keys."""
    forge = taken_apart(whole)
    tensors, values = list(forge.tensors), list(forge.values)
    per_part = -(-len(tensors) // n_parts)
    paths = []
    for number in range(n_parts):
        part = GGUFForge()
        part.values[:] = values if number == 0 else []
        part.put("split.no", number, kind=2)
        part.put("split.count", n_parts, kind=2)
        part.put("split.tensors.count", len(tensors), kind=5)
        part.tensors[:] = tensors[number * per_part : (number + 1) * per_part]
        paths.append(part.write(folder / f"tiny-{number + 1:05}-of-{n_parts:05}.gguf"))
    return paths[0]


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("n_parts", [2, 5])
def test_a_model_in_parts_is_the_model_in_one_piece(tmp_path: Path, n_parts: int, mmap: bool) -> None:
    whole = write_llama(tmp_path / "whole.gguf", types=Q4_0)
    with loaded(whole, threads=1) as model:
        expected = answers(model)
    first = split(whole, tmp_path, n_parts)
    for path in (first, first.with_name(f"tiny-{n_parts:05}-of-{n_parts:05}.gguf")):
        with loaded(path, mmap=mmap, threads=1) as model:
            assert len(model.file.parts) == n_parts
            assert answers(model) == expected
    first.with_name(f"tiny-00002-of-{n_parts:05}.gguf").unlink()
    with pytest.raises(GGUFError, match="part 2"):
        GGUFFile.open(first)


@pytest.mark.parametrize("alignment", [8, 16, 64, 4096])
def test_weights_of_any_alignment_give_the_same_answer(tmp_path: Path, alignment: int) -> None:
    whole = write_llama(tmp_path / "whole.gguf")
    forge = taken_apart(whole)
    forge.alignment = alignment
    forge.put("general.alignment", alignment)
    # a tensor of 4 bytes moves the others off multiples of 32, where the alignment lets it
    forge.tensors.insert(0, find_tensor(tiny_extra(), "x"))
    with loaded(whole, threads=1) as model:
        expected = answers(model)
    with loaded(forge.write(tmp_path / "other.gguf"), threads=1) as model:
        assert (model.weights.n_bytes_copied == 0) == (alignment % 32 == 0)
        assert answers(model) == expected


def test_a_tied_tensor_that_must_be_copied_is_copied_once(tmp_path: Path) -> None:
    forge = taken_apart(write_llama(tmp_path / "whole.gguf", tied=True))
    forge.alignment = 8
    forge.put("general.alignment", 8)
    with loaded(forge.write(tmp_path / "other.gguf"), threads=1) as model:
        assert model.weights["output.weight"].ptr.data == model.weights["token_embd.weight"].ptr.data
        n_bytes = sum(info.n_bytes for info in model.file.tensors.values())
        assert n_bytes <= model.weights.n_bytes_copied < n_bytes + 64 * len(model.file.tensors)


def tiny_extra() -> GGUFForge:
    forge = GGUFForge()
    forge.tensor("x", np.zeros(1, np.float32))
    return forge


@pytest.fixture
def llama(tmp_path: Path) -> Iterator[Model]:
    with loaded(write_llama(tmp_path / "tiny.gguf"), threads=1) as model:
        yield model


def test_weights_are_a_mapping_of_what_the_file_has(llama: Model) -> None:
    assert set(llama.weights) == set(llama.file.tensors)
    assert "blk.0.attn_q.bias" not in llama.weights
    assert llama.weights["token_embd.weight"].ne == (64, VOCAB, 1, 1)


def test_two_models_and_two_executors_do_not_disturb_each_other(tmp_path: Path) -> None:
    one, other = write_llama(tmp_path / "one.gguf", seed=1), write_llama(tmp_path / "other.gguf", seed=2)
    with running(one, capacity=16) as first, running(other, capacity=16) as second:
        a, b = first.open(), second.open()
        found = [[feed(x, s, [token]) for token in TOKENS] for x, s in ((first, a), (second, b))]
        again = [[], []]  # type: ignore[var-annotated]
        first.rewind(a, 0)
        second.rewind(b, 0)
        for token in TOKENS:
            again[0].append(feed(first, a, [token]))
            again[1].append(feed(second, b, [token]))
        assert np.array(found[0]).tobytes() == np.array(again[0]).tobytes()
        assert np.array(found[1]).tobytes() == np.array(again[1]).tobytes()
        assert np.abs(np.array(found[0]) - np.array(found[1])).max() > 1
