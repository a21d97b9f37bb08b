"""libllama as an oracle: the logits of the reference implementation on the same file, by its low-level calls.

One context, one sequence. Logs go where the engine's native logs go, so that a test's output stays clean.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

import gguf
import llama_cpp.llama_cpp as llama
import numpy as np
import numpy.typing as npt

from ggml_engine.ggml import library

Type = gguf.GGMLQuantizationType

FLASH_OFF, FLASH_ON = 0, 1


class OracleError(RuntimeError):
    """libllama refused."""


def route_logs() -> None:
    """Let native logs go to the engine's logger; importing llama_cpp has put its own printer there."""
    library.load().llama.llama_log_set(library._on_log, library.ffi.NULL)


class Oracle:
    """A model and a context of libllama. Close it, or use it as a context manager."""

    def __init__(
        self, path: str | os.PathLike[str], *, n_ctx: int = 512, flash: bool = False, type_k: Type = Type.F32,
        type_v: Type = Type.F32, n_threads: int = 1, swa_full: bool = True, kv_unified: bool = True, n_batch: int = 512,
        n_ubatch: int = 512, n_seq_max: int = 1, use_extra_bufts: bool = False,
    ) -> None:  # fmt: skip
        """Weights stay in their file's layout (`use_extra_bufts=False`), K and V are f32: nothing rounds but the kernels."""
        route_logs()
        llama.llama_backend_init()
        model_params = llama.llama_model_default_params()
        model_params.n_gpu_layers = 0
        model_params.use_extra_bufts = use_extra_bufts
        self._context = None
        self._model = llama.llama_model_load_from_file(os.fsencode(path), model_params)
        if not self._model:
            raise OracleError(f"{path} was refused")
        self._vocab = llama.llama_model_get_vocab(self._model)
        self.n_vocab = int(llama.llama_vocab_n_tokens(self._vocab))
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = n_ctx, n_batch, n_ubatch, n_seq_max
        params.n_threads = params.n_threads_batch = n_threads
        params.flash_attn_type = FLASH_ON if flash else FLASH_OFF
        params.type_k, params.type_v = int(type_k), int(type_v)
        params.swa_full, params.kv_unified = swa_full, kv_unified
        params.offload_kqv = params.op_offload = False
        self._context = llama.llama_init_from_model(self._model, params)
        if not self._context:
            self.close()
            raise OracleError(f"{path}: no context of {n_ctx} tokens")
        self.n_ctx = int(llama.llama_n_ctx(self._context))

    def forward(
        self, tokens: Sequence[int] | npt.NDArray[np.integer], start_position: int = 0, *, all_logits: bool = True, sequence: int = 0
    ) -> npt.NDArray[np.float32]:  # fmt: skip
        """Append `tokens` at `start_position` and give f32 [n_tokens, n_vocab], or [n_vocab] of the last one.

        What the cache holds from `start_position` on is dropped first.
        """
        self.rewind(start_position, sequence)
        n = len(tokens)
        batch = llama.llama_batch_init(n, 0, 1)
        try:
            batch.n_tokens = n
            for i, token in enumerate(tokens):
                batch.token[i] = int(token)
                batch.pos[i] = start_position + i
                batch.n_seq_id[i] = 1
                batch.seq_id[i][0] = sequence
                batch.logits[i] = all_logits or i == n - 1
            status = llama.llama_decode(self._context, batch)
            if status:
                raise OracleError(f"llama_decode gave {status} for {n} tokens at {start_position}")
            n_rows = n if all_logits else 1
            shape = (n_rows, self.n_vocab)
            logits = np.ctypeslib.as_array(llama.llama_get_logits(self._context), shape=(n_rows * self.n_vocab,))
            rows = logits.reshape(shape).copy()
        finally:
            llama.llama_batch_free(batch)
        return rows if all_logits else rows[0]

    def rewind(self, length: int, sequence: int = 0) -> None:
        """Drop all but the first `length` tokens."""
        llama.llama_memory_seq_rm(llama.llama_get_memory(self._context), sequence, length, -1)

    def tokenize(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """libllama's tokens of a text."""
        raw = text.encode()
        room = len(raw) + 8
        array = (llama.llama_token * room)()
        n = llama.llama_tokenize(self._vocab, raw, len(raw), array, room, add_special, parse_special)
        if n < 0:
            raise OracleError(f"{-n} tokens do not fit into {room}")
        return list(array[:n])

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """libllama's bytes of a token."""
        buffer = ctypes.create_string_buffer(256)
        n = llama.llama_token_to_piece(self._vocab, token, buffer, len(buffer), 0, special)
        if n < 0:
            raise OracleError(f"token {token} has {-n} bytes")
        return buffer.raw[:n]

    def close(self) -> None:
        """Free both; idempotent."""
        context, self._context = self._context, None
        model, self._model = self._model, None
        if context:
            llama.llama_free(context)
        if model:
            llama.llama_model_free(model)

    def __enter__(self) -> Oracle:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def reference_logits(path: Path, tokens: Sequence[int], **options: object) -> npt.NDArray[np.float32]:
    """One forward over all tokens in a fresh context: f32 [n_tokens, n_vocab]."""
    with Oracle(path, **options) as oracle:  # type: ignore[arg-type]
        return oracle.forward(tokens)
