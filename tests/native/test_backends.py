"""Devices are found by name, and native memory is given back with its last owner."""

from __future__ import annotations

import dataclasses
import resource
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from graphs import Bench

from ggml_engine.errors import DeviceError, GraphError
from ggml_engine.ggml import backends, library
from ggml_engine.ggml.backends import Backend, Buffer, Device, Graph
from ggml_engine.ggml.tensor_types import TensorType


def named(name: str, kind: str) -> Device:
    return Device(None, name, name, kind, 0, 0, False)


CPU = named("CPU", "cpu")
MACHINES = {
    "plain": [CPU],
    "mac": [named("MTL0", "gpu"), named("BLAS", "accel"), CPU],
    "two cards": [named("CUDA0", "gpu"), named("CUDA1", "gpu"), CPU],
    "laptop": [named("Vulkan0", "igpu"), CPU],
}


@pytest.mark.parametrize(
    ("machine", "wanted", "expected"),
    [
        ("plain", "auto", "CPU"),
        ("plain", "cpu", "CPU"),
        ("plain", "CPU", "CPU"),
        ("mac", "auto", "MTL0"),
        ("mac", "metal", "MTL0"),
        ("mac", "blas", "BLAS"),
        ("mac", "cpu", "CPU"),
        ("two cards", "auto", "CUDA0"),
        ("two cards", "cuda", "CUDA0"),
        ("two cards", "cuda1", "CUDA1"),
        ("laptop", "auto", "Vulkan0"),
        ("laptop", "vulkan", "Vulkan0"),
    ],
)
def test_a_device_is_chosen_by_name(monkeypatch: pytest.MonkeyPatch, machine: str, wanted: str, expected: str) -> None:
    monkeypatch.setattr(backends, "devices", lambda _: MACHINES[machine])
    assert backends.choose_device(library.load(), wanted).name == expected


@pytest.mark.parametrize("wanted", ["", "metal", "cuda0", "nonsense"])
def test_an_unknown_device_is_refused_with_those_that_are_there(monkeypatch: pytest.MonkeyPatch, wanted: str) -> None:
    monkeypatch.setattr(backends, "devices", lambda _: MACHINES["laptop"])
    with pytest.raises(DeviceError, match="there are: Vulkan0, CPU"):
        backends.choose_device(library.load(), wanted)


def test_libraries_without_a_cpu_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "devices", lambda _: [])
    with pytest.raises(DeviceError, match="no CPU"):
        backends.cpu_device(library.load())


def test_the_real_cpu_has_a_name_and_memory() -> None:
    device = backends.cpu_device(library.load())
    assert (device.name, device.kind, device.maps_host_memory) == ("CPU", "cpu", True)
    assert device.description
    assert 0 < device.memory_free <= device.memory_total


def test_a_device_that_cannot_map_host_memory_says_so() -> None:
    device = dataclasses.replace(backends.cpu_device(library.load()), maps_host_memory=False)
    with pytest.raises(GraphError, match="CPU cannot map host memory"):
        Buffer.map_host(library.load(), device, memoryview(bytearray(64)), None)


def test_a_device_that_does_not_start_is_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = library.load()

    class Base:
        def __getattr__(self, name: str) -> Any:
            return getattr(libraries.base, name)

        def ggml_backend_dev_init(self, *_: object) -> Any:
            return library.ffi.NULL

    with pytest.raises(DeviceError, match="CPU could not be started"):
        Backend(dataclasses.replace(libraries, base=Base()), backends.cpu_device(libraries))


def test_a_number_of_threads_reaches_ggml() -> None:
    libraries = library.load()
    asked: list[int] = []

    @library.ffi.callback("ggml_backend_set_n_threads_t")  # type: ignore[untyped-decorator]
    def note(_backend: Any, n_threads: int) -> None:
        asked.append(n_threads)

    class Base:
        def __getattr__(self, name: str) -> Any:
            return getattr(libraries.base, name)

        def ggml_backend_reg_get_proc_address(self, _registry: Any, name: bytes) -> Any:
            return note if name == b"ggml_backend_set_n_threads" else library.ffi.NULL

    backend = Backend(dataclasses.replace(libraries, base=Base()), backends.cpu_device(libraries), 3)
    backend.set_threads(512)
    backend.free()
    assert asked == [3, 512]


def test_a_device_without_special_buffer_types_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_proc_address", lambda *_: None)
    assert backends.extra_buffer_types(library.load(), backends.cpu_device(library.load())) == []


def test_freeing_twice_is_harmless() -> None:
    libraries = library.load()
    backend = Backend(libraries, backends.cpu_device(libraries), 1)
    buffer = Buffer.allocate(libraries, backend.buffer_type, 1024)
    for owner in (buffer, backend):
        owner.free()
        owner.free()
    for use in (lambda: buffer.ptr, lambda: backend.ptr):
        with pytest.raises(GraphError, match="freed before"):
            use()


MIB = 1 << 20


def drop_a_buffer() -> None:
    libraries = library.load()
    backend = Backend(libraries, backends.cpu_device(libraries), 1)
    Buffer.allocate(libraries, backend.buffer_type, 16 * MIB).clear()


def drop_a_graph() -> None:
    bench = Bench()
    a = bench.builder.input("a", TensorType.F32, 4 * MIB)
    bench.builder.output(bench.builder.tanh(a), "y")
    graph = Graph(bench.builder, [Backend(bench.libraries, backends.cpu_device(bench.libraries), 1)], "dropped")
    assert graph.working_bytes >= 16 * MIB
    backends.set_data(bench.libraries, a, np.ones(4 * MIB, np.float32))
    graph.compute()


def drop_a_failed_graph() -> None:
    bench = Bench()
    a = bench.builder.input("a", TensorType.F32, 4 * MIB)
    bench.builder.output(bench.builder.tanh(a), "y")
    with pytest.raises(GraphError):
        Graph(bench.builder, [], "dropped")
    bench.builder.free()


@pytest.mark.parametrize("drop", [drop_a_buffer, drop_a_graph, drop_a_failed_graph])
def test_what_is_dropped_is_given_back(drop: Callable[[], None]) -> None:
    drop()
    unit = 1 if sys.platform == "darwin" else 1024
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    for _ in range(24):
        drop()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit - before
    assert grown < 64 * MIB, "24 times 16 MiB were not"


def test_host_memory_of_a_tensor_is_read_and_written_in_place() -> None:
    libraries = library.load()
    builder = backends.GraphBuilder(libraries, 8)
    x = builder.input("x", TensorType.F32, 3, 2)
    turned = builder.permute(x, 1, 0, 2, 3)
    y = builder.output(builder.scale(x, 2.0), "y")
    assert backends.host_view(libraries, y) is None  # no memory yet
    backend = Backend(libraries, backends.cpu_device(libraries), 1)
    graph = Graph(builder, [backend], "doubling")
    given, found = backends.host_view(libraries, x), backends.host_view(libraries, y)
    assert given is not None
    assert found is not None
    given[:] = np.arange(6, dtype=np.float32).data.cast("B")
    graph.compute()
    assert np.frombuffer(found, np.float32).tolist() == [0, 2, 4, 6, 8, 10]
    assert backends.get_array(libraries, y).tolist() == [[0, 2, 4], [6, 8, 10]]
    assert backends.host_view(libraries, turned) is None  # not contiguous
    graph.free()
    backend.free()
