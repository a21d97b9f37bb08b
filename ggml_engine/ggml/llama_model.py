"""`LlamaModel`: weights that libllama loads and computes with, for what has no graph here.

Owns the native model. libllama ends the process on some files that it cannot run: `check_for_libllama` refuses what is
known to do so, and `rehearse` finds the rest in a child process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

from ggml_engine.errors import CancelledError, ModelError, UnsupportedArchitectureError
from ggml_engine.ggml.backends import choose_device
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.library import Libraries, captured_log, ffi, load, running_graph
from ggml_engine.ggml.llama_checks import check_for_libllama
from ggml_engine.ggml.llama_rehearsal import rehearse

__all__ = ["LlamaModel"]

_LOAD_COPIED, _LOAD_MAPPED = 0, 1  # enum llama_load_mode: LLAMA_LOAD_MODE_NONE and LLAMA_LOAD_MODE_MMAP
# What these keep of a sequence is compressed on the way, although libllama does not call them recurrent.
_COMPRESSED: Final = frozenset({"deepseek4"})


class LlamaModel:
    """A model of libllama's.

    `keeps_positions` is whether its memory holds every position by itself (attention), so that a sequence can go back
    to any of them; a recurrent state is that of the last position alone, and hybrid models have both. `window` is its
    widest sliding window in tokens, 0 for none.
    """

    def __init__(self, libraries: Libraries, file: GGUFFile, ptr: Any, device_kind: str) -> None:
        llama = libraries.llama
        self.libraries = libraries
        self.version = str(ffi.string(llama.llama_version()).decode("utf-8", "replace"))  # libllama's
        self.file = file
        self.device_kind = device_kind
        self.architecture = str(file.metadata.get("general.architecture"))
        self._ptr = ptr
        self.n_vocab = int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(ptr)))
        self.n_ctx_train = int(llama.llama_model_n_ctx_train(ptr))
        self.n_embd = int(llama.llama_model_n_embd_inp(ptr))
        self.window = max(0, int(llama.llama_model_n_swa(ptr)))
        is_recurrent = llama.llama_model_is_recurrent(ptr) or llama.llama_model_is_hybrid(ptr)
        self.keeps_positions = not is_recurrent and self.architecture not in _COMPRESSED
        rope = llama.llama_model_rope_type(ptr)
        # a row of embeddings has a position in each of these dimensions
        self.n_position_dims = 4 if rope in (llama.LLAMA_ROPE_TYPE_MROPE, llama.LLAMA_ROPE_TYPE_IMROPE) else 1

    @classmethod
    def load(
        cls,
        file: GGUFFile,
        *,
        device: str = "auto",
        gpu_layers: int | None = None,
        mmap: bool = True,
        rehearsed: bool = True,
        progress: Callable[[int, int], object] | None = None,
        cancel: Callable[[], bool] | None = None,
    ) -> LlamaModel:
        """Let libllama load an open file; options as in `load_model`. `rehearsed` tries it in a child process first.

        Raises ModelError and its kinds, with libllama's reason where it gives one, DeviceError and CancelledError;
        UnsupportedArchitectureError for an encoder, which generates nothing.
        """
        check_for_libllama(file)
        if rehearsed:
            rehearse(file)
        libraries = load()
        chosen = choose_device(libraries, device)
        llama = libraries.llama
        watch = _Watch(file.n_bytes, progress, cancel)
        params = llama.llama_model_default_params()
        devices = ffi.new("ggml_backend_dev_t[]", [ffi.NULL] if chosen.kind == "cpu" else [chosen.ptr, ffi.NULL])
        params.devices = devices
        params.n_gpu_layers = 0 if chosen.kind == "cpu" else -1 if gpu_layers is None else gpu_layers
        params.load_mode = _LOAD_MAPPED if mmap else _LOAD_COPIED
        params.progress_callback = watch.callback
        paths = [ffi.new("char[]", os.fsencode(part.path)) for part in file.parts]
        with captured_log() as said, running_graph(f"libllama's loading of {file.path}"):
            if len(paths) == 1:
                ptr = llama.llama_model_load_from_file(paths[0], params)
            else:
                ptr = llama.llama_model_load_from_splits(ffi.new("char *[]", paths), len(paths), params)
        if ptr == ffi.NULL:
            watch.raise_cause()
            if "unknown model architecture" in said.reason:
                version = ffi.string(llama.llama_version()).decode("utf-8", "replace")
                name = file.metadata.get("general.architecture")
                raise UnsupportedArchitectureError(
                    f"{file.path} holds a {name!r} model, which has no graph here and which libllama {version} does "
                    f"not know: a newer llama-cpp-python may run it"
                )
            raise ModelError(f"libllama does not load {file.path}: {said.reason or 'it gives no reason'}")
        if llama.llama_model_has_encoder(ptr):
            llama.llama_model_free(ptr)
            name = file.metadata.get("general.architecture")
            raise UnsupportedArchitectureError(
                f"{file.path} holds a {name!r} model, which has an encoder: only decoders generate text here"
            )
        return cls(libraries, file, ptr, chosen.kind)

    @property
    def ptr(self) -> Any:
        """The native model."""
        if self._ptr is None:
            raise ModelError("the model was freed before")
        return self._ptr

    def free(self) -> None:
        """Free the weights; idempotent. Contexts over them must be freed before."""
        ptr, self._ptr = self._ptr, None
        if ptr is not None:
            self.libraries.llama.llama_model_free(ptr)

    def __del__(self) -> None:
        if getattr(self, "_ptr", None) is not None:
            self.free()


class _Watch:
    """libllama's progress as ours: bytes, and a question whether to go on. What is raised there comes out later."""

    def __init__(
        self, n_bytes: int, progress: Callable[[int, int], object] | None, cancel: Callable[[], bool] | None
    ) -> None:
        self._n_bytes = n_bytes
        self._progress = progress
        self._cancel = cancel
        self._cause: BaseException | None = None
        self.callback = ffi.callback("llama_progress_callback", self._on_progress, error=False)

    def _on_progress(self, share: float, _user_data: Any) -> bool:
        try:
            if self._progress is not None:
                self._progress(int(share * self._n_bytes), self._n_bytes)
            if self._cancel is not None and self._cancel():
                raise CancelledError("loading was cancelled")
        except BaseException as error:
            self._cause = error
            return False
        return True

    def raise_cause(self) -> None:
        """Raise what ended the loading, if it was one of ours."""
        if self._cause is not None:
            raise self._cause
