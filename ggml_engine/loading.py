"""Weights and executor of an open file, at the options that `Engine.load` takes, and which engine computes them.

"native" is the graphs of this package; "llama" is libllama's own context, for what there is no graph for.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

import ggml_engine.control.conversation  # noqa: F401  # needed next: imported here, beside the vocabulary's parsing
from ggml_engine.control.machine_memory import machine_memory
from ggml_engine.errors import OptionError, UnsupportedArchitectureError
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.executor.options import ExecutorOptions
from ggml_engine.ggml.backends import cpu_device
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.library import Libraries
from ggml_engine.models.adapter import Adapter, load_adapter
from ggml_engine.models.adapter_set import AdapterSet, checked_scale
from ggml_engine.models.attention import AttentionOption
from ggml_engine.models.model import Model, check_gpu_layers, load_model
from ggml_engine.models.prefill_weights import PrefillLayout, check_layout
from ggml_engine.models.registry import find_architecture
from ggml_engine.models.weights import Cancel, Progress
from ggml_engine.pool.kv_pool import bytes_per_cell
from ggml_engine.pool.kv_types import kv_type as find_kv_type

if TYPE_CHECKING:
    from ggml_engine.executor.llama import LlamaExecutor
    from ggml_engine.ggml.llama_model import LlamaModel

log = logging.getLogger("ggml_engine")

EngineKind = Literal["native", "llama"]

_MEMORY_SHARE = 0.5  # of the free memory that a default capacity may come to
_LLAMA_CELLS = 8192  # the most of a default capacity in libllama, where all cells take their memory at once


@dataclass(frozen=True, slots=True)
class LoadedExecutor:
    """An executor, the kind of engine that it is, and why it was taken: a part of a sentence."""

    executor: GgmlExecutor | LlamaExecutor
    kind: EngineKind
    reason: str
    adapters: tuple[Adapter, ...] = ()  # what it opens sequences with, to be freed after it


def load_executor(
    file: GGUFFile,
    *,
    engine: Literal["auto", "native", "llama"] = "auto",
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    ctx: int | None = None,
    threads: int | None = None,
    threads_batch: int | None = None,
    leave_cores: int = 0,
    device: str = "auto",
    gpu_layers: int | None = None,
    mmap: bool = True,
    kv_type: str = "f16",
    cache_kind: str = "batched_cell",
    attention: AttentionOption = "auto",
    max_batch_tokens: int = 512,
    deterministic: bool = False,
    calibrate: bool = False,
    adapters: Iterable[tuple[str | os.PathLike[str], float]] = (),
    prefill_weights: PrefillLayout = "off",
) -> LoadedExecutor:
    """Load the weights and make an executor for them. Raises as `Engine.load`; nothing stays allocated then.

    `engine` "auto" is native where there is a graph for the file's architecture, and libllama where there is none.
    """
    kind, reason = _choose(file, engine)
    scaled = [(path, checked_scale(scale)) for path, scale in adapters]
    log.info("%s: engine %s, because %s", file.path, kind, reason)
    if ctx is not None and (isinstance(ctx, bool) or not isinstance(ctx, int) or ctx < 1):
        raise OptionError(f"ctx must be a positive number of cells, is {ctx!r}")
    check_gpu_layers(gpu_layers)
    check_layout(prefill_weights)
    if deterministic and prefill_weights != "off":
        raise OptionError(f"deterministic mode cannot go with prefill_weights {prefill_weights!r}")
    if kind == "llama":
        if deterministic:
            raise OptionError(f"deterministic mode is that of the native engine, and {reason}")
        if scaled:
            raise OptionError(f"adapters are taken by the native engine alone, and {reason}")
        if prefill_weights != "off":
            raise OptionError(f"prefill_weights {prefill_weights!r} is for the native engine, and {reason}")
        if cache_kind != "batched_cell":
            raise OptionError(f"cache kind {cache_kind!r} is one of the native engine's, and {reason}")
        from ggml_engine.executor.llama import LlamaExecutor  # noqa: PLC0415  # most files need none of it
        from ggml_engine.executor.llama_options import LlamaOptions  # noqa: PLC0415
        from ggml_engine.ggml.llama_model import LlamaModel  # noqa: PLC0415

        foreign = LlamaModel.load(
            file, device=device, gpu_layers=gpu_layers, mmap=mmap, progress=progress, cancel=cancel
        )
        try:
            options = LlamaOptions(
                capacity=ctx or _llama_capacity(foreign, kv_type),
                max_batch_tokens=max_batch_tokens,
                attention=cast("Any", attention),  # refused there where libllama has no such form
                k_type=kv_type,
                v_type=kv_type,
                threads=threads,
                threads_batch=threads_batch,
                leave_cores=leave_cores,
            )
            return LoadedExecutor(LlamaExecutor(foreign, options), kind, reason)
        except BaseException:
            foreign.free()
            raise
    memory = None if prefill_weights == "off" else machine_memory()
    model = load_model(
        file,
        device=device,
        gpu_layers=gpu_layers,
        threads=threads,
        threads_batch=threads_batch,
        leave_cores=leave_cores,
        progress=progress,
        cancel=cancel,
        prefill_weights=prefill_weights,
        memory_available=None if memory is None else memory.available,
    )
    try:
        native_options = ExecutorOptions(
            max_batch_tokens=max_batch_tokens,
            attention=attention,
            k_type=kv_type,
            v_type=kv_type,
            cache_kind=cache_kind,
            deterministic=deterministic,
            calibrate=calibrate,
        )
        native_options = replace(native_options, capacity=ctx or _capacity(model, native_options))
        executor, loaded = _adapted(model, native_options, scaled)
        return LoadedExecutor(executor, kind, reason, loaded)
    except BaseException:
        model.free()
        raise


def _adapted(
    model: Model, options: ExecutorOptions, scaled: Sequence[tuple[str | os.PathLike[str], float]]
) -> tuple[GgmlExecutor, tuple[Adapter, ...]]:
    """An executor that opens sequences with adapters, and these."""
    with ExitStack() as undo:
        loaded = []
        for path, _ in scaled:
            loaded.append(load_adapter(model, path))
            undo.callback(loaded[-1].free)
        opened_with = AdapterSet.of([(adapter, scale) for adapter, (_, scale) in zip(loaded, scaled, strict=True)])
        executor = GgmlExecutor(model, options, opened_with)
        undo.callback(executor.close_all)
        executor.make_room()  # here, beside the vocabulary's parsing, and not in the first step
        undo.pop_all()
    return executor, tuple(loaded)


def _choose(file: GGUFFile, engine: str) -> tuple[EngineKind, str]:
    if engine == "native":
        return "native", "it was asked for"
    if engine == "llama":
        return "llama", "engine 'llama' was asked for"
    if engine != "auto":
        raise OptionError(f"engine is auto, native or llama, asked for {engine!r}")
    try:
        name = find_architecture(file).name
    except UnsupportedArchitectureError:
        return "llama", f"there is no graph for {file.metadata.get('general.architecture')!r} models here"
    return "native", f"there is a graph for {name!r} models"


def _capacity(model: Model, options: ExecutorOptions) -> int:
    """Cells: the model's own context as far as half of the free memory goes."""
    _, kv_format = options.resolve(model.layer_backends[-1].device.kind)
    n_bytes = bytes_per_cell(model.hp.kv_layers(), kv_format)
    return max(1, min(model.hp.n_ctx_train, _affordable(model.libraries, n_bytes)))


def _llama_capacity(model: LlamaModel, kv_type_name: str) -> int:
    from ggml_engine.models.kv_estimate import estimate_bytes_per_cell  # noqa: PLC0415  # as above

    tensor_type = find_kv_type(kv_type_name)
    most = max(1, min(model.n_ctx_train, _LLAMA_CELLS))
    n_bytes = estimate_bytes_per_cell(model.file, tensor_type, tensor_type)
    return max(1, min(most, _affordable(model.libraries, n_bytes))) if n_bytes else most


def _affordable(libraries: Libraries, n_bytes: int) -> int:
    return int(_MEMORY_SHARE * cpu_device(libraries).memory_free) // n_bytes
