"""Devices, their buffers, and the running of graphs on them.

Owns every native handle that holds memory or computes: backends, buffers, schedulers. Each is freed once, by `free()`
or with its last Python owner. A native null or bad status becomes a typed error here and nowhere else.
Data crosses only through `set_data` and `get_data`, which check bounds: ggml aborts on what they refuse.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import AbortedError, AllocationError, ComputeError, DeviceError, GraphError
from ggml_engine.ggml.abort import AbortFlag
from ggml_engine.ggml.library import Libraries, ffi, running_graph
from ggml_engine.ggml.ops import GraphBuilder, Tensor, TensorContext, wrap
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.ggml.threads import check_threads, default_threads

_KINDS = {0: "cpu", 1: "gpu", 2: "igpu", 3: "accel", 4: "meta"}
_MAX_BACKENDS = 16  # GGML_SCHED_MAX_BACKENDS
_ID_TYPES: dict[TensorType, type[np.integer[Any]]] = {TensorType.I32: np.int32, TensorType.I64: np.int64}
_HOST_PTR_ALIGNMENT = 32  # TENSOR_ALIGNMENT of ggml's CPU buffers from pointers


@dataclass(frozen=True, slots=True)
class Device:
    """A device of ggml. `kind` is cpu, gpu, igpu, accel or meta; memory in bytes."""

    ptr: Any
    name: str
    description: str
    kind: str
    memory_free: int
    memory_total: int
    maps_host_memory: bool


def _text(ptr: Any) -> str:
    return "" if ptr == ffi.NULL else str(ffi.string(ptr).decode("utf-8", "replace"))


def devices(libraries: Libraries) -> list[Device]:
    """All devices that the libraries know, in ggml's order."""
    found = []
    for index in range(libraries.registry.ggml_backend_dev_count()):
        ptr = libraries.registry.ggml_backend_dev_get(index)
        props = ffi.new("struct ggml_backend_dev_props *")
        libraries.base.ggml_backend_dev_get_props(ptr, props)
        found.append(
            Device(
                ptr,
                _text(props.name),
                _text(props.description),
                _KINDS.get(int(props.type), "unknown"),
                int(props.memory_free),
                int(props.memory_total),
                bool(props.caps.buffer_from_host_ptr),
            )
        )
    return found


def cpu_device(libraries: Libraries) -> Device:
    """The CPU, which every build has."""
    for device in devices(libraries):
        if device.kind == "cpu":
            return device
    raise DeviceError("the ggml libraries have no CPU device")


def choose_device(libraries: Libraries, wanted: str) -> Device:
    """The device named `wanted`: "auto" (the first GPU, else the CPU), "cpu", "metal", or a name of ggml's."""
    known = devices(libraries)
    if wanted == "auto":
        return next((device for device in known if device.kind in {"gpu", "igpu"}), cpu_device(libraries))
    for device in known:
        name = device.name.lower()
        if wanted.lower() in {name, name.rstrip("0123456789")} or (wanted == "metal" and name.startswith("mtl")):
            return device
    raise DeviceError(f"there is no device {wanted!r}; there are: {', '.join(device.name for device in known)}")


