"""Forwards that are told to stop: natively, for their executor alone, with cells that can be freed and used again."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from engines import batch_of, executor_over, feed, loaded
from graphs import Bench
from tiny_models import VOCAB, write_gemma3, write_llama

from ggml_engine.errors import AbortedError, ComputeError, StepError
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.protocol import Executor
from ggml_engine.ggml import backends, library
from ggml_engine.ggml.abort import AbortFlag
from ggml_engine.ggml.backends import Backend, Graph
from ggml_engine.ggml.library import ffi
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.models.model import Model

TOKENS: list[list[int]] = np.random.default_rng(13).integers(3, VOCAB, (3, 60)).tolist()


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def model(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Model]:
    path = tmp_path_factory.mktemp("tiny") / "model.gguf"
    write_llama(path) if request.param == "llama" else write_gemma3(path, window=5)
    with loaded(path, threads=1) as model:
        yield model


def address(pointer: Any) -> int:
    return int(ffi.cast("uintptr_t", pointer))


def installed(backend: Backend) -> tuple[int, int]:
    """Callback and data that ggml's CPU backend holds, read from its memory.

    `struct ggml_backend` ends in its device and its context; the context of the CPU's is threads, thread pool, work data,
    its size, callback, data (ggml-backend-impl.h and ggml-cpu.cpp of the checked version).
    """
    words = ffi.cast("uintptr_t *", backend.ptr)
    device = next(i for i in range(24) if words[i] == address(backend.device.ptr))
    context = ffi.cast("uintptr_t *", words[device + 1])
    assert context[0] & 0xFFFFFFFF == 1, "these are not the fields of a CPU backend"
    return int(context[4]), int(context[5])


def test_the_callback_is_a_function_of_ggml_over_memory_of_the_executor(model: Model) -> None:  # R108
    """No Python runs inside a native compute: what ggml holds is the address of its own function, not one of cffi's."""
    libraries = library.load()
    path = libraries.directory / library.library_file("ggml-base")
    native = ctypes.cast(ctypes.CDLL(str(path)).ggml_is_empty, ctypes.c_void_p).value
    with executor_over(model, capacity=64) as first, executor_over(model, capacity=64) as second:
        for executor in (first, second, first):
            sequence = executor.open()
            executor.forward(Batch.of_sequence(sequence, [5]))
            executor.close(sequence)
            flag = executor._abort
            assert installed(model.backends[-1]) == (native, address(flag.data))
            assert address(flag.callback) == native


def test_the_flag_is_what_the_callback_says() -> None:
    flag = AbortFlag(library.load())
    for change, up in [(None, False), (flag.set, True), (flag.set, True), (flag.clear, False), (flag.set, True)]:
        if change is not None:
            change()
        assert flag.is_set is up
        assert flag.callback(flag.data) is up


@pytest.mark.parametrize("recover", ["rewind", "close"])
@pytest.mark.parametrize("deterministic", [False, True])
def test_an_aborted_step_can_be_run_again_to_the_same_bytes(
    model: Model, deterministic: bool, recover: str
) -> None:  # R69 R107
    """Also where graphs are used again: nothing of the aborted run is left in them."""
    step = [(0, TOKENS[0][7:30]), (1, TOKENS[1][:20]), (2, TOKENS[2][3:4])]
    found = []
    for aborts in (False, True):
        with executor_over(model, capacity=256, deterministic=deterministic) as executor:
            sequences = [executor.open() for _ in range(3)]
            feed(executor, sequences[0], TOKENS[0][:7])
            feed(executor, sequences[2], TOKENS[2][:3])
            batch = batch_of([(sequences[i], tokens) for i, tokens in step])
            if aborts:
                used, n_forwarded = executor.cache.used_cells, executor.n_forwarded
                executor.abort()
                for _ in range(2):
                    with pytest.raises(AbortedError, match=r"graph of .* told to stop"):
                        executor.forward(batch)
                    assert executor.cache.used_cells == used + 44
                    assert [executor.length(sequence) for sequence in sequences] == [7, 0, 3]
                    assert executor.n_forwarded == n_forwarded
                    with pytest.raises(StepError, match="not committed"):
                        executor.forward(batch)
                    for sequence, length in zip(sequences, (7, 0, 3), strict=True):
                        executor.rewind(sequence, length)
                    assert executor.cache.used_cells == used
                executor.clear_abort()
                if recover == "close":  # others of the step go on without it
                    executor.abort()
                    with pytest.raises(AbortedError):
                        executor.forward(batch)
                    executor.clear_abort()
                    executor.close(sequences[1])
                    executor.rewind(sequences[0], 7)
                    executor.rewind(sequences[2], 3)
                    assert executor.cache.used_cells == used
                    sequences[1] = executor.open()
                    batch = batch_of([(sequences[i], tokens) for i, tokens in step])
            logits = [executor.forward(batch), *(feed(executor, sequences[i], TOKENS[i][40:44], 1) for i in range(3))]
            found.append(np.concatenate(logits).tobytes())
    assert found[0] == found[1]


