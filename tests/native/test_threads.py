"""Steps of one token and of more have threads of their own, and the native side is told before each that has others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from engines import batch_of, executor_over, feed, libllama_running, loaded
from tiny_models import VOCAB, write_llama

from ggml_engine.engine import Engine
from ggml_engine.errors import OptionError
from ggml_engine.executor.llama_options import LlamaOptions
from ggml_engine.ggml import backends
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.library import ffi
from ggml_engine.ggml.threads import ThreadCounts
from ggml_engine.models.model import load_model

TOKENS: list[int] = np.random.default_rng(7).integers(3, VOCAB, 40).tolist()
NOT_COUNTS = [0, -1, 513, 1.5, "x", True]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("tiny") / "model.gguf")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Every number of threads that ggml was told; it is told them all the same."""
    found: list[int] = []
    address_of = backends._proc_address
    kept: list[Any] = []

    def spied(libraries: Any, device: Any, name: bytes) -> Any:
        address = address_of(libraries, device, name)
        if name != b"ggml_backend_set_n_threads":
            return address
        native = ffi.cast("ggml_backend_set_n_threads_t", address)

        def note(backend: Any, n_threads: int) -> None:
            found.append(n_threads)
            native(backend, n_threads)

        kept.append(ffi.callback("ggml_backend_set_n_threads_t", note))
        return kept[-1]

    monkeypatch.setattr(backends, "_proc_address", spied)
    return found


def test_a_step_of_one_token_has_other_threads_than_a_step_of_more(path: Path, told: list[int]) -> None:
    with loaded(path, threads=1, threads_batch=3) as model, executor_over(model, capacity=128) as executor:
        sequence, other = executor.open(), executor.open()
        told.clear()
        feed(executor, sequence, TOKENS[:20])
        assert told == [3]
        feed(executor, sequence, TOKENS[20:24], 1)
        assert told == [3, 1]
        feed(executor, other, TOKENS[:1])
        assert told == [3, 1]
        executor.forward(batch_of([(sequence, TOKENS[24:25]), (other, TOKENS[1:2])]))
        assert told == [3, 1, 3]


def test_one_number_of_threads_is_told_once(path: Path, told: list[int]) -> None:
    with loaded(path, threads=2) as model, executor_over(model, capacity=128) as executor:
        sequence = executor.open()
        feed(executor, sequence, TOKENS[:20])
        feed(executor, sequence, TOKENS[20:24], 1)
    assert told == [2]


def test_a_library_that_cannot_be_told_computes_with_what_it_has(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address_of = backends._proc_address
    monkeypatch.setattr(
        backends, "_proc_address", lambda *a: None if a[2] == b"ggml_backend_set_n_threads" else address_of(*a)
    )
    with loaded(path, threads=1, threads_batch=2) as model, executor_over(model, capacity=128) as executor:
        assert np.isfinite(feed(executor, executor.open(), TOKENS[:20])).all()


def test_libllama_has_the_two_numbers_as_well(path: Path) -> None:
    with libllama_running(path, capacity=64, threads=1, threads_batch=3) as executor:
        address = int(ffi.cast("uintptr_t", executor._context._ptr))
        assert (llama_cpp.llama_n_threads(address), llama_cpp.llama_n_threads_batch(address)) == (1, 3)


def test_the_engine_passes_them_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ggml_engine.ggml.threads.count_cores", lambda: 4)
    with Engine.load(path, threads=1, threads_batch=3, ctx=64) as engine:
        assert engine.model.threads == ThreadCounts(1, 3)
    with Engine.load(path, leave_cores=1, ctx=64) as engine:
        assert engine.model.threads == ThreadCounts(3, 3)
    with Engine.load(path, engine="llama", leave_cores=2, threads_batch=1, ctx=64) as engine:
        assert engine.executor.options.thread_counts() == ThreadCounts(2, 1)


@pytest.mark.parametrize("wrong", NOT_COUNTS)
@pytest.mark.parametrize("name", ["threads", "threads_batch"])
def test_what_is_no_number_of_threads_is_refused_by_both_executors(path: Path, name: str, wrong: Any) -> None:
    with GGUFFile.open(path) as file, pytest.raises(OptionError, match=f"{name} must be 1 to 512"):
        load_model(file, **{name: wrong})
    with pytest.raises(OptionError, match=f"{name} must be 1 to 512"):
        LlamaOptions(**{name: wrong})


def test_what_is_no_number_of_cores_is_refused_by_both_executors(path: Path) -> None:
    for wrong in (-1, 513, 1.5, "x", True):
        with GGUFFile.open(path) as file, pytest.raises(OptionError, match="leave_cores must be 0 to 512"):
            load_model(file, leave_cores=wrong)  # type: ignore[arg-type]
        with pytest.raises(OptionError, match="leave_cores must be 0 to 512"):
            LlamaOptions(leave_cores=wrong)  # type: ignore[arg-type]


def test_deterministic_mode_has_one_number_of_threads(path: Path) -> None:
    with loaded(path, threads=1, threads_batch=2) as model:
        with (
            pytest.raises(OptionError, match="1 threads and threads_batch 2"),
            executor_over(model, deterministic=True),
        ):
            pass
        with executor_over(model, capacity=128):
            pass
    with loaded(path, threads=2, threads_batch=2) as model, executor_over(model, deterministic=True, capacity=128):
        pass
