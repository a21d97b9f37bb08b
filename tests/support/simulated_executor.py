"""An executor for the simulator of the control plane: as `FakeExecutor`, without gates and records, but quick.

Cells are accounted for by the real `CellCache`. What a sequence's cells hold decides the next token (`next_token`), so
that a token which is lost, doubled or foreign shows in all that follow. A watcher is told of every call as it happens.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
from cell_executor import CellExecutor

from ggml_engine.errors import AbortedError, ComputeError, InputError, PoolFullError
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.prepared import Kind, PreparedInput
from ggml_engine.ggml.sampler_config import SamplerConfig
from ggml_engine.models.adapter_set import AdapterSet
from ggml_engine.pool.cells import CellCache

N_VOCAB = 23
END = 0  # the token that this model ends with
FIRST_OPAQUE = 1 << 40  # keys from here on stand for positions of prepared inputs

TAKES_PREPARED = "prepared" in Batch.__dataclass_fields__


def next_token(keys: Sequence[int]) -> int:
    """The likeliest token after a history of keys."""
    return zlib.crc32(array("q", keys).tobytes()) % N_VOCAB


class SimulatedInput(PreparedInput):
    """A prepared input; no other one has its keys."""

    kind = Kind("simulated")

    def __init__(self, number: int, n: int, n_left: int = 1 << 30) -> None:
        self.n_left = n_left  # its size changes after so many forwards
        self.keys = [FIRST_OPAQUE + 1000 * number + i for i in range(n)]

    def size(self) -> int:
        return len(self.keys) + self.has_changed

    @property
    def has_changed(self) -> bool:
        """Whether it breaks its promise by now."""
        return self.n_left <= 0

    def content_hash(self) -> bytes:
        return array("q", self.keys).tobytes()


class ForeignInput(SimulatedInput):
    """One that the executor does not take."""

    kind = Kind("foreign")


def is_accepted(prepared: PreparedInput) -> bool:
    """Whether the executor takes it."""
    return TAKES_PREPARED and prepared.kind is SimulatedInput.kind


class Watcher(Protocol):
    """Who looks at what the executor is asked."""

    def on_forward(self, batch: Batch) -> None:
        """A forward begins."""

    def inside_forward(self) -> None:
        """A forward has its cells and computes: other threads may do something."""

    def on_outcome(self, outcome: str) -> None:
        """A forward ends: "done", "full", "aborted" or "failed"."""

    def on_close(self, sequence: int) -> None:
        """A sequence is about to be closed."""

    def on_rewind_failed(self, sequence: int) -> None:
        """A rewind fails, and changes nothing."""


class SimulatedExecutor(CellExecutor):
    """See the module. `forward_fault` and `clone_fault` break the next call and are then taken off."""

    def __init__(self, capacity: int, max_batch_tokens: int, run: int, watcher: Watcher) -> None:
        super().__init__(CellCache(capacity, run=run, read_block=run), max_batch_tokens, N_VOCAB)
        self._watcher = watcher
        self._keys = np.full(self.cache.capacity, -9, np.int64)
        self._is_aborted = False
        self.forward_fault: str | None = None  # raise, shape, nothing, abort
        self.clone_fault: str | None = None  # raise, refuse, short
        self.open_fault = False
        self.rewind_fault = False
        self.close_fault = False  # after the sequence is closed
        self.n_opened = 0
        self.n_closed = 0
        self.n_clones = 0  # calls
        self.last_opened = -1
        self.n_changes = 0  # of cells, or of who owns them

    def open(self, adapters: AdapterSet | None = None) -> int:  # none are simulated
        if self.open_fault:
            self.open_fault = False
            raise ComputeError("an open that was to fail")
        return self._opened(self.cache.open())

    def _opened(self, sequence: int) -> int:
        self.n_opened += 1
        self.n_changes += 1
        self.last_opened = sequence
        return sequence

    def owned_cells(self, sequence: int) -> set[int]:
        """The cells that a sequence owns."""
        return set(self.cache.cells_of(sequence).tolist())

    def count_cells(self, sequences: Iterable[int]) -> int:
        return self.cache.count_cells(sequences)

    def close(self, sequence: int) -> None:
        self._watcher.on_close(sequence)
        self.cache.close(sequence)
        self.n_closed += 1
        self.n_changes += 1
        if self.close_fault:
            self.close_fault = False
            raise ComputeError("a close that was to fail")

    def rewind(self, sequence: int, to: int) -> None:
        if self.rewind_fault:
            self.rewind_fault = False
            self._watcher.on_rewind_failed(sequence)
            raise ComputeError("a rewind that was to fail")
        self.cache.rewind(sequence, to)
        self.n_changes += 1

    def length(self, sequence: int) -> int:
        return self.cache.length(sequence)

    def clone(self, source: int, upto: int) -> int | None:
        self.n_clones += 1
        fault, self.clone_fault = self.clone_fault, None
        if fault == "raise":
            raise ComputeError("a clone that was to fail")
        if fault == "refuse":
            return None
        if fault == "short":
            upto -= 1
        return self._opened(self.cache.clone(source, max(0, upto)))

    def accepts(self, prepared: PreparedInput) -> bool:
        return is_accepted(prepared)

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        watcher = self._watcher
        watcher.on_forward(batch)
        try:
            step = self.cache.declare(batch.sequences)
        except PoolFullError:
            watcher.on_outcome("full")
            raise
        placement = step.place(step.positions)
        self.n_changes += 1
        keys = batch.tokens.astype(np.int64)
        for piece in getattr(batch, "prepared", ()):
            keys[piece.row : piece.row + piece.stop - piece.start] = piece.source.keys[piece.start : piece.stop]
            piece.source.n_left -= 1
        self._keys[placement.cells] = keys
        watcher.inside_forward()
        fault, self.forward_fault = self.forward_fault, None
        if fault == "raise":
            watcher.on_outcome("failed")
            raise ComputeError("a forward that was to fail")
        if self._is_aborted or fault == "abort":
            watcher.on_outcome("aborted")
            raise AbortedError("a forward that was told to stop")
        logits = self._logits(batch, placement.positions)
        placement.commit()
        if fault is not None:
            watcher.on_outcome("failed")
            return logits[:, :-1] if fault == "shape" else None  # type: ignore[return-value]
        watcher.on_outcome("done")
        return logits

    def _logits(self, batch: Batch, positions: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
        wanted = np.flatnonzero(batch.wants_logits).tolist()
        logits = np.zeros((len(wanted), N_VOCAB), np.float32)
        for row, token in enumerate(wanted):
            cells = self.cache.cells_of(int(batch.sequences[token]))[: int(positions[token]) + 1]
            logits[row, zlib.crc32(self._keys[cells].tobytes()) % N_VOCAB] = 1.0
        return logits

    def abort(self) -> None:
        self._is_aborted = True

    def clear_abort(self) -> None:
        self._is_aborted = False


class _Sampler:
    """Greedy."""

    def __init__(self, text: SimulatedText) -> None:
        self._text = text
        self._is_open = True

    def accept_prompt(self, tokens: Sequence[int]) -> None:
        assert self._is_open

    def sample(self, logits: npt.NDArray[np.float32]) -> int:
        assert self._is_open
        return int(logits.argmax())

    def accept(self, token: int) -> None:
        assert self._is_open

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._text.n_samplers -= 1


class _Decoder:
    def push(self, token: int) -> str:
        return f"<{token}>"

    def finish(self) -> str:
        return ""


class SimulatedText:
    """Token 7 is "<7>"; counts the samplers that are open."""

    def __init__(self) -> None:
        self.n_samplers = 0

    def check_tokens(self, tokens: Sequence[int] | npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
        ids = np.asarray(tokens)
        if ids.min() < 0 or ids.max() >= N_VOCAB:
            raise InputError(f"token ids are 0 to {N_VOCAB - 1}")
        return ids.astype(np.int32)

    def is_end(self, token: int) -> bool:
        return token == END

    def sampler(self, config: SamplerConfig) -> _Sampler:
        self.n_samplers += 1
        return _Sampler(self)

    def decoder(self, shown: frozenset[int] = frozenset()) -> _Decoder:
        return _Decoder()