class Backend:
    """A device that is ready to compute."""

    def __init__(self, libraries: Libraries, device: Device, n_threads: int | None = None) -> None:
        self.libraries = libraries
        self.device = device
        self._abort: AbortFlag | None = None  # what the native side has a pointer to
        self._n_threads = 0  # none was set
        self._ptr = libraries.base.ggml_backend_dev_init(device.ptr, ffi.NULL)
        if self._ptr == ffi.NULL:
            raise DeviceError(f"device {device.name} could not be started")
        if device.kind == "cpu":
            self.set_threads(default_threads() if n_threads is None else n_threads)

    @property
    def ptr(self) -> Any:
        """The open backend's pointer."""
        if self._ptr is None:
            raise GraphError(f"the backend of {self.device.name} was freed before")
        return self._ptr

    def set_threads(self, n_threads: int) -> None:
        """Threads of the next graphs, 1 to 512. Does nothing where the device has no threads."""
        check_threads("threads", n_threads)
        if n_threads == self._n_threads:
            return
        self._n_threads = n_threads
        address = _proc_address(self.libraries, self.device, b"ggml_backend_set_n_threads")
        if address is not None:
            ffi.cast("ggml_backend_set_n_threads_t", address)(self.ptr, n_threads)

    def set_abort_flag(self, flag: AbortFlag | None) -> None:
        """Let `flag` stop the next graphs, or nothing (None). Does nothing where the device has no such thing."""
        if flag is self._abort:
            return
        address = _proc_address(self.libraries, self.device, b"ggml_backend_set_abort_callback")
        if address is not None:
            callback, data = (ffi.NULL, ffi.NULL) if flag is None else (flag.callback, flag.data)
            ffi.cast("ggml_backend_set_abort_callback_t", address)(self.ptr, callback, data)
        self._abort = flag

    @property
    def buffer_type(self) -> Any:
        """Where this backend's data lies by default."""
        return self.libraries.base.ggml_backend_get_default_buffer_type(self.ptr)

    def free(self) -> None:
        """Free the backend; idempotent."""
        ptr, self._ptr = self._ptr, None
        if ptr is not None:
            self.libraries.base.ggml_backend_free(ptr)

    def __del__(self) -> None:
        if getattr(self, "_ptr", None):
            self.free()


def _proc_address(libraries: Libraries, device: Device, name: bytes) -> Any:
    registry = libraries.base.ggml_backend_dev_backend_reg(device.ptr)
    address = libraries.base.ggml_backend_reg_get_proc_address(registry, name)
    return None if address == ffi.NULL else address


def extra_buffer_types(libraries: Libraries, device: Device) -> list[Any]:
    """Buffer types that hold weights rearranged for faster products (CPU_REPACK, AMX, KleidiAI), best first."""
    address = _proc_address(libraries, device, b"ggml_backend_dev_get_extra_bufts")
    if address is None:
        return []
    listed = ffi.cast("ggml_backend_dev_get_extra_bufts_t", address)(device.ptr)
    found: list[Any] = []
    while listed != ffi.NULL and listed[len(found)] != ffi.NULL:
        found.append(listed[len(found)])
    return found


def buffer_type_name(libraries: Libraries, buffer_type: Any) -> str:
    """ggml's name of a buffer type."""
    return _text(libraries.base.ggml_backend_buft_name(buffer_type))


