"""A model's tensors: what an architecture asks for, checked against the file, placed where they compute fastest.

Owns the buffers of the weights. A tensor is mapped from the file where the device takes host memory, held in a
rearranged form (CPU_REPACK) where ggml has one for its type and use, copied otherwise. Knows no graph: an architecture
says what it needs as `TensorSpec`s and gets `Weights` back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ggml_engine.errors import CancelledError, GraphError, WeightError
from ggml_engine.ggml.backends import (
    Buffer,
    Device,
    allocate_tensors,
    buffer_type_name,
    cpu_device,
    extra_buffer_types,
    set_data,
    supports_op,
)
from ggml_engine.ggml.gguf import GGUFFile, TensorInfo
from ggml_engine.ggml.library import Libraries, ffi
from ggml_engine.ggml.ops import MATMUL_TYPES, GraphBuilder, Rope, Tensor, TensorContext
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.models.sizes import layer_of

log = logging.getLogger("ggml_engine.weights")

Progress = Callable[[int, int], None]
Cancel = Callable[[], bool]

_PROBE_TOKENS = 512  # tokens of the operation that a buffer type is asked about, as libllama does


class Role(Enum):
    """What a tensor is used for; decides its types and where it may lie."""

    ROWS = "rows are looked up"
    MATMUL = "multiplied with activations"
    MUL = "multiplied elementwise"
    ADD = "added"
    ROPE_FACTORS = "divides rotation frequencies"
    EXPERTS = "multiplied with activations, expert by expert"
    EXPERT_BIASES = "added, expert by expert"
    SINKS = "scores that only the softmax sees"


_FLOAT32 = frozenset({TensorType.F32})
_ROLE_TYPES = {
    Role.ROWS: MATMUL_TYPES,
    Role.MATMUL: MATMUL_TYPES,
    Role.MUL: _FLOAT32,
    Role.ADD: _FLOAT32,
    Role.ROPE_FACTORS: _FLOAT32,
    Role.EXPERTS: MATMUL_TYPES,
    Role.EXPERT_BIASES: _FLOAT32,
    Role.SINKS: _FLOAT32,
}


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor that an architecture asks for. `shape` is in ggml's order.

    `layer` is its layer, None before the first and `n_layer` after the last. `tied_to` names a tensor that stands in
    when the file has none of this name.
    """

    name: str
    shape: tuple[int, ...]
    role: Role
    layer: int | None = None
    required: bool = True
    tied_to: str | None = None


class Weights(Mapping[str, Tensor]):
    """Tensors by name. Optional ones that the file lacks are absent."""

    def __init__(self, tensors: Mapping[str, Tensor], buffers: Sequence[Buffer], contexts: Sequence[TensorContext]):
        self._tensors = dict(tensors)
        self._buffers = list(buffers)
        self._contexts = list(contexts)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Any:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @property
    def n_bytes_copied(self) -> int:
        """Bytes of buffers that are not the file's own mapping."""
        return sum(buffer.n_bytes for buffer in self._buffers if not buffer.is_mapped)

    def free(self) -> None:
        """Free buffers and tensors; idempotent. Graphs over them must be gone."""
        self._tensors.clear()
        for context in self._contexts:
            context.free()
        for buffer in self._buffers:
            buffer.free()
        self._contexts.clear()
        self._buffers.clear()


@dataclass(frozen=True, slots=True)
class _Placement:
    spec: TensorSpec
    info: TensorInfo
    buffer_type: Any
    device: Device
    mapped: bool


def _find(file: GGUFFile, spec: TensorSpec) -> TensorInfo | None:
    """The file's tensor for `spec`, checked; None for an optional one that is not there."""
    info = file.tensors.get(spec.name)
    if info is None and spec.tied_to is not None:
        info = file.tensors.get(spec.tied_to)
    if info is None:
        if not spec.required:
            return None
        raise WeightError(spec.name, f"is missing; expected with shape {list(spec.shape)}")
    if _without_trailing_ones(info.shape) != _without_trailing_ones(spec.shape):
        raise WeightError(info.name, f"has shape {list(info.shape)}, expected {list(spec.shape)}")
    if info.type not in _ROLE_TYPES[spec.role]:
        allowed = "f32" if _ROLE_TYPES[spec.role] == _FLOAT32 else "floats and quantised types"
        reason = f"has type {info.type.name}, which is not allowed where a tensor is {spec.role.value} ({allowed})"
        raise WeightError(info.name, reason)
    return info


