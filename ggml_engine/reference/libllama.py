"""libllama as a reference: its logits on the same file, by its low-level calls.

A model and a context of its own, on the CPU. `llama_cpp` is imported when the first one is made, and the native log,
which that import takes, is given back to the engine.
"""

from __future__ import annotations

import ctypes
import importlib
import os
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import AllocationError, ComputeError, InputError, ModelError
from ggml_engine.ggml import library
from ggml_engine.ggml.tensor_types import TensorType

_FLASH_OFF, _FLASH_ON = 0, 1  # enum llama_flash_attn_type
_MAX_PIECE_BYTES = 256


def import_libllama() -> Any:
    """`llama_cpp.llama_cpp`; the native log, which its import takes, stays the engine's."""
    library.load()  # first, so that there is a log to restore
    llama = importlib.import_module("llama_cpp.llama_cpp")
    library.restore_log()
    return llama


class Libllama:
    """A model and a context of libllama. Close it, or use it as a context manager.

    Equal geometry with the engine: `flash` as its attention form, `type_k` and `type_v` as its K/V types, `swa_full`
    (K/V of windowed layers are all kept, as the engine does), and `use_extra_bufts` where it rearranges weights
    (`repack`). Raises ModelError when libllama refuses the file, AllocationError when it makes no context.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, n_ctx: int = 512, flash: bool = False, type_k: int = TensorType.F32,
        type_v: int = TensorType.F32, n_threads: int = 1, swa_full: bool = True, kv_unified: bool = True,
        n_batch: int = 512, n_ubatch: int = 512, n_seq_max: int = 1, use_extra_bufts: bool = False,
    ) -> None:  # fmt: skip
        self._context: Any = None
        self._llama = llama = import_libllama()
        llama.llama_backend_init()
        model_params = llama.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model_params.use_extra_bufts = use_extra_bufts
        self._model: Any = llama.llama_model_load_from_file(os.fsencode(path), model_params)
        if not self._model:
            raise ModelError(f"libllama refused {os.fspath(path)}")
        self._vocab = llama.llama_model_get_vocab(self._model)
        self.n_vocab = int(llama.llama_vocab_n_tokens(self._vocab))
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = n_ctx, n_batch, n_ubatch, n_seq_max
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = _FLASH_ON if flash else _FLASH_OFF
        params.type_k, params.type_v = int(type_k), int(type_v)
        params.swa_full, params.kv_unified = swa_full, kv_unified
        params.offload_kqv = params.op_offload = False
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            self.close()
            raise AllocationError(f"libllama made no context of {n_ctx} tokens for {os.fspath(path)}")
        self.n_ctx = int(llama.llama_n_ctx(self._context))

    def forward(
        self,
        tokens: Sequence[int] | npt.NDArray[np.integer[Any]],
        start_position: int = 0,
        *,
        wants_logits: Sequence[bool] | npt.NDArray[np.bool_] | None = None,
        sequence: int = 0,
    ) -> npt.NDArray[np.float32]:
        """Append `tokens` at `start_position`: f32 [n_wanted, n_vocab], of all tokens where `wants_logits` is None.

        What the cache holds from `start_position` on is dropped first. Raises ComputeError with libllama's status.
        """
        ids = [int(token) for token in tokens]
        batch = self._llama.llama_batch_init(len(ids), 0, 1)
        for i, token in enumerate(ids):
            batch.token[i] = token
        return self._decode(batch, len(ids), start_position, wants_logits, sequence)

    def forward_embeddings(
        self,
        rows: npt.NDArray[np.float32],
        start_position: int = 0,
        *,
        wants_logits: Sequence[bool] | npt.NDArray[np.bool_] | None = None,
        sequence: int = 0,
    ) -> npt.NDArray[np.float32]:
        """As `forward`, of embeddings f32 [rows, n_embd] in the place of tokens. Raises InputError for other shapes."""
        n_embd = int(self._llama.llama_model_n_embd(self._model))
        if rows.ndim != 2 or rows.shape[1] != n_embd or not len(rows):
            raise InputError(f"embeddings are [rows, {n_embd}], got an array of shape {rows.shape}")
        values = np.ascontiguousarray(rows, np.float32)
        batch = self._llama.llama_batch_init(len(rows), n_embd, 1)
        ctypes.memmove(batch.embd, values.ctypes.data, values.nbytes)
        return self._decode(batch, len(rows), start_position, wants_logits, sequence)

    def _decode(
        self,
        batch: Any,
        n: int,
        start_position: int,
        wants_logits: Sequence[bool] | npt.NDArray[np.bool_] | None,
        sequence: int,
    ) -> npt.NDArray[np.float32]:
        """Compute a batch whose tokens or embeddings are set, and free it."""
        llama = self._llama
        try:
            self.rewind(start_position, sequence)
            wanted = np.ones(n, np.bool_) if wants_logits is None else np.asarray(wants_logits, np.bool_)
            batch.n_tokens = n
            for i in range(n):
                batch.pos[i] = start_position + i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = sequence
                batch.logits[i] = bool(wanted[i])
            status = llama.llama_decode(self._context, batch)
            if status:
                raise ComputeError(f"llama_decode gave {status} for {n} tokens at {start_position}")
            n_wanted = int(np.count_nonzero(wanted))
            if not n_wanted:
                return np.empty((0, self.n_vocab), np.float32)
            found = np.ctypeslib.as_array(llama.llama_get_logits(self._context), shape=(n_wanted * self.n_vocab,))
            logits: npt.NDArray[np.float32] = found.reshape(n_wanted, self.n_vocab).copy()
        finally:
            llama.llama_batch_free(batch)
        return logits

    def rewind(self, length: int, sequence: int = 0) -> None:
        """Drop all but the first `length` tokens."""
        self._llama.llama_memory_seq_rm(self._llama.llama_get_memory(self._context), sequence, length, -1)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """libllama's tokens of a text."""
        raw = text.encode()
        room = len(raw) + 8
        array = (self._llama.llama_token * room)()
        n = self._llama.llama_tokenize(self._vocab, raw, len(raw), array, room, add_special, parse_special)
        if n < 0:
            raise InputError(f"{-n} tokens do not fit into {room}")
        return list(array[:n])

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """libllama's bytes of a token."""
        buffer = ctypes.create_string_buffer(_MAX_PIECE_BYTES)
        n = self._llama.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, special)
        if n < 0:
            raise InputError(f"token {token} has {-n} bytes, at most {_MAX_PIECE_BYTES} are read")
        return buffer.raw[:n]

    def close(self) -> None:
        """Free both; idempotent."""
        context, self._context = self._context, None
        model, self._model = self._model, None
        if context:
            self._llama.llama_free(context)
        if model:
            self._llama.llama_model_free(model)

    def __enter__(self) -> Libllama:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
