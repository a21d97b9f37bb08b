"""`LlamaModel`: weights that libllama loads and computes with, for what has no graph here.

Owns the native model. libllama ends the process on some files that it cannot run: `check_for_libllama` refuses what is
known to do so, and `rehearse` finds the rest in a child process.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import (
    CancelledError,
    InputError,
    ModelError,
    NativeError,
    UnsupportedArchitectureError,
    VocabularyError,
)
from ggml_engine.ggml.backends import choose_device
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.library import Libraries, captured_log, ffi, load, running_graph
from ggml_engine.ggml.llama_architectures import LLAMA_ARCHITECTURES, Kind
from ggml_engine.ggml.llama_checks import check_for_libllama
from ggml_engine.ggml.llama_rehearsal import rehearse

__all__ = ["LlamaModel"]

_LOAD_COPIED, _LOAD_MAPPED = 0, 1  # enum llama_load_mode: LLAMA_LOAD_MODE_NONE and LLAMA_LOAD_MODE_MMAP
_MAX_TEXT_BYTES: Final = 1 << 20
# What these keep of a sequence is compressed on the way, although libllama does not call them recurrent.
_COMPRESSED: Final = frozenset({"deepseek4"})


class LlamaModel:
    """A model of libllama's.

    `keeps_positions` is whether its memory holds every position by itself (attention), so that a sequence can go back
    to any of them; a recurrent state is that of the last position alone, and hybrid models have both. `window` is its
    widest sliding window in tokens, 0 for none. `max_positions` is how many positions it has vectors for, 0 for any.
    """

    def __init__(self, libraries: Libraries, file: GGUFFile, ptr: Any, device_kind: str) -> None:
        llama = libraries.llama
        self.libraries = libraries
        self.version = str(ffi.string(llama.llama_version()).decode("utf-8", "replace"))  # libllama's
        self.file = file
        self.device_kind = device_kind
        self.architecture = str(file.metadata.get("general.architecture"))
        self._ptr = ptr
        self._contexts: set[Any] = set()
        self.n_vocab = int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(ptr)))
        self.n_ctx_train = int(llama.llama_model_n_ctx_train(ptr))
        self.n_embd = int(llama.llama_model_n_embd_inp(ptr))
        self.n_embd_out = int(llama.llama_model_n_embd_out(ptr))  # of a hidden state after the last layer
        table = file.tensors.get("position_embd.weight")
        self.max_positions = 0 if table is None else table.shape[-1]
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
        encodes: bool = False,
        progress: Callable[[int, int], object] | None = None,
        cancel: Callable[[], bool] | None = None,
    ) -> LlamaModel:
        """Let libllama load an open file; options as in `load_model`. `rehearsed` tries it in a child process first.

        Raises ModelError and its kinds, with libllama's reason where it gives one, DeviceError and CancelledError;
        UnsupportedArchitectureError for what is no decoder (`LLAMA_ARCHITECTURES`), which generates nothing, or with
        `encodes` for what is no encoder.
        """
        check_for_libllama(file)
        kind = LLAMA_ARCHITECTURES.get(str(file.metadata.get("general.architecture")))
        if encodes and kind is not Kind.ENCODER:
            name = file.metadata.get("general.architecture")
            raise UnsupportedArchitectureError(f"{file.path} holds a {name!r} model, which is no encoder")
        if not encodes and kind is not None and not kind.is_decoder:
            name = file.metadata.get("general.architecture")
            raise UnsupportedArchitectureError(
                f"{file.path} holds a {name!r} model ({kind.value}): only decoders generate text here"
            )
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

    def tokenize(self, text: str) -> npt.NDArray[np.int32]:
        """The tokens of a text by libllama's own tokenizer, i32 [n], with those that the file puts around it.

        Text that spells a control token stays text. Raises InputError for a text that is no UTF-8 or over 1 MiB, and
        VocabularyError for a model without a tokenizer.
        """
        llama = self.libraries.llama
        vocab = llama.llama_model_get_vocab(self.ptr)
        if llama.llama_vocab_type(vocab) == llama.LLAMA_VOCAB_TYPE_NONE:
            raise VocabularyError(f"{self.file.path} has no tokenizer: give token ids")
        try:
            data = text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"a text is no UTF-8: {error}") from None
        if len(data) > _MAX_TEXT_BYTES:
            raise InputError(f"a text of {len(data)} bytes, at most {_MAX_TEXT_BYTES} are tokenised")
        found = np.empty(len(data) + 8, np.int32)
        for _ in range(2):
            room = ffi.from_buffer("llama_token[]", found)
            n = llama.llama_tokenize(vocab, data, len(data), room, found.size, True, False)
            if n >= 0:
                return found[:n]
            found = np.empty(-n, np.int32)
        raise NativeError(f"llama_tokenize refused a text of {len(data)} bytes ({n})")

    @property
    def ptr(self) -> Any:
        """The native model."""
        if self._ptr is None:
            raise ModelError("the model was freed before")
        return self._ptr

    def make_context(self, params: Any) -> Any:
        """A native context over the weights, NULL where libllama makes none. It does not outlive them."""
        context = self.libraries.llama.llama_init_from_model(self.ptr, params)
        if context != ffi.NULL:
            self._contexts.add(context)
        return context

    def has_context(self, context: Any) -> bool:
        """Whether it is one of these, and not freed."""
        return context in self._contexts

    def free_context(self, context: Any) -> None:
        """Free a context over the weights; idempotent."""
        if context in self._contexts:
            self._contexts.remove(context)
            self.libraries.llama.llama_free(context)

    def free(self) -> None:
        """Free the weights and what contexts there are over them; idempotent."""
        for context in list(self._contexts):  # where both are garbage, the weights may come first
            self.free_context(context)
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
