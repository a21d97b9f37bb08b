"""`LlamaExecutor`: libllama's own context behind the `Executor` protocol, for whatever libllama loads.

Attention memories (one buffer for all sequences, windows at full size) can be cloned and rewound at any position;
recurrent states and hybrid memories are cloned at their end, and go back to the beginning only. Sequences and cells are
counted here as libllama holds them: a step is admitted as a whole before libllama sees it. Callers on several threads
take turns. Knows no sampling and no text.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import (
    AbortedError,
    AllocationError,
    ClosedError,
    ComputeError,
    InputError,
    OptionError,
    PoolFullError,
    PositionError,
    RewindError,
    SequenceLimitError,
)
from ggml_engine.executor.admission import accepts_embeddings, check_batch, check_positions
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.llama_memory import LlamaMemory
from ggml_engine.executor.llama_options import LlamaOptions
from ggml_engine.executor.prepared import EmbeddingInput, PreparedInput
from ggml_engine.executor.protocol import Executor
from ggml_engine.ggml.abort import AbortFlag
from ggml_engine.ggml.backends import cpu_device
from ggml_engine.ggml.llama_context import LlamaContext, LlamaContextOptions
from ggml_engine.ggml.llama_model import LlamaModel
from ggml_engine.models.adapter_set import AdapterSet
from ggml_engine.models.fingerprint import metadata_fingerprint
from ggml_engine.models.kv_estimate import estimate_bytes_per_cell
from ggml_engine.pool.arguments import checked_int
from ggml_engine.pool.cells import CellCache
from ggml_engine.pool.kv_types import KvFormat, kv_type
from ggml_engine.pool.step import Placement


class LlamaExecutor(Executor):
    """Runs a model's steps in a context of libllama.

    Raises OptionError, AllocationError for a capacity that the machine's memory does not hold, and
    UnsupportedArchitectureError for a model that generates nothing.
    """

    def __init__(self, model: LlamaModel, options: LlamaOptions | None = None) -> None:
        self.options = o = options or LlamaOptions()
        self.model = model
        k_type, v_type = kv_type(o.k_type), kv_type(o.v_type)
        self._bytes_per_cell = estimate_bytes_per_cell(model.file, k_type, v_type)
        if o.attention == "matmul":
            KvFormat(k_type, v_type, "columns").check_matmul()
        self._check_memory()
        self._n_sequences = o.sequences(keeps_positions=model.keeps_positions)
        self._cells = CellCache(o.capacity, run=1)
        self._abort = AbortFlag(model.libraries)
        threads = o.thread_counts()
        n_slots = self._n_sequences + 1  # one for the memory's own use
        self._context = LlamaContext(
            model,
            LlamaContextOptions(o.capacity, o.max_batch_tokens, n_slots, threads, o.attention, k_type, v_type),
            self._abort,
        )
        self._memory = LlamaMemory(
            self._context,
            self._n_sequences,
            keeps_positions=model.keeps_positions,
            has_windows=model.window > 0,
        )
        self.n_forwarded = 0
        self.n_cells_peak = 0
        self._turn = threading.Lock()
        self._closed = False

    def _check_memory(self) -> None:
        n_bytes, total = self._bytes_per_cell * self.options.capacity, cpu_device(self.model.libraries).memory_total
        if total and n_bytes > total:
            raise AllocationError(
                f"{self.options.capacity} cells take about {n_bytes / 2**20:.0f} MiB in libllama, the machine has "
                f"{total / 2**20:.0f} MiB: ask for a smaller context"
            )

    # ---- limits

    @property
    def capacity(self) -> int:
        """How many cells there are."""
        return self._cells.capacity

    @property
    def max_positions(self) -> int:
        """The most positions of one sequence: all cells, or what the model has positions for."""
        return min(self.capacity, self.model.max_positions or self.capacity)

    @property
    def free_cells(self) -> int:
        """How many cells no sequence owns."""
        return self._cells.free_cells

    @property
    def max_batch_tokens(self) -> int:
        """The most tokens of one forward."""
        return self.options.max_batch_tokens

    @property
    def n_vocab(self) -> int:
        """The width of a row of logits."""
        return self.model.n_vocab

    # ---- what K/V is

    @cached_property
    def fingerprint(self) -> str:
        """64 hexadecimal digits that name the model, libllama's version and how it executes.

        The number of threads and the batches are not covered. Made at the first use, when the model's file must be
        open (ClosedError).
        """
        o, model = self.options, self.model
        how = ("libllama", model.version, model.libraries.version, o.attention, o.k_type, o.v_type, model.device_kind)
        return hashlib.sha256(f"{self._model_fingerprint}\n{how!r}\n".encode()).hexdigest()

    @cached_property
    def _model_fingerprint(self) -> str:
        return metadata_fingerprint(self.model.file)

    @property
    def bytes_per_cell(self) -> int:
        """Bytes that the K/V of a cell takes in all layers, as the model's tensors tell it; 0 where they do not."""
        return self._bytes_per_cell

    def count_cells(self, sequences: Iterable[int]) -> int:
        """How many distinct cells these sequences own. Raises UnknownSequenceError."""
        with self._turn_of_caller():
            return self._cells.count_cells(sequences)

    # ---- sequences

    @contextmanager
    def _turn_of_caller(self) -> Iterator[None]:
        with self._turn:
            if self._closed:
                raise ClosedError("the executor was closed")
            yield

    def open(self, adapters: AdapterSet | None = None) -> int:
        """A new, empty sequence. Raises OptionError for adapters: this executor takes none."""
        if adapters is not None and adapters.scaled:
            raise OptionError("libllama's context takes no adapters here: they are the native engine's")
        with self._turn_of_caller():
            return self._cells.open()

    def close(self, sequence: int) -> None:
        """Drop a sequence."""
        with self._turn_of_caller():
            self._cells.length(sequence)  # refuses what is not open
            self._memory.cut(sequence, 0)
            self._cells.close(sequence)

    @property
    def clones_anywhere(self) -> bool:
        """Whether a sequence can be cloned at each of its positions: the memory keeps all, or the last state alone."""
        return self.model.keeps_positions

    def clone(self, source: int, upto: int) -> int | None:
        """A new sequence that shares the first `upto` positions of `source`; nothing is copied.

        None where the memory keeps no state of that position, and where `max_sequences` have tokens. Raises
        UnknownSequenceError and PositionError.
        """
        with self._turn_of_caller():
            clone = self._cells.clone(source, upto)
            if self._memory.share(source, clone, upto):
                return clone
            self._cells.close(clone)
            return None

    def rewind(self, sequence: int, to: int) -> None:
        """Drop what a sequence holds from position `to` on. Raises RewindError where the memory cannot."""
        with self._turn_of_caller():
            to = checked_int(to, "a position", PositionError)
            length = self._cells.length(sequence)
            if 0 <= to <= length and not self._memory.cut(sequence, to):
                asked = "the step that failed cannot be undone" if to == length else f"not from {length} to {to}"
                raise RewindError(
                    f"sequence {sequence} can go back to 0, {asked}: "
                    f"a {self.model.architecture} model keeps the state of the last position alone"
                )
            self._cells.rewind(sequence, to)

    def can_rewind(self, sequence: int, to: int) -> bool:
        """Whether the sequence can go back to `to`. Raises UnknownSequenceError."""
        with self._turn_of_caller():
            return to in (0, self._cells.length(sequence)) or self.model.keeps_positions

    def length(self, sequence: int) -> int:
        """Committed positions of a sequence."""
        with self._turn_of_caller():
            return self._cells.length(sequence)

    # ---- steps

    def accepts(self, prepared: PreparedInput) -> bool:
        """Whether it is embeddings of this model's width, made for this model or for any."""
        return accepts_embeddings(prepared, self.model.n_embd, lambda: self._model_fingerprint)

    def abort(self) -> None:
        """Let the running forward end soon with AbortedError, and those that begin before `clear_abort`.

        Takes no turn. A forward over recurrent states runs to its end: they are written over as it goes.
        """
        self._abort.set()

    def clear_abort(self) -> None:
        """Let forwards run again."""
        self._abort.clear()

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Compute one step: logits f32 [outputs, n_vocab], in batch order.

        Raises InputError for unusable tokens and prepared inputs, and the kinds of CacheError for a step that cannot
        be, with nothing changed; ComputeError, AllocationError and AbortedError leave the step's cells claimed until
        its sequences are rewound or closed. ClosedError after `close_all`.
        """
        with self._turn_of_caller():
            return self._forward(batch)

    def forward_hidden(self, batch: Batch) -> npt.NDArray[np.float32]:
        """As `forward`, with libllama's embeddings of the tokens in place of logits: f32 [outputs, n_embd_out]."""
        with self._turn_of_caller():
            return self._forward(batch, gives_hidden=True)

    def _forward(self, batch: Batch, *, gives_hidden: bool = False) -> npt.NDArray[np.float32]:
        check_batch(self, batch, self.model.n_embd)
        if self._abort.is_set:
            raise AbortedError(f"a step of {batch.n_tokens} tokens was told to stop before it began")
        step = self._cells.declare(batch.sequences)
        lengths = {sequence: self._cells.length(sequence) for sequence in np.unique(batch.sequences).tolist()}
        n_missing = self._memory.count_missing(lengths)
        if n_missing > self._memory.n_free:
            raise SequenceLimitError(n_missing, self._memory.n_free, self._n_sequences)
        positions = step.positions if batch.positions is None else batch.positions
        check_positions(positions, self.model.max_positions, self.model.architecture)
        placement = step.place(positions)
        result = self._compute(batch, placement, lengths, gives_hidden=gives_hidden)
        self._memory.keep(lengths.items())
        placement.commit()
        self.n_forwarded += batch.n_tokens
        self.n_cells_peak = max(self.n_cells_peak, self._cells.used_cells)
        return result

    def _compute(
        self, batch: Batch, placement: Placement, lengths: dict[int, int], *, gives_hidden: bool
    ) -> npt.NDArray[np.float32]:
        """Decode in runs: what libllama takes at once is tokens alone, or embeddings alone."""
        slots = self._memory.slots(batch.sequences)
        found = []
        for begin, end, rows in _runs(batch):
            part = slice(begin, end)
            try:
                is_done = self._context.decode(
                    batch.tokens[part],
                    rows,
                    placement.positions[part],
                    slots[part],
                    batch.wants_logits[part],
                    gives_hidden=gives_hidden,
                )
            except InputError:
                self._take_back(lengths)
                raise
            if not is_done:
                self._take_back(lengths)
                raise PoolFullError(batch.n_tokens, self.free_cells, self.capacity)
            found.append(self._context.hidden()[batch.wants_logits[part]] if gives_hidden else self._context.logits())
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _take_back(self, lengths: dict[int, int]) -> None:
        """Undo a step that libllama refused. Raises ComputeError where a part of it was computed and cannot go."""
        for sequence, length in lengths.items():
            if not self._memory.cut(sequence, length):
                raise ComputeError(f"libllama computed a part of a step, and refused the rest (sequence {sequence})")
            self._cells.rewind(sequence, length)

    # ---- what there is

    def stats(self) -> dict[str, Any]:
        """Counters since the start: tokens forwarded, cells and sequences now and at most, bytes of K/V."""
        n_bytes = self._bytes_per_cell * self.capacity
        return {
            "tokens_forwarded": self.n_forwarded,
            "cells_used": self._cells.used_cells,
            "cells_peak": self.n_cells_peak,
            "cells_capacity": self.capacity,
            "sequences_used": self._n_sequences - self._memory.n_free,
            "sequences_capacity": self._n_sequences,
            "kv_bytes": n_bytes,
            "kv_capacity_bytes": n_bytes,
        }

    def close_all(self) -> None:
        """Free the context; idempotent. Waits for a running step. The model stays."""
        with self._turn:
            self._closed = True
            self._context.free()


def _runs(batch: Batch) -> Iterator[tuple[int, int, npt.NDArray[np.float32] | None]]:
    """Cut a batch where tokens and embeddings meet: begin, end and the rows of embeddings, None for tokens."""
    inputs = {piece.row: piece for piece in batch.prepared}
    ends = {piece.row + piece.stop - piece.start for piece in batch.prepared}
    for begin, end in pairwise(sorted({0, batch.n_tokens, *inputs, *ends})):
        piece = inputs.get(begin)
        source = None if piece is None else piece.source
        rows = source.rows[piece.start : piece.stop] if piece and isinstance(source, EmbeddingInput) else None
        yield begin, end, rows
