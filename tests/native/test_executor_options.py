"""Options that cannot be are refused by name before anything is allocated."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from typing import Any

import pytest
from engines import executor_over, feed, loaded
from tiny_models import write_gemma3

from ggml_engine.errors import DeviceError, OptionError
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.executor.options import ExecutorOptions
from ggml_engine.ggml import backends
from ggml_engine.ggml.backends import Buffer
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.models.model import Model, load_model
from ggml_engine.pool.cell_cache import GgmlCellCache
from ggml_engine.pool.kv_pool import GgmlKvPool
from ggml_engine.pool.kv_types import KvFormat


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with loaded(write_gemma3(tmp_path_factory.mktemp("tiny") / "gemma3.gguf"), threads=1) as model:
        yield model


@pytest.fixture
def allocations(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The bytes of every native buffer that is asked for."""
    asked: list[int] = []
    allocate = Buffer.allocate.__func__  # type: ignore[attr-defined]

    def counted(cls: type[Buffer], libraries: Any, buffer_type: Any, n_bytes: int) -> Buffer:
        asked.append(n_bytes)
        return allocate(cls, libraries, buffer_type, n_bytes)  # type: ignore[no-any-return]

    monkeypatch.setattr(Buffer, "allocate", classmethod(counted))
    return asked


@pytest.mark.parametrize("name", ["capacity", "max_batch_tokens", "max_graphs", "max_graph_bytes", "run", "read_block"])
@pytest.mark.parametrize("value", [0, -1, True, 1.5, "8", None])
def test_a_number_that_is_not_a_positive_integer_is_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name):
        ExecutorOptions(**{name: value})


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"attention": "fast"}, "'fast'"),
        ({"attention": ["flash"]}, "flash"),
        ({"v_layout": "diagonal"}, "'diagonal'"),
        ({"attention": "flash", "v_layout": "columns"}, r"'flash'.*'columns'"),
        ({"attention": "flash_folded", "v_layout": "columns"}, r"'flash_folded'.*'columns'"),
        ({"deterministic": True, "attention": "matmul_folded"}, "deterministic"),
        ({"deterministic": True, "run": 32}, "multiples of 64, they are 32 and 256"),
        ({"deterministic": True, "read_block": 16}, "multiples of 64, they are 64 and 16"),
    ],
)
def test_forms_and_layouts_that_do_not_go_together_are_refused(options: Any, match: str) -> None:
    with pytest.raises(OptionError, match=match):
        ExecutorOptions(**options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"k_type": "q9"}, "'q9'"),
        ({"v_type": "f64"}, "f32, f16"),
        ({"v_type": "q8_0", "v_layout": "columns"}, "q8_0"),
        ({"v_type": "q8_0", "attention": "matmul"}, "q8_0.*flash"),
        ({"v_type": "q8_0", "attention": "matmul_folded"}, "q8_0.*flash"),
        ({"deterministic": True, "attention": "flash"}, "deterministic"),
        ({"k_type": 5}, "5"),
        ({"run": 3, "read_block": 8}, "3 and 8"),
        ({"capacity": 2**31}, "MiB"),
        ({"capacity": 2**50}, "MiB"),
        ({"capacity": 2**30}, "MiB"),
    ],
)
def test_what_the_pool_cannot_be_is_refused_before_memory_is_taken(
    model: Model, allocations: list[int], options: Any, match: str
) -> None:  # R50
    tracemalloc.start()
    try:
        with pytest.raises(OptionError, match=match):
            GgmlExecutor(model, ExecutorOptions(**options))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert allocations == []


def test_a_pool_of_another_type_or_layout_is_refused(model: Model, allocations: list[int]) -> None:
    arguments = (model.libraries, model.hp.kv_layers(), model.layer_backends)
    with pytest.raises(OptionError, match="i32"):
        KvFormat(k_type=TensorType.I32)
    with pytest.raises(OptionError, match="'diagonal'"):
        KvFormat(v_layout="diagonal")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="at least one cell"):
        GgmlKvPool(*arguments, 0)
    with pytest.raises(OptionError, match="at least 1"):
        GgmlCellCache(*arguments, 0)
    assert allocations == []


@pytest.mark.usefixtures("every_default")
def test_storage_starts_with_one_row_whatever_the_capacity(model: Model, allocations: list[int]) -> None:
    with executor_over(model, capacity=100_000) as executor:
        assert sum(allocations) < 7 * 4096
        assert executor.cache.pool.rows == 1
        assert executor.cache.capacity == 100_032  # whole runs of 64
        feed(executor, executor.open(), [5])
        assert executor.cache.pool.rows == 256


@pytest.mark.parametrize(
    ("asked", "kind", "resolved"),
    [
        ({}, "cpu", ("matmul", "columns")),
        ({}, "gpu", ("flash", "rows")),
        ({"v_layout": "rows"}, "cpu", ("flash", "rows")),
        ({"v_layout": "columns"}, "gpu", ("matmul", "columns")),
        ({"attention": "flash"}, "cpu", ("flash", "rows")),
        ({"attention": "matmul"}, "gpu", ("matmul", "columns")),
        ({"attention": "matmul", "v_layout": "rows"}, "cpu", ("matmul", "rows")),
        ({"attention": "matmul_folded"}, "cpu", ("matmul_folded", "columns")),
        ({"attention": "flash_folded"}, "cpu", ("flash_folded", "rows")),
    ],
)
def test_auto_is_what_is_fast_on_the_device(asked: Any, kind: str, resolved: tuple[str, str]) -> None:
    form, kv_format = ExecutorOptions(**asked).resolve(kind)
    assert (form.value, kv_format.v_layout) == resolved


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"device": "warp9"}, DeviceError, r"'warp9'.*CPU"),
        ({"device": "metal"}, DeviceError, r"'metal'.*CPU"),
        ({"gpu_layers": -1}, OptionError, "-1"),
        ({"gpu_layers": True}, OptionError, "True"),
        ({"gpu_layers": 1.0}, OptionError, r"1\.0"),
        ({"threads": 0}, OptionError, "0"),
        ({"threads": 513}, OptionError, "513"),
        ({"threads": True}, OptionError, "True"),
        ({"threads": "2"}, OptionError, "2"),
    ],
)
def test_devices_and_threads_that_are_not_there_are_refused_before_weights_take_memory(
    model: Model, allocations: list[int], options: Any, error: type[Exception], match: str
) -> None:
    with GGUFFile.open(model.file.path) as file, pytest.raises(error, match=match):
        load_model(file, **options)
    assert allocations == []


@pytest.mark.parametrize("device", ["auto", "cpu", "CPU"])
def test_the_cpu_has_three_names_here(model: Model, device: str) -> None:
    with GGUFFile.open(model.file.path) as file:
        again = load_model(file, device=device, threads=1, gpu_layers=99)
        assert [backend.device.kind for backend in again.backends] == ["cpu"]
        assert again.layer_backends == again.backends * 7
        again.free()
        again.free()
    assert backends.choose_device(model.libraries, device).kind == "cpu"
