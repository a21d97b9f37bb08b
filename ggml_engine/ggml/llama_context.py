"""`LlamaContext`: a context of libllama, its memory and its forwards.

Knows libllama's sequence ids ("slots") and positions; which sequence of ours a slot stands for is
`executor/llama_memory.py`'s to know. A native null or status becomes a typed error here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import (
    AbortedError,
    AllocationError,
    ClosedError,
    ComputeError,
    InputError,
    UnsupportedArchitectureError,
)
from ggml_engine.ggml.abort import AbortFlag
from ggml_engine.ggml.library import captured_log, ffi, running_graph
from ggml_engine.ggml.llama_model import LlamaModel
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.ggml.threads import ThreadCounts

__all__ = ["MAX_SLOTS", "LlamaContext", "LlamaContextOptions"]

MAX_SLOTS: Final = 256  # LLAMA_MAX_SEQ
_CTX_PADDING: Final = 256
_NO_POOLING: Final = 0  # enum llama_pooling_type
_FLASH: Final = {"auto": -1, "matmul": 0, "flash": 1}  # enum llama_flash_attn_type
_DECODED, _NO_CELLS, _ABORTED, _INVALID, _NO_MEMORY = 0, 1, 2, -1, -2


@dataclass(frozen=True, slots=True)
class LlamaContextOptions:
    """`n_cells` at least that many cells, `n_batch` tokens of one forward, `n_slots` sequences (1 to 256).

    `reads_whole_texts` is for models without a memory (encoders), and for these alone.
    """

    n_cells: int
    n_batch: int
    n_slots: int
    threads: ThreadCounts
    attention: Literal["auto", "flash", "matmul"]
    k_type: TensorType
    v_type: TensorType
    reads_whole_texts: bool = False


class LlamaContext:
    """One buffer of cells for all slots (unified), full-size windows, and one forward at a time.

    Raises AllocationError when libllama makes none, UnsupportedArchitectureError for a model without a memory, or with
    one where the options say that it has none.
    """

    def __init__(self, model: LlamaModel, options: LlamaContextOptions, abort: AbortFlag) -> None:
        self._model = model
        self._llama = llama = model.libraries.llama
        self._abort = abort  # what the native side has a pointer to
        n_batch = max(options.n_batch, options.n_slots)  # libllama keeps a row of logits for each slot
        params = llama.llama_context_default_params()
        params.n_ctx = -(-max(options.n_cells, n_batch) // _CTX_PADDING) * _CTX_PADDING
        params.n_batch = params.n_ubatch = n_batch
        params.n_seq_max = options.n_slots
        params.n_threads, params.n_threads_batch = options.threads.decode, options.threads.prefill
        params.flash_attn_type = _FLASH[options.attention]
        params.type_k, params.type_v = int(options.k_type), int(options.v_type)
        params.offload_kqv = params.op_offload = model.device_kind != "cpu"
        params.swa_full = params.kv_unified = True
        if f"{model.architecture}.pooling_type" in model.file.metadata:
            params.pooling_type = _NO_POOLING  # hidden states are those of tokens, whatever the file says
        if model.keeps_positions:  # a state that is written over cannot be had back
            params.abort_callback, params.abort_callback_data = abort.callback, abort.data
        with captured_log() as said, running_graph(f"libllama's context for {model.file.path}"):
            self._ptr: Any = model.make_context(params)
        if self._ptr == ffi.NULL:
            self._ptr = None
            raise AllocationError(
                f"libllama makes no context of {params.n_ctx} cells for {model.file.path}: "
                f"{said.reason or 'it gives no reason'}"
            )
        self._memory = llama.llama_get_memory(self._ptr)
        has_memory = self._memory != ffi.NULL
        if has_memory and options.reads_whole_texts:
            self.free()
            raise UnsupportedArchitectureError(
                f"{model.file.path} holds a {model.architecture!r} model, which has a memory and reads no whole texts"
            )
        if not has_memory and not options.reads_whole_texts:
            self.free()
            raise UnsupportedArchitectureError(
                f"{model.file.path} holds a {model.architecture!r} model, which reads whole texts at once (an encoder "
                f"or a diffusion model): only decoders generate text here"
            )
        self._n_outputs = 0
        self._slots = np.zeros(n_batch, np.int32)
        self._n_slots = np.ones(n_batch, np.int32)
        self._slot_pointers = self._slots.ctypes.data + 4 * np.arange(n_batch, dtype=np.uintp)

    # ---- forwards

    def decode(
        self,
        tokens: npt.NDArray[np.int32] | None,
        rows: npt.NDArray[np.float32] | None,
        positions: npt.NDArray[np.int32],
        slots: npt.NDArray[np.int32],
        wants_logits: npt.NDArray[np.bool_],
        *,
        gives_hidden: bool = False,
    ) -> bool:
        """Compute `tokens` i32 [n], or `rows` f32 [n, n_embd] in their place; the rest is [n].

        With `gives_hidden` there are hidden states as well, those of all tokens.
        False when there are not enough cells, with nothing changed. Raises AbortedError, AllocationError and
        ComputeError, after which a part may be in the memory, and InputError, with nothing changed.
        """
        n = positions.size
        self._slots[:n] = slots
        outputs = np.ones(n, np.int8) if gives_hidden else np.ascontiguousarray(wants_logits, np.int8)
        self._n_outputs = int(np.count_nonzero(outputs))
        if rows is not None and self._model.n_position_dims > 1:
            n_same = self._model.n_position_dims - 1  # of text; the last dimension is that of images
            positions = np.concatenate([*[positions] * n_same, np.zeros_like(positions)])
        batch = ffi.new("struct llama_batch *")
        batch.n_tokens = n
        kept: list[npt.NDArray[Any]] = [np.ascontiguousarray(positions, np.int32), outputs]
        batch.pos = _pointer("llama_pos *", kept[0])
        batch.logits = _pointer("int8_t *", outputs)
        batch.n_seq_id = _pointer("int32_t *", self._n_slots)
        batch.seq_id = _pointer("llama_seq_id **", self._slot_pointers)
        if rows is None:
            kept.append(np.ascontiguousarray(tokens, np.int32))
            batch.token = _pointer("llama_token *", kept[-1])
        else:
            kept.append(np.ascontiguousarray(rows, np.float32))
            batch.embd = _pointer("float *", kept[-1])
        with captured_log() as said, running_graph(f"{self._model.architecture} in libllama, {n} tokens"):
            self._llama.llama_set_embeddings(self._open, gives_hidden)
            status = self._llama.llama_decode(self._open, batch[0])
        if status in (_DECODED, _NO_CELLS):
            return bool(status == _DECODED)
        reason = f"a step of {n} tokens in libllama: {said.reason or f'status {status}'}"
        if status == _ABORTED:
            raise AbortedError(f"{reason}: it was told to stop")
        raise {_INVALID: InputError, _NO_MEMORY: AllocationError}.get(status, ComputeError)(reason)

    def logits(self) -> npt.NDArray[np.float32]:
        """A copy of the rows that the last `decode` was asked for, f32 [outputs, n_vocab] in batch order."""
        return self._rows(self._llama.llama_get_logits, self._model.n_vocab, "logits")

    def hidden(self) -> npt.NDArray[np.float32]:
        """A copy of the hidden states of the last `decode`, which was told to give them: f32 [n, n_embd_out]."""
        return self._rows(self._llama.llama_get_embeddings, self._model.n_embd_out, "hidden states")

    def _rows(self, read: Any, width: int, what: str) -> npt.NDArray[np.float32]:
        n = self._n_outputs
        if not n:
            return np.empty((0, width), np.float32)
        found = read(self._open)
        if found == ffi.NULL:
            raise ComputeError(f"libllama has no {what}, {n} rows were asked for")
        taken = np.frombuffer(ffi.buffer(found, 4 * n * width), np.float32)
        return taken.reshape(n, width).copy()

    # ---- the memory

    def remove(self, slot: int, begin: int) -> bool:
        """Drop a slot's positions from `begin` on; False, with nothing changed, where the memory cannot.

        All of a slot (0) can always go.
        """
        first = begin if begin else -1
        return bool(self._llama.llama_memory_seq_rm(self._opened_memory, slot, first, -1))

    def share(self, source: int, slot: int, begin: int, end: int) -> None:
        """Let `slot` hold positions [begin, end) of `source` as well; `end` -1 is all that follow."""
        self._llama.llama_memory_seq_cp(self._opened_memory, source, slot, begin if begin else -1, end)

    def length(self, slot: int) -> int:
        """One past the last position that a slot holds."""
        return int(self._llama.llama_memory_seq_pos_max(self._opened_memory, slot)) + 1

    # ---- the end

    @property
    def _open(self) -> Any:
        if not self._model.has_context(self._ptr):
            raise ClosedError("the context was closed, or its model")
        return self._ptr

    @property
    def _opened_memory(self) -> Any:
        return self._memory if self._open else None

    def free(self) -> None:
        """Free the context; idempotent. The model stays."""
        ptr, self._ptr = self._ptr, None
        self._model.free_context(ptr)

    def __del__(self) -> None:
        if getattr(self, "_ptr", None) is not None:
            self.free()


def _pointer(kind: str, array: npt.NDArray[Any]) -> Any:
    return ffi.cast(kind, array.ctypes.data)