def test_an_abort_is_for_its_executor_alone(model: Model) -> None:
    """Two executors over one model share its backends, and run in turns."""
    with executor_over(model, capacity=64) as first, executor_over(model, capacity=64) as second:
        batches = [(executor, Batch.of_sequence(executor.open(), [5, 6, 7])) for executor in (first, second)]
        sequences = [int(batch.sequences[0]) for _, batch in batches]
        expected = second.forward(batches[1][1]).tobytes()
        second.rewind(sequences[1], 0)
        first.abort()
        for _ in range(2):
            with pytest.raises(AbortedError):
                first.forward(batches[0][1])
            first.rewind(sequences[0], 0)
            assert second.forward(batches[1][1]).tobytes() == expected
            second.rewind(sequences[1], 0)
        second.abort()
        first.clear_abort()
        assert first.forward(batches[0][1]).tobytes() == expected
        with pytest.raises(AbortedError):
            second.forward(batches[1][1])


def test_an_executor_that_is_gone_aborts_nobody(model: Model) -> None:
    with executor_over(model, capacity=64) as executor:
        executor.abort()
        with pytest.raises(AbortedError):
            executor.forward(Batch.of_sequence(executor.open(), [5]))
    kept = executor._abort
    del executor
    gc.collect()
    assert installed(model.backends[-1])[1] == address(kept.data)
    del kept
    gc.collect()
    assert model.backends[-1]._abort is not None, "ggml holds a pointer to what is freed"
    with executor_over(model, capacity=64) as executor:
        executor.forward(Batch.of_sequence(executor.open(), [5]))


def test_abort_and_clear_abort_wait_for_no_forward(model: Model) -> None:
    """They come while a forward runs, which holds the turn."""
    with executor_over(model, capacity=64) as executor:

        def call() -> None:
            executor.abort()
            executor.clear_abort()
            executor.abort()

        caller = threading.Thread(target=call, daemon=True)
        with executor._turn:
            caller.start()
            caller.join(timeout=30)
            assert not caller.is_alive()
        with pytest.raises(AbortedError):
            executor.forward(Batch.of_sequence(executor.open(), [5]))


@pytest.mark.usefixtures("every_default")
def test_other_failures_are_not_aborts(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    class Base:
        def __getattr__(self, name: str) -> Any:
            return getattr(library.load().base, name)

        def ggml_backend_sched_graph_compute(self, *_: object) -> int:
            return -1

    with executor_over(model, capacity=64) as executor:
        sequence = executor.open()
        executor.forward(Batch.of_sequence(sequence, [5]))
        graph = next(iter(executor.graphs._ready.values())).graph
        monkeypatch.setattr(graph, "libraries", dataclasses.replace(graph.libraries, base=Base()))
        executor.abort()
        with pytest.raises(ComputeError) as caught:
            executor.forward(Batch.of_sequence(sequence, [6]))
        assert not isinstance(caught.value, AbortedError)


# ---- graphs and backends


@pytest.fixture
def small_graph() -> Iterator[Callable[[Backend, AbortFlag | None], Graph]]:
    made = []

    def make(backend: Backend, flag: AbortFlag | None) -> Graph:
        bench = Bench()
        x = bench.builder.input("x", TensorType.F32, 4)
        bench.builder.output(bench.builder.silu(bench.builder.tanh(x)), "y")
        made.append(Graph(bench.builder, [backend], "small", flag))
        return made[-1]

    yield make
    for graph in made:
        graph.free()


def test_a_graph_without_a_flag_is_stopped_by_none(
    small_graph: Callable[[Backend, AbortFlag | None], Graph],
) -> None:
    """What copies cells must not end half done because a forward before it could be aborted."""
    libraries = library.load()
    backend, flag = Backend(libraries, backends.cpu_device(libraries), 1), AbortFlag(libraries)
    with_flag, without = small_graph(backend, flag), small_graph(backend, None)
    flag.set()
    for _ in range(2):
        with pytest.raises(AbortedError, match="small was told to stop"):
            with_flag.compute()
        without.compute()
        assert installed(backend) == (0, 0)
    flag.clear()
    with_flag.compute()


def test_a_device_that_asks_nothing_is_given_nothing() -> None:
    libraries = library.load()

    class Base:
        def __getattr__(self, name: str) -> Any:
            return getattr(libraries.base, name)

        def ggml_backend_reg_get_proc_address(self, *_: object) -> Any:
            return ffi.NULL

    backend = Backend(dataclasses.replace(libraries, base=Base()), backends.cpu_device(libraries), 1)
    backend.set_abort_flag(AbortFlag(libraries))
    backend.free()


def test_the_executor_is_one_of_the_protocol(model: Model) -> None:
    with executor_over(model, capacity=64, max_batch_tokens=32) as executor:
        assert isinstance(executor, Executor)
        assert (executor.capacity, executor.max_batch_tokens, executor.n_vocab) == (64, 32, VOCAB)
        sequence = executor.open()
        assert executor.free_cells == 64
        feed(executor, sequence, TOKENS[0][:10])
        assert executor.free_cells == 54
