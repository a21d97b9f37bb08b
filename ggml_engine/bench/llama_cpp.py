"""`LlamaCppDriver`: a context of libllama as the benchmark drives it, through llama-cpp-python's low-level calls.

As llama.cpp's own tools do: K/V in f16, windows of full size, one `llama_decode` and one `llama_synchronize` per step.
What a mode is: flash attention on or off, and one K/V buffer for all sequences (unified) or one for each (split).
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from ggml_engine.bench.driver import N_BATCH, Room, TokenIds
from ggml_engine.errors import AllocationError, ComputeError, ModelError
from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.reference.libllama import import_libllama

_CTX_PADDING: Final = 256
_FLASH_AUTO: Final = -1  # enum llama_flash_attn_type; 0 and 1 are off and on
_ALL_LAYERS: Final = 999
_NATIVE_LOG: Final = "ggml_engine.native"


@dataclass(frozen=True, slots=True)
class Mode:
    """How a context is made."""

    flash: bool
    unified: bool

    @property
    def name(self) -> str:
        """What tables call it."""
        return f"{'flash' if self.flash else 'no flash'}, {'unified' if self.unified else 'split'}"


MODES: Final = tuple(itertools.starmap(Mode, itertools.product((True, False), (False, True))))


def n_cells_of(mode: Mode, room: Room) -> int:
    """Cells of a context with that room: a split one has those of the longest sequence for each."""
    one = room.n_cells if mode.unified else room.n_positions
    return (1 if mode.unified else room.n_sequences) * (-(-one // _CTX_PADDING) * _CTX_PADDING)


class LlamaCppModel:
    """A model of libllama, for contexts in all modes. Close it after them. Raises ModelError when it is refused."""

    def __init__(self, path: str | os.PathLike[str], *, n_threads: int, on_device: bool = False) -> None:
        self._ptr: Any = None
        self.llama = llama = import_libllama()
        self.n_threads = n_threads
        self.on_device = on_device
        llama.llama_backend_init()
        params = llama.llama_model_default_params()
        params.n_gpu_layers = _ALL_LAYERS if on_device else 0
        self._ptr = llama.llama_model_load_from_file(os.fsencode(path), params)
        if not self._ptr:
            raise ModelError(f"libllama refused {os.fspath(path)}")
        self.n_vocab = int(llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self._ptr)))

    def defaults(self) -> Mode:
        """The mode of a context that nobody sets: "auto" as libllama resolves it on this device, and split."""
        heard = _Warnings()
        log = logging.getLogger(_NATIVE_LOG)
        log.addFilter(heard)
        try:
            self.llama.llama_free(self.make_context(_FLASH_AUTO, False, 1, _CTX_PADDING))
        finally:
            log.removeFilter(heard)
        return Mode(flash=not any("set to disabled" in text for text in heard.texts), unified=False)

    def make_context(self, flash: int, unified: bool, n_sequences: int, n_cells: int) -> Any:
        """A context, to be freed with `llama_free`. Raises AllocationError."""
        params = self.llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max = n_cells, n_sequences
        params.n_batch = params.n_ubatch = N_BATCH
        params.n_threads = params.n_threads_batch = self.n_threads
        params.flash_attn_type, params.kv_unified = flash, unified
        params.type_k = params.type_v = int(TensorType.F16)
        params.swa_full = True
        params.offload_kqv = params.op_offload = self.on_device
        context = self.llama.llama_init_from_model(self._ptr, params)
        if not context:
            raise AllocationError(f"libllama made no context of {n_cells} cells for {n_sequences} sequences")
        return context

    def close(self) -> None:
        """Free it; idempotent."""
        ptr, self._ptr = self._ptr, None
        if ptr:
            self.llama.llama_model_free(ptr)


class _Warnings(logging.Filter):
    """Keeps what the native log warns of to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def filter(self, record: logging.LogRecord) -> bool:
        self.texts.append(record.getMessage())
        return False


