"""A rehearsal in a child process: libllama reads a file's metadata and plans its graphs, without the weights' memory.

libllama ends the process on metadata that contradict each other, in ways that differ by architecture. What ends here is
the child. Takes about half a second, whatever the size of the model.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

from ggml_engine.errors import ModelError
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.library import ffi, load

__all__ = ["rehearse"]

_TIMEOUT_S: Final = 120.0
_N_CTX: Final = 512
_SURVIVED: Final = 0


def rehearse(file: GGUFFile) -> None:
    """Refuse a file that ends a process in libllama; one that libllama refuses by itself passes.

    Raises ModelError with libllama's last words. Does nothing where this program is no Python that could be started
    again (a frozen application).
    """
    if getattr(sys, "frozen", False) or not sys.executable:
        return
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "ggml_engine.ggml.llama_rehearsal", *(part.path for part in file.parts)]
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"{file.path}: libllama does not come to an end with it in {_TIMEOUT_S:.0f} s") from None
    if done.returncode != _SURVIVED:
        said = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["it says nothing"]
        raise ModelError(
            f"{file.path} ends a process in libllama, tried in a child (exit {done.returncode}): {said[-1]}"
        )


def _load_without_weights(paths: list[str]) -> None:
    llama = load().llama
    params = llama.llama_model_default_params()
    devices = ffi.new("ggml_backend_dev_t[]", [ffi.NULL])  # none but the CPU
    params.devices, params.n_gpu_layers = devices, 0
    params.load_mode = 0
    params.no_alloc = True
    native = [ffi.new("char[]", os.fsencode(path)) for path in paths]
    if len(native) == 1:
        model = llama.llama_model_load_from_file(native[0], params)
    else:
        model = llama.llama_model_load_from_splits(ffi.new("char *[]", native), len(native), params)
    if model != ffi.NULL and not llama.llama_model_has_encoder(model):
        options = llama.llama_context_default_params()
        options.n_ctx, options.kv_unified = _N_CTX, True
        context = llama.llama_init_from_model(model, options)
        if context != ffi.NULL:
            llama.llama_free(context)
    if model != ffi.NULL:
        llama.llama_model_free(model)


if __name__ == "__main__":
    _load_without_weights(sys.argv[1:])