class Buffer:
    """Memory of a device. `owner` keeps alive what lies under a mapped one."""

    def __init__(self, libraries: Libraries, ptr: Any, n_bytes: int, owner: object = None) -> None:
        self.libraries = libraries
        self.n_bytes = n_bytes
        self._ptr: Any = ptr
        self._owner = owner

    @classmethod
    def allocate(cls, libraries: Libraries, buffer_type: Any, n_bytes: int) -> Buffer:
        """Fresh memory. Raises AllocationError with the number of bytes asked for."""
        if not 0 <= n_bytes < 2**63:
            raise AllocationError(f"{n_bytes} bytes cannot be addressed")
        ptr = libraries.base.ggml_backend_buft_alloc_buffer(buffer_type, n_bytes)
        if ptr == ffi.NULL:
            where = buffer_type_name(libraries, buffer_type)
            raise AllocationError(f"{n_bytes / 2**20:.1f} MiB of {where} memory could not be had")
        return cls(libraries, ptr, n_bytes)

    @classmethod
    def map_host(cls, libraries: Libraries, device: Device, memory: memoryview, owner: object) -> Buffer:
        """The device's view of host memory, nothing copied; `owner` is kept until the buffer is freed."""
        if not device.maps_host_memory:
            raise GraphError(f"device {device.name} cannot map host memory")
        address = ffi.from_buffer(memory)
        if not memory.nbytes or not is_host_aligned(int(ffi.cast("uintptr_t", address))):
            raise GraphError(f"{memory.nbytes} bytes, at a multiple of {_HOST_PTR_ALIGNMENT}, are needed to be mapped")
        ptr = libraries.base.ggml_backend_dev_buffer_from_host_ptr(device.ptr, address, memory.nbytes, memory.nbytes)
        if ptr == ffi.NULL:
            raise AllocationError(f"{memory.nbytes} bytes could not be mapped for {device.name}")
        return cls(libraries, ptr, memory.nbytes, (owner, address))

    @property
    def ptr(self) -> Any:
        """The open buffer's pointer."""
        if self._ptr is None:
            raise GraphError("the buffer was freed before")
        return self._ptr

    @property
    def is_mapped(self) -> bool:
        """Whether it is a view of memory that somebody else owns."""
        return self._owner is not None

    @property
    def is_host(self) -> bool:
        """Whether Python can read it in place."""
        return bool(self.libraries.base.ggml_backend_buffer_is_host(self.ptr))

    def clear(self) -> None:
        """Fill with zeros."""
        self.libraries.base.ggml_backend_buffer_clear(self.ptr, 0)

    def mark_as_weights(self) -> None:
        """Tell schedulers that operations should run where this buffer lies."""
        usage = self.libraries.base.GGML_BACKEND_BUFFER_USAGE_WEIGHTS
        self.libraries.base.ggml_backend_buffer_set_usage(self.ptr, usage)

    def place(self, tensor: Tensor, offset: int) -> None:
        """Let a tensor without data live at `offset` bytes."""
        n_needed = int(self.libraries.base.ggml_backend_buft_get_alloc_size(self._type, tensor.ptr))
        if offset < 0 or offset + n_needed > self.n_bytes:
            raise GraphError(f"{tensor!r} needs bytes {offset} to {offset + n_needed} of a buffer of {self.n_bytes}")
        if tensor.ptr.data != ffi.NULL:
            raise GraphError(f"{tensor!r} has data already")
        base = ffi.cast("char *", self.libraries.base.ggml_backend_buffer_get_base(self.ptr))
        status = self.libraries.base.ggml_backend_tensor_alloc(self.ptr, tensor.ptr, base + offset)
        if status != self.libraries.base.GGML_STATUS_SUCCESS:
            raise AllocationError(f"{tensor!r} could not be placed (status {status})")

    @property
    def _type(self) -> Any:
        return self.libraries.base.ggml_backend_buffer_get_type(self.ptr)

    def free(self) -> None:
        """Free the memory; idempotent. Tensors in it must not be used afterwards."""
        ptr, self._ptr = self._ptr, None
        if ptr is not None:
            self.libraries.base.ggml_backend_buffer_free(ptr)
        self._owner = None

    def __del__(self) -> None:
        if getattr(self, "_ptr", None):
            self.free()


def allocation_bytes(libraries: Libraries, buffer_type: Any, tensor: Tensor) -> int:
    """Bytes that a tensor takes in a buffer of this type, padded to its alignment."""
    alignment = int(libraries.base.ggml_backend_buft_get_alignment(buffer_type))
    n_bytes = int(libraries.base.ggml_backend_buft_get_alloc_size(buffer_type, tensor.ptr))
    return math.ceil(n_bytes / alignment) * alignment


def allocate_tensors(libraries: Libraries, buffer_type: Any, tensors: Sequence[Tensor]) -> Buffer:
    """One buffer that holds all `tensors` (each without data yet)."""
    sizes = [allocation_bytes(libraries, buffer_type, tensor) for tensor in tensors]
    buffer = Buffer.allocate(libraries, buffer_type, sum(sizes))
    offset = 0
    for tensor, size in zip(tensors, sizes, strict=True):
        buffer.place(tensor, offset)
        offset += size
    return buffer


def is_host_aligned(address: int) -> bool:
    """Whether a mapped tensor may lie at this address."""
    return address % _HOST_PTR_ALIGNMENT == 0


def supports_op(libraries: Libraries, device: Device, tensor: Tensor) -> bool:
    """Whether the device can compute the operation whose result is `tensor`."""
    return bool(libraries.base.ggml_backend_dev_supports_op(device.ptr, tensor.ptr))


def has_data(tensor: Tensor) -> bool:
    """Whether the tensor, or the one it is a view of, lies in a buffer."""
    return _lies_in_buffer(tensor.ptr)