class LlamaCppDriver:
    """Drives a context of its own in one mode. Raises AllocationError."""

    def __init__(self, model: LlamaCppModel, mode: Mode, room: Room, name: str = "") -> None:
        self._context: Any = None
        self.name = name or mode.name
        self.n_vocab = model.n_vocab
        self.mode = mode
        self._llama = model.llama
        self._context = model.make_context(int(mode.flash), mode.unified, room.n_sequences, n_cells_of(mode, room))
        self._memory = model.llama.llama_get_memory(self._context)
        self._lengths = np.zeros(room.n_sequences, np.int32)
        n = max(N_BATCH, room.n_sequences)
        self._tokens = np.zeros(n, np.int32)
        self._positions = np.zeros(n, np.int32)
        self._slots = np.zeros(n, np.int32)
        self._n_slots = np.ones(n, np.int32)
        self._slot_pointers = self._slots.ctypes.data + self._slots.itemsize * np.arange(n, dtype=np.uintp)
        self._wants_logits = np.zeros(n, np.int8)
        self._batch = self._llama.llama_batch()
        for field, array in (
            ("token", self._tokens), ("pos", self._positions), ("n_seq_id", self._n_slots),
            ("seq_id", self._slot_pointers), ("logits", self._wants_logits),
        ):  # fmt: skip
            kind = dict(self._batch._fields_)[field]  # ctypes has no other way to ask
            setattr(self._batch, field, ctypes.cast(array.ctypes.data, kind))

    def _step(self, n: int) -> None:
        self._batch.n_tokens = n
        status = self._llama.llama_decode(self._context, self._batch)
        if status:
            raise ComputeError(f"llama_decode gave {status} for {n} tokens in the mode {self.mode.name!r}")
        self._llama.llama_synchronize(self._context)

    def clear(self) -> None:
        """See Driver."""
        self._llama.llama_memory_clear(self._memory, False)
        self._lengths[:] = 0

    def prefill(self, sequence: int, tokens: TokenIds) -> None:
        """See Driver."""
        self._slots[:N_BATCH] = sequence
        for start in range(0, tokens.size, N_BATCH):
            piece = tokens[start : start + N_BATCH]
            n = piece.size
            self._tokens[:n] = piece
            self._positions[:n] = np.arange(self._lengths[sequence], self._lengths[sequence] + n)
            self._wants_logits[: n - 1] = 0
            self._wants_logits[n - 1] = 1
            self._step(n)
            self._lengths[sequence] += n

    def decode(self, tokens: TokenIds) -> None:
        """See Driver."""
        n = tokens.size
        self._tokens[:n] = tokens
        self._positions[:n] = self._lengths[:n]
        self._slots[:n] = np.arange(n)
        self._wants_logits[:n] = 1
        self._step(n)
        self._lengths[:n] += 1

    def share(self, n_sequences: int) -> None:
        """See Driver. A split context copies, with its next step."""
        for i in range(1, n_sequences):
            self._llama.llama_memory_seq_cp(self._memory, 0, i, -1, -1)
        self._lengths[:n_sequences] = self._lengths[0]

    def copy(self, n_sequences: int) -> None:
        """See Driver."""
        size = self._llama.llama_state_seq_get_size(self._context, 0)
        state = (ctypes.c_uint8 * size)()
        if self._llama.llama_state_seq_get_data(self._context, state, size, 0) != size:
            raise ComputeError(f"libllama gave less than the {size} bytes of a sequence that it promised")
        for i in range(1, n_sequences):
            if self._lengths[i]:
                continue
            if not self._llama.llama_state_seq_set_data(self._context, state, size, i):
                raise ComputeError(f"libllama found no room for sequence {i} in the mode {self.mode.name!r}")
            self._lengths[i] = self._lengths[0]

    def rewind(self, lengths: Sequence[int]) -> None:
        """See Driver."""
        for i, length in enumerate(lengths):
            if not self._llama.llama_memory_seq_rm(self._memory, i, length, -1):
                raise ComputeError(f"libllama cannot rewind sequence {i} to {length}")
            self._lengths[i] = min(length, int(self._lengths[i]))

    def close(self) -> None:
        """See Driver."""
        context, self._context = self._context, None
        if context:
            self._llama.llama_free(context)
