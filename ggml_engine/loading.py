"""Weights and executor of an open file, at the options that `Engine.load` takes."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Literal

import ggml_engine.control.conversation  # noqa: F401  # needed next: imported here, beside the vocabulary's parsing
from ggml_engine.errors import OptionError
from ggml_engine.executor.executor import ExecutorOptions, GgmlExecutor
from ggml_engine.ggml.backends import cpu_device
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.models.adapter import Adapter, load_adapter
from ggml_engine.models.adapter_set import AdapterSet, checked_scale
from ggml_engine.models.model import Model, load_model
from ggml_engine.models.weights import Cancel, Progress
from ggml_engine.pool.kv_pool import bytes_per_cell
from ggml_engine.pool.kv_types import KvFormat
from ggml_engine.pool.kv_types import kv_type as find_kv_type

_MEMORY_SHARE = 0.5  # of the free memory that a default capacity may come to


def load_executor(
    file: GGUFFile,
    *,
    progress: Progress | None = None,
    cancel: Cancel | None = None,
    ctx: int | None = None,
    threads: int | None = None,
    device: str = "auto",
    gpu_layers: int | None = None,
    kv_type: str = "f16",
    attention: Literal["auto", "flash", "matmul"] = "auto",
    max_batch_tokens: int = 512,
    deterministic: bool = False,
    adapters: Iterable[tuple[str | os.PathLike[str], float]] = (),
) -> tuple[GgmlExecutor, list[Adapter]]:
    """Load the weights and make an executor for them, and the adapters that it opens sequences with.

    Raises as `Engine.load`; nothing stays allocated then.
    """
    scaled = [(path, checked_scale(scale)) for path, scale in adapters]
    model = load_model(file, device=device, gpu_layers=gpu_layers, threads=threads, progress=progress, cancel=cancel)
    with ExitStack() as undo:
        undo.callback(model.free)
        loaded = []
        for path, _ in scaled:
            loaded.append(load_adapter(model, path))
            undo.callback(loaded[-1].free)
        options = ExecutorOptions(
            capacity=_capacity(model, ctx, kv_type),
            max_batch_tokens=max_batch_tokens,
            attention=attention,
            k_type=kv_type,
            v_type=kv_type,
            deterministic=deterministic,
        )
        opened_with = AdapterSet.of([(adapter, scale) for adapter, (_, scale) in zip(loaded, scaled, strict=True)])
        executor = GgmlExecutor(model, options, opened_with)
        undo.pop_all()
    return executor, loaded


def _capacity(model: Model, ctx: int | None, kv_type_name: str) -> int:
    """Cells: `ctx`, or the model's own context as far as half of the free memory goes."""
    if ctx is not None:
        if isinstance(ctx, bool) or not isinstance(ctx, int) or ctx < 1:
            raise OptionError(f"ctx must be a positive number of cells, is {ctx!r}")
        return ctx
    tensor_type = find_kv_type(kv_type_name)
    n_bytes = bytes_per_cell(model.hp.kv_layers(), KvFormat(tensor_type, tensor_type))
    affordable = int(_MEMORY_SHARE * cpu_device(model.libraries).memory_free) // n_bytes
    return max(1, min(model.hp.n_ctx_train, affordable))