def _lies_in_buffer(ptr: Any) -> bool:
    source = ptr if ptr.view_src == ffi.NULL else ptr.view_src
    return bool(source.buffer != ffi.NULL) and bool(ptr.data != ffi.NULL)


def _check_range(tensor: Tensor, offset: int, n_bytes: int) -> None:
    if not has_data(tensor):
        raise GraphError(f"{tensor!r} has no data yet")
    if offset < 0 or offset + n_bytes > tensor.span_bytes:
        raise GraphError(f"bytes {offset} to {offset + n_bytes} of {tensor!r}, which has {tensor.span_bytes}")


def _check_layout(data: npt.NDArray[Any] | memoryview) -> None:
    if not (data.flags.c_contiguous if isinstance(data, np.ndarray) else data.c_contiguous):
        raise GraphError(f"a C-contiguous array is needed, given one of shape {data.shape}, strides {data.strides}")


def set_data(libraries: Libraries, tensor: Tensor, data: npt.NDArray[Any] | memoryview, offset: int = 0) -> None:
    """Copy C-contiguous bytes into a tensor, from `offset` bytes on."""
    n_bytes = data.nbytes
    _check_range(tensor, offset, n_bytes)
    _check_layout(data)
    if n_bytes:
        libraries.base.ggml_backend_tensor_set(tensor.ptr, ffi.from_buffer(data), offset, n_bytes)


def host_view(libraries: Libraries, tensor: Tensor) -> memoryview | None:
    """A contiguous tensor's own bytes, writable, where Python can reach them; None where they lie on a device.

    Reading and writing through it keeps Python's lock, which a native call gives away and then has to wait for. It is
    valid as long as the tensor's memory, which it does not keep.
    """
    if not has_data(tensor) or not tensor.is_contiguous:
        return None
    source = tensor.ptr if tensor.ptr.view_src == ffi.NULL else tensor.ptr.view_src
    if not libraries.base.ggml_backend_buffer_is_host(source.buffer):
        return None
    return memoryview(ffi.buffer(tensor.ptr.data, tensor.span_bytes))


def set_row_ids(libraries: Libraries, tensor: Tensor, ids: npt.NDArray[np.integer[Any]], n_rows: int) -> None:
    """Fill the ids (i32 or i64) of a `get_rows` or `set_rows` over `n_rows` rows; ggml dies of one out of range."""
    if tensor.type not in _ID_TYPES:
        raise GraphError(f"{tensor!r} holds no ids")
    if ids.dtype.kind not in "iu" or ids.size != tensor.n_elements:
        raise GraphError(f"{tensor!r} takes as many integers, given {ids.size} of {ids.dtype}")
    if ids.size and not (ids.min() >= 0 and ids.max() < n_rows):
        raise GraphError(f"{tensor!r}: rows {ids.min()} to {ids.max()} are asked for, there are 0 to {n_rows - 1}")
    set_data(libraries, tensor, np.ascontiguousarray(ids, _ID_TYPES[tensor.type]))


def get_data(libraries: Libraries, tensor: Tensor, out: npt.NDArray[Any], offset: int = 0) -> None:
    """Copy bytes of a tensor, from `offset` bytes on, into a writable C-contiguous array."""
    _check_range(tensor, offset, out.nbytes)
    _check_layout(out)
    if out.nbytes:
        view = ffi.from_buffer(out, require_writable=True)
        libraries.base.ggml_backend_tensor_get(tensor.ptr, view, offset, out.nbytes)


def get_array(libraries: Libraries, tensor: Tensor) -> npt.NDArray[np.float32]:
    """All of a contiguous f32 tensor; numpy's shape is ggml's reversed, without leading ones."""
    shape = tuple(reversed(tensor.ne))
    out = np.empty(shape, np.float32)
    get_data(libraries, tensor, out)
    return out.reshape(shape[next((i for i, n in enumerate(shape[:-1]) if n != 1), 3) :])


