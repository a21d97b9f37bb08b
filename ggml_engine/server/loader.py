"""How the server loads a model: `Engine.load`, and a `ServingRuntime` over its runner."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any, Final

from ggml_engine.server.hosted_model import HostedModel, ModelSize
from ggml_engine.server.options import ServeOptions

_LEAST_CELLS: Final = 512


class EngineLoader:
    """A `Loader` of GGUF files, at the options of a server.

    Where several models share a budget and no `ctx` is given, each gets as many cells as its share of it has room for,
    and at most its own context.
    """

    def __init__(self, options: ServeOptions, budget: int | None) -> None:
        self._options = options
        self._budget = budget

    def measure(self, path: str) -> ModelSize:
        """The size of the file, and of K/V for all cells, as far as the tensors say."""
        from ggml_engine.ggml.gguf import GGUFFile  # noqa: PLC0415 - native code, when it is needed
        from ggml_engine.known_models import find_model  # noqa: PLC0415

        with GGUFFile.open(find_model(path)) as file:
            return self._measured(file)[0]

    def _measured(self, file: Any) -> tuple[ModelSize, int]:
        """The sizes, and the cells that they are for."""
        from ggml_engine.models.kv_estimate import estimate_bytes_per_cell  # noqa: PLC0415
        from ggml_engine.pool.kv_types import kv_type  # noqa: PLC0415

        load = self._options.load
        tensor_type = kv_type(load.get("kv_type", "f16"))
        per_cell = estimate_bytes_per_cell(file, tensor_type, tensor_type)
        weights = sum(info.n_bytes for info in file.tensors.values())
        cells = load.get("ctx") or self._share(_context_of(file.metadata), weights, per_cell)
        return ModelSize(weights, cells * per_cell), cells

    def _share(self, context: int, weights: int, per_cell: int) -> int:
        if self._budget is None or not per_cell:
            return context
        room = self._budget // len(self._options.server.models) - weights
        return min(context, max(_LEAST_CELLS, room // per_cell))

    def load(self, name: str, path: str, cancel: Callable[[], bool]) -> HostedModel:
        """Raises what `Engine.load` and `ServingRuntime` raise; nothing stays allocated then."""
        from ggml_engine.control.options import RunnerOptions  # noqa: PLC0415
        from ggml_engine.engine import Engine  # noqa: PLC0415
        from ggml_engine.ggml.gguf import GGUFFile  # noqa: PLC0415
        from ggml_engine.known_models import find_model  # noqa: PLC0415
        from ggml_engine.serving.runtime import ServingRuntime  # noqa: PLC0415

        options = dict(self._options.load)
        found = find_model(path)
        if self._budget is not None and options.get("ctx") is None:
            with GGUFFile.open(found) as file:
                options["ctx"] = self._measured(file)[1]
        with ExitStack() as undo:
            engine = undo.enter_context(Engine.load(found, cancel=cancel, **options))
            serving = self._options.serving
            runner = engine.runner(RunnerOptions(max_sessions=max(1024, serving.resident_sessions)))
            fingerprint = engine.executor.fingerprint
            runtime = ServingRuntime(runner, serving)
            undo.pop_all()

        def close(timeout: float) -> bool:
            until = time.monotonic() + timeout
            runtime.shutdown(timeout)
            if not engine.runner().shutdown(max(0.1, until - time.monotonic())):
                return False
            engine.close()
            return True

        return HostedModel(name, engine, runtime, close, fingerprint)


def _context_of(metadata: Mapping[str, Any]) -> int:
    context = metadata.get(f"{metadata.get('general.architecture')}.context_length")
    return context if isinstance(context, int) and 0 < context < 1 << 28 else 4096


def budget_of(options: ServeOptions) -> int | None:
    """The budget that is kept: the one asked for, or nine tenths of the free memory for several models."""
    from ggml_engine.control.machine_memory import machine_memory  # noqa: PLC0415

    server = options.server
    if server.memory_budget is not None or len(server.models) < 2:
        return server.memory_budget
    memory = machine_memory()
    return None if memory is None else memory.available * 9 // 10