def _without_trailing_ones(shape: Sequence[int]) -> tuple[int, ...]:
    kept = list(shape)
    while len(kept) > 1 and kept[-1] == 1:
        kept.pop()
    return tuple(kept)


class Placer:
    """Chooses a buffer type per tensor, asking ggml once per kind of tensor and use."""

    def __init__(self, libraries: Libraries, device: Device, n_layer: int, gpu_layers: int, *, repack: bool) -> None:
        self.libraries = libraries
        self.device = device
        self.cpu = cpu_device(libraries)
        # libllama counts the output as one more layer and offloads from the end
        self.first_on_device = n_layer + 1 - gpu_layers if device.kind != "cpu" else n_layer + 1
        self.repack = repack
        self._known: dict[tuple[object, ...], tuple[Any, Device]] = {}

    def device_of(self, layer: int | None) -> Device:
        """Where a layer computes."""
        return self.device if layer is not None and layer >= self.first_on_device else self.cpu

    def choose(self, spec: TensorSpec, info: TensorInfo) -> tuple[Any, Device]:
        device = self.device_of(spec.layer)
        key = (device.name, spec.role, info.type, info.shape)
        if key not in self._known:
            self._known[key] = self._ask(device, spec, info)
        return self._known[key]

    def _candidates(self, device: Device) -> list[tuple[Any, Device]]:
        base = self.libraries.base
        found = [] if device.kind == "cpu" else [(base.ggml_backend_dev_buffer_type(device.ptr), device)]
        if self.repack:
            found += [(extra, self.cpu) for extra in extra_buffer_types(self.libraries, self.cpu)]
        return [*found, (base.ggml_backend_dev_buffer_type(self.cpu.ptr), self.cpu)]

    def _ask(self, device: Device, spec: TensorSpec, info: TensorInfo) -> tuple[Any, Device]:
        for buffer_type, owner in self._candidates(device):
            if self._works(buffer_type, owner, spec, info):
                return buffer_type, owner
        raise WeightError(info.name, f"no device can use type {info.type.name} where it is {spec.role.value}")

    def _works(self, buffer_type: Any, owner: Device, spec: TensorSpec, info: TensorInfo) -> bool:
        builder = GraphBuilder(self.libraries, 8)
        try:
            weight = builder.new_tensor(info.name, info.type, *info.shape)
            empty = Buffer.allocate(self.libraries, buffer_type, 0)
            weight.ptr.buffer = empty.ptr  # an operation is judged by where its weight lies
            try:
                return supports_op(self.libraries, owner, _probe(builder, weight, spec.role))
            finally:
                weight.ptr.buffer = ffi.NULL
                empty.free()
        except GraphError as error:
            raise WeightError(info.name, str(error)) from error
        finally:
            builder.free()


def _probe(builder: GraphBuilder, weight: Tensor, role: Role) -> Tensor:
    """The operation that a role stands for, with made-up activations."""
    if role is Role.ROWS:
        return builder.get_rows(weight, builder.new_tensor("ids", TensorType.I32, _PROBE_TOKENS))
    if role is Role.MATMUL:
        x = builder.new_tensor("x", TensorType.F32, weight.ne[0], _PROBE_TOKENS, *weight.ne[2:])
        return builder.mul_mat(weight, x)
    if role is Role.ROPE_FACTORS:
        n_dims = 2 * weight.ne[0]
        x = builder.new_tensor("x", TensorType.F32, n_dims, 1, _PROBE_TOKENS)
        positions = builder.new_tensor("positions", TensorType.I32, _PROBE_TOKENS)
        return builder.rope(x, positions, Rope(n_dims, 10000.0), weight)
    if role in {Role.EXPERTS, Role.EXPERT_BIASES}:
        ids = builder.new_tensor("ids", TensorType.I32, 1, _PROBE_TOKENS)
        n = weight.ne[0]
        x = builder.new_tensor("x", TensorType.F32, n, 1, _PROBE_TOKENS)
        return builder.mul_mat_id(weight, x, ids) if role is Role.EXPERTS else builder.add_id(x, weight, ids)
    if role is Role.SINKS:
        scores = builder.new_tensor("scores", TensorType.F32, _PROBE_TOKENS, 1, weight.ne[0])
        return builder.soft_max(scores, sinks=weight)
    x = builder.new_tensor("x", TensorType.F32, *weight.ne)
    return builder.mul(x, weight) if role is Role.MUL else builder.add(x, weight)