def _check_graph(builder: GraphBuilder, backends: Sequence[Backend], name: str) -> None:
    if not builder.ctx or builder.has_graph:
        raise GraphError(f"{name}: the builder's graph is in use already")
    if not 1 <= len(backends) <= _MAX_BACKENDS or backends[-1].device.kind != "cpu":
        kinds = [backend.device.kind for backend in backends]
        raise GraphError(f"{name}: 1 to {_MAX_BACKENDS} backends, the CPU's last, are needed, given {kinds}")
    for ptr in builder.outside:
        if not _lies_in_buffer(ptr):
            raise GraphError(f"{name}: {wrap(ptr)!r} of another context has no data yet")


class Graph:
    """A built graph with its working memory: allocated once, run many times.

    `backends` are in order of preference; the last must be the CPU. Has its own scheduler, so that graphs of several
    shapes stay ready side by side. `abort` is the flag that stops it, and it alone, and `n_threads` (None: as many as
    ran last) compute it on the CPU: backends are shared, and each graph brings its own.
    """

    def __init__(
        self,
        builder: GraphBuilder,
        backends: Sequence[Backend],
        name: str,
        abort: AbortFlag | None = None,
        n_threads: int | None = None,
    ) -> None:
        self._sched = None
        self._abort = abort
        self._n_threads = n_threads
        libraries = builder.libraries
        self.libraries = libraries
        self.name = name
        _check_graph(builder, backends, name)
        builder.seal()
        self._builder = builder
        self._backends = tuple(backends)
        self.n_nodes = int(libraries.base.ggml_graph_n_nodes(builder.cgraph))
        array = ffi.new("ggml_backend_t[]", [backend.ptr for backend in backends])
        size = builder.graph_size * (1 if len(backends) == 1 else 2)  # splits between backends add copies of inputs
        self._sched = libraries.base.ggml_backend_sched_new(array, ffi.NULL, len(backends), size, False, False)
        if self._sched == ffi.NULL:
            raise AllocationError(f"no scheduler could be had for {name}")
        with running_graph(name):
            if not libraries.base.ggml_backend_sched_alloc_graph(self._sched, builder.cgraph):
                self.free()
                raise AllocationError(f"the working memory of {name} ({self.n_nodes} nodes) could not be had")

    @property
    def working_bytes(self) -> int:
        """Bytes of working memory over all backends."""
        if self._sched is None:
            return 0
        get = self.libraries.base.ggml_backend_sched_get_buffer_size
        return sum(int(get(self._sched, backend.ptr)) for backend in self._backends)

    def compute(self) -> None:
        """Run it. The GIL is free meanwhile. Raises AbortedError where its flag is up, else ComputeError."""
        if self._sched is None:
            raise GraphError(f"{self.name} was freed before")
        if not self._builder.ctx:
            raise GraphError(f"{self.name}: its nodes were freed before")
        for backend in self._backends:
            if not backend.ptr:
                raise GraphError(f"{self.name}: its backends were freed before")
            backend.set_abort_flag(self._abort)
        if self._n_threads is not None:
            self._backends[-1].set_threads(self._n_threads)
        with running_graph(self.name):
            status = self.libraries.base.ggml_backend_sched_graph_compute(self._sched, self._builder.cgraph)
        if status == self.libraries.base.GGML_STATUS_ABORTED:
            raise AbortedError(f"{self.name} was told to stop")
        if status != self.libraries.base.GGML_STATUS_SUCCESS:
            text = _text(self.libraries.base.ggml_status_to_string(status))
            raise ComputeError(f"{self.name}: {text}")

    def free(self) -> None:
        """Free working memory and nodes; idempotent."""
        sched, self._sched = self._sched, None
        if sched is not None:
            self.libraries.base.ggml_backend_sched_free(sched)
            self._builder.free()

    def __del__(self) -> None:
        if getattr(self, "_sched", None):
            self.free()


__all__ = [
    "Backend", "Buffer", "Device", "Graph", "TensorContext", "allocate_tensors", "allocation_bytes",
    "buffer_type_name", "choose_device", "cpu_device", "devices", "extra_buffer_types", "get_array", "get_data",
    "has_data", "host_view", "is_host_aligned", "set_data", "set_row_ids", "supports_op",
]  # fmt: skip
