"""A loaded model: its file, hyperparameters, weights and the backends that compute it."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property

from ggml_engine.errors import OptionError
from ggml_engine.ggml.backends import Backend, Device, choose_device, cpu_device
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.library import Libraries, load
from ggml_engine.ggml.ops import Tensor
from ggml_engine.ggml.threads import ThreadCounts
from ggml_engine.models.architecture import Architecture
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.fingerprint import fingerprint
from ggml_engine.models.metadata import MetadataReader
from ggml_engine.models.prefill_weights import PrefillLayout, PrefillPlan, PrefillWeights
from ggml_engine.models.registry import find_architecture
from ggml_engine.models.weights import Cancel, Placer, Progress, Weights, load_weights


@dataclass(frozen=True)  # without slots: a cached property needs its dict
class Model:
    """What an executor runs. `layer_backends` has the backend of every layer; `backends` ends with the CPU.

    `threads` compute steps on it.
    """

    file: GGUFFile
    architecture: Architecture
    hp: Hyperparameters
    weights: Weights
    libraries: Libraries
    backends: tuple[Backend, ...]
    layer_backends: tuple[Backend, ...]
    n_offloaded: int  # layers on the device, from the end; the output is one more
    threads: ThreadCounts
    prefill: PrefillWeights | None = None  # what steps of many tokens are multiplied with

    @cached_property
    def fingerprint(self) -> str:
        """64 hexadecimal digits that name what K/V depends on (see `models/fingerprint.py` for what is covered).

        Made at the first use, from the file, which must be open then (ClosedError).
        """
        return fingerprint(self.file, self.hp)

    def weights_for(self, n_tokens: int) -> Mapping[str, Tensor]:
        """The weights of a step of so many tokens: those of the second layout where it is long enough for them."""
        if self.prefill is None or n_tokens < self.prefill.min_tokens:
            return self.weights
        return {**self.weights, **self.prefill.tensors}

    def free(self) -> None:
        """Free weights and backends; idempotent. Executors over them must be closed."""
        self.weights.free()
        if self.prefill is not None:
            self.prefill.free()
        for backend in self.backends:
            backend.free()


def load_model(
    file: GGUFFile,
    *,
    device: str = "auto",
    gpu_layers: int | None = None,
    threads: int | None = None,
    threads_batch: int | None = None,
    leave_cores: int = 0,
    repack: bool = True,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    prefill_weights: PrefillLayout = "off",
    memory_available: int | None = None,
) -> Model:
    """Load the weights of an open file.

    `device` is "auto", "cpu", "metal" or a device of ggml's; `gpu_layers` counts layers from the end, the output being
    one more (default: all, where the device is no CPU). `threads`, `threads_batch` and `leave_cores` are those of
    `ThreadCounts.choose`. `prefill_weights` is a second layout for steps of many tokens (models/prefill_weights.py),
    refused where it takes more than `memory_available` bytes. Everything is checked before memory is taken. Raises
    ModelError and its kinds, DeviceError, OptionError, AllocationError, CancelledError.
    """
    libraries = load()
    architecture = find_architecture(file)
    hp = architecture.hyperparameters(MetadataReader(file, architecture.name))
    chosen = choose_device(libraries, device)
    n_offloaded = _offloaded_layers(chosen, gpu_layers, hp.n_layer)
    counts = ThreadCounts.choose(threads, threads_batch, leave_cores)
    with ExitStack() as undo:
        cpu = Backend(libraries, cpu_device(libraries), counts.decode)
        undo.callback(cpu.free)
        on_device = cpu if chosen.kind == "cpu" else Backend(libraries, chosen)
        undo.callback(on_device.free)
        specs = architecture.tensors(hp)
        placer = Placer(libraries, chosen, hp.n_layer, n_offloaded, repack=repack)
        plan = PrefillPlan.of(prefill_weights, file, specs, placer, hp.n_layer)
        counted = None if progress is None else _TwoPhases(progress, 0 if plan is None else plan.n_bytes)
        if plan is not None:
            plan.check_memory(memory_available)
        weights = load_weights(
            libraries,
            file,
            specs,
            device=chosen,
            n_layer=hp.n_layer,
            gpu_layers=n_offloaded,
            repack=repack,
            progress=None if counted is None else counted.first,
            cancel=cancel,
        )
        undo.callback(weights.free)
        prefill = None
        if plan is not None:
            prefill = plan.make(file, cpu, advance=None if counted is None else counted.second, cancel=cancel)
        undo.pop_all()
    first = hp.n_layer + 1 - n_offloaded
    layer_backends = tuple(on_device if il >= first else cpu for il in range(hp.n_layer))
    backends = (cpu,) if on_device is cpu else (on_device, cpu)
    return Model(file, architecture, hp, weights, libraries, backends, layer_backends, n_offloaded, counts, prefill)


class _TwoPhases:
    """Tells of two phases as of one: bytes of the weights, then those of their second layout."""

    def __init__(self, progress: Progress, n_second: int) -> None:
        self._progress = progress
        self._n_second = n_second
        self._done = self._n_first = 0

    def first(self, done: int, total: int) -> None:
        self._done, self._n_first = done, total
        self._progress(done, total + self._n_second)

    def second(self, n_bytes: int) -> None:
        self._done += n_bytes
        self._progress(self._done, self._n_first + self._n_second)


def check_gpu_layers(gpu_layers: int | None) -> None:
    """Raises OptionError for what is no number of layers."""
    if gpu_layers is not None and (isinstance(gpu_layers, bool) or not isinstance(gpu_layers, int) or gpu_layers < 0):
        raise OptionError(f"gpu_layers must be 0 or more, asked for {gpu_layers!r}")


def _offloaded_layers(device: Device, gpu_layers: int | None, n_layer: int) -> int:
    check_gpu_layers(gpu_layers)
    if device.kind == "cpu":
        return 0
    return n_layer + 1 if gpu_layers is None else min(gpu_layers, n_layer + 1)
