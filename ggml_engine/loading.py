"""Weights and executor of an open file, at the options that `Engine.load` takes."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import ggml_engine.control.conversation  # noqa: F401  # needed next: imported here, beside the vocabulary's parsing
from ggml_engine.errors import OptionError
from ggml_engine.executor.executor import ExecutorOptions, GgmlExecutor
from ggml_engine.ggml.backends import cpu_device
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.models.model import Model, load_model
from ggml_engine.models.weights import Cancel, Progress
from ggml_engine.pool.kv_pool import bytes_per_cell

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
) -> GgmlExecutor:
    """Load the weights and make an executor for them. Raises as `Engine.load`; nothing stays allocated then."""
    model = load_model(file, device=device, gpu_layers=gpu_layers, threads=threads, progress=progress, cancel=cancel)
    try:
        options = ExecutorOptions(
            max_batch_tokens=max_batch_tokens,
            attention=attention,
            k_type=kv_type,
            v_type=kv_type,
            deterministic=deterministic,
        )
        return GgmlExecutor(model, replace(options, capacity=_capacity(model, ctx, options)))
    except BaseException:
        model.free()
        raise


def _capacity(model: Model, ctx: int | None, options: ExecutorOptions) -> int:
    """Cells: `ctx`, or the model's own context as far as half of the free memory goes."""
    if ctx is not None:
        if isinstance(ctx, bool) or not isinstance(ctx, int) or ctx < 1:
            raise OptionError(f"ctx must be a positive number of cells, is {ctx!r}")
        return ctx
    _, kv_format = options.resolve(model.layer_backends[-1].device.kind)
    n_bytes = bytes_per_cell(model.hp.kv_layers(), kv_format)
    affordable = int(_MEMORY_SHARE * cpu_device(model.libraries).memory_free) // n_bytes
    return max(1, min(model.hp.n_ctx_train, affordable))