def load_weights(
    libraries: Libraries,
    file: GGUFFile,
    specs: Iterable[TensorSpec],
    *,
    device: Device,
    n_layer: int,
    gpu_layers: int = 0,
    repack: bool = True,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
) -> Weights:
    """Check and place every tensor of `specs`.

    Raises WeightError naming the tensor with what was expected and found, before anything is allocated; CancelledError
    when `cancel()` turns true; AllocationError when memory runs out. `progress(done, total)` counts bytes.
    """
    placer = Placer(libraries, device, n_layer, gpu_layers, repack=repack)
    found = [(spec, info) for spec in specs if (info := _find(file, spec)) is not None]
    used = {info.name for _, info in found}
    # what NVFP4 files have beside a weight for kernels over FP4 activations, which no backend here has
    used |= {f"{name.removesuffix('.weight')}.input_scale" for name in used if name.endswith(".weight")}
    for name in file.tensors:
        # layers beyond are those that predict further tokens, which no graph here has
        if name not in used and ((layer := layer_of(name)) is None or layer < n_layer):
            log.warning("%s: tensor %r is not used by this architecture", file.path, name)
    plan = []
    for spec, info in found:
        buffer_type, owner = placer.choose(spec, info)
        default = libraries.base.ggml_backend_dev_buffer_type(owner.ptr)
        mapped = buffer_type == default and owner.maps_host_memory and _can_map(file, info)
        plan.append(_Placement(spec, info, buffer_type, owner, mapped))
    return _Loader(libraries, file, plan, progress, cancel).load()


def _can_map(file: GGUFFile, info: TensorInfo) -> bool:
    return info.offset % file.alignment == 0 and file.alignment % 32 == 0


class _Loader:
    def __init__(
        self,
        libraries: Libraries,
        file: GGUFFile,
        plan: Sequence[_Placement],
        progress: Progress | None,
        cancel: Cancel | None,
    ) -> None:
        self.libraries = libraries
        self.file = file
        self.plan = plan
        self.progress = progress
        self.cancel = cancel
        self.tensors: dict[str, Tensor] = {}
        self.buffers: list[Buffer] = []
        self.context = TensorContext(libraries, len(plan) + 1)
        self.done = 0
        self.total = sum(placement.info.n_bytes for placement in plan)

    def load(self) -> Weights:
        try:
            self._map()
            self._copy()
        except BaseException:
            Weights(self.tensors, self.buffers, [self.context]).free()
            raise
        for buffer in self.buffers:
            buffer.mark_as_weights()
        return Weights(self.tensors, self.buffers, [self.context])

    def _new(self, placement: _Placement) -> Tensor:
        info = placement.info
        tensor = self.context.new_tensor(info.name, info.type, *info.shape)
        self.tensors[placement.spec.name] = tensor
        return tensor

    def _map(self) -> None:
        shared: dict[tuple[str, int], Buffer] = {}
        placed: dict[str, Tensor] = {}
        for placement in self.plan:
            if not placement.mapped:
                continue
            info = placement.info
            if info.name in placed:  # tied to a tensor that is mapped already
                self.tensors[placement.spec.name] = placed[info.name]
                self._advance(info.n_bytes)
                continue
            key = (placement.device.name, info.part)
            if key not in shared:
                memory = self.file.parts[info.part].buffer
                shared[key] = Buffer.map_host(self.libraries, placement.device, memory, self.file)
                self.buffers.append(shared[key])
            tensor = self._new(placement)
            shared[key].place(tensor, info.offset)
            placed[info.name] = tensor
            self._advance(info.n_bytes)

    def _copy(self) -> None:
        by_type: dict[str, list[_Placement]] = {}
        for placement in self.plan:
            if not placement.mapped:
                by_type.setdefault(buffer_type_name(self.libraries, placement.buffer_type), []).append(placement)
        for placements in by_type.values():
            distinct: dict[str, Tensor] = {}  # by the file's name: a tied tensor is copied once
            for placement in placements:
                if placement.info.name not in distinct:
                    distinct[placement.info.name] = self._new(placement)
                self.tensors[placement.spec.name] = distinct[placement.info.name]
            buffer = allocate_tensors(self.libraries, placements[0].buffer_type, list(distinct.values()))
            self.buffers.append(buffer)
            for placement in placements:
                # one call per tensor: a rearranging buffer takes it whole
                if tensor := distinct.pop(placement.info.name, None):
                    set_data(self.libraries, tensor, self.file.tensor_bytes(placement.info.name))
                self._advance(placement.info.n_bytes)

    def _advance(self, n_bytes: int) -> None:
        self.done += n_bytes
        if self.cancel is not None and self.cancel():
            raise CancelledError(f"loading {self.file.path} was cancelled")
        if self.progress is not None:
            self.progress(self.done, self.total)
