"""An executor without a model: the likeliest next token is a hash of everything that a sequence's cells hold.

Cells are accounted for by the real `CellCache`, and the hash reads what was written into the cells that a sequence owns:
a lost, doubled or foreign token shows in all that follows. `FakeExecutor.expected` says in plain Python what must come.
Gates hold a call inside the executor, faults break one, and `calls` and `forwards` record what was asked.
"""

from __future__ import annotations

import hashlib
import struct
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from cell_executor import CellExecutor

from ggml_engine.errors import AbortedError, UnknownSequenceError
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.cell_image import CellImageReader, CellImageWriter
from ggml_engine.executor.image import KvImage, Rows
from ggml_engine.executor.prepared import Kind, PreparedInput, PreparedSlice
from ggml_engine.models.adapter_set import NO_ADAPTERS, AdapterSet
from ggml_engine.pool.cells import CellCache
from ggml_engine.pool.step import Placement

WAIT_S = 10.0  # no wait of a test takes longer; what is waited for comes at once
TOP_LOGIT = 8.0
BYTES_PER_CELL = 100

Logits = npt.NDArray[np.float32]
Entry = int | PreparedInput  # of a history: a token, or an input with all its positions
Fault = BaseException | Callable[[Logits], object] | int


# ---- the model: plain functions of a history


def opaque_key(prepared: PreparedInput, index: int) -> int:
    """What a cell holds for a position of a prepared input; never equal to a token."""
    digest = hashlib.blake2b(prepared.content_hash() + struct.pack("<q", index), digest_size=7).digest()
    return (1 << 60) | int.from_bytes(digest, "little")


def keys_of(history: Sequence[Entry]) -> list[int]:
    """One integer for every position of a history."""
    keys: list[int] = []
    for entry in history:
        if isinstance(entry, PreparedInput):
            keys += [opaque_key(entry, index) for index in range(entry.size())]
        else:
            keys.append(int(entry))
    return keys


def adapter_keys(adapters: AdapterSet) -> list[int]:
    """What stands before the keys of a sequence that has adapters."""
    if not adapters.scaled:
        return []
    digest = hashlib.blake2b(adapters.fingerprint_over("").encode(), digest_size=7).digest()
    return [(1 << 61) | int.from_bytes(digest, "little")]


def next_token(keys: Sequence[int], n_vocab: int) -> int:
    """The likeliest token after these keys."""
    return _token_of(hashlib.blake2b(struct.pack(f"<{len(keys)}q", *keys), digest_size=8).digest(), n_vocab)


def logits_after(keys: Sequence[int], n_vocab: int) -> Logits:
    """The row of logits after these keys, f32 [n_vocab]."""
    return _row_of(hashlib.blake2b(struct.pack(f"<{len(keys)}q", *keys), digest_size=8).digest(), n_vocab)


def continuation(history: Sequence[Entry], n: int, n_vocab: int, adapters: AdapterSet = NO_ADAPTERS) -> list[int]:
    """The `n` tokens that greedy sampling without penalties appends to a history."""
    keys, found = [*adapter_keys(adapters), *keys_of(history)], []
    for _ in range(n):
        found.append(next_token(keys, n_vocab))
        keys.append(found[-1])
    return found


def _token_of(digest: bytes, n_vocab: int) -> int:
    return int.from_bytes(digest, "little") % n_vocab


def _row_of(digest: bytes, n_vocab: int) -> Logits:
    seed = np.uint64(int.from_bytes(digest, "little") | 1)
    scattered = (np.arange(1, n_vocab + 1, dtype=np.uint64) * seed) ^ (seed >> np.uint64(7))
    row = ((scattered >> np.uint64(20)) % np.uint64(4096)).astype(np.float32) / 1024  # 0 to 4
    row[_token_of(digest, n_vocab)] = TOP_LOGIT
    return row


# ---- gates


class Gate:
    """Holds calls inside the executor from the moment when it is closed until it is released."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._lets_through: int | None = None  # None: open
        self._n_waiting = 0
        self.n_held = 0

    def close(self, after: int = 0) -> None:
        """Hold every call from now on, but for the next `after` ones."""
        with self._changed:
            self._lets_through = after

    def release(self) -> None:
        """Let everything through."""
        with self._changed:
            self._lets_through = None
            self._changed.notify_all()

    def release_one(self, n: int = 1) -> None:
        """Let the held call and no later one through; `n` of them, one after the other."""
        with self._changed:
            assert self._lets_through is not None, f"the gate of {self._name} is open"
            self._lets_through += n
            self._changed.notify_all()

    def wait_held(self) -> None:
        """Until a call is held."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._n_waiting > 0, WAIT_S), f"no {self._name} came to the gate"

    def step(self) -> None:
        """Let the held call through, and wait until the next one is held."""
        with self._changed:
            assert self._lets_through == 0, f"the gate of {self._name} is open"
            n_before = self.n_held
            self._lets_through = 1
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: self.n_held > n_before, WAIT_S), f"no {self._name} came to the gate"

    def interrupt(self) -> None:
        """Let a held call ask `is_aborted` again."""
        with self._changed:
            self._changed.notify_all()

    def enter(self, is_aborted: Callable[[], bool] = lambda: False) -> None:
        """The executor's side: pass, or wait; True of `is_aborted` ends the wait."""
        with self._changed:
            if self._lets_through is None:
                return
            if not self._lets_through:
                self.n_held += 1
                self._n_waiting += 1
                self._changed.notify_all()
                try:
                    while self._lets_through == 0 and not is_aborted():
                        self._changed.wait()
                finally:
                    self._n_waiting -= 1
                    self._changed.notify_all()
            if self._lets_through:
                self._lets_through -= 1


# ---- records


@dataclass(frozen=True, slots=True)
class Call:
    """A call of the executor."""

    name: str  # open, close, clone, rewind, forward
    thread_id: int
    in_forward: bool  # whether a forward was running
    n_forwards: int  # forwards that had begun before it
    arguments: tuple[int, ...] = ()
    result: int | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """The rows of one sequence in a forward: positions [start, stop)."""

    sequence: int
    start: int
    stop: int
    tokens: tuple[int, ...]
    prepared: PreparedSlice | None = None
    n_outputs: int = 0


@dataclass(slots=True)
class Forward:
    """A forward that was asked for."""

    chunks: tuple[Chunk, ...]
    outcome: str = "running"  # done, failed, aborted, refused

    def chunk_of(self, sequence: int) -> Chunk | None:
        """What it computed of a sequence."""
        return next((chunk for chunk in self.chunks if chunk.sequence == sequence), None)


@dataclass(slots=True)
class _Faults:
    """What breaks, by the number of the call from now on (0 is the next)."""

    faults: dict[int, Fault] = field(default_factory=dict)
    n_calls: int = 0

    def add(self, at: int, fault: Fault) -> None:
        self.faults[self.n_calls + at] = fault

    def next(self) -> Fault | None:
        self.n_calls += 1
        return self.faults.pop(self.n_calls - 1, None)


class FakeExecutor(CellExecutor):
    """See the module.

    `run` 1 makes every free cell usable by every position, so that tests can count cells; 64 is the real layout. `ring`
    is the window of a layout that forgets: a clone is refused when positions of its last `ring` ones were overwritten.
    `kinds` are the prepared inputs that it accepts, those made for another fingerprint apart. `ignores_abort` is an
    executor that hangs. `clones` False is one that cannot clone, `images` False one that gives no K/V out; an image
    has `row_bytes` for each cell, its key and zeros.
    """

    def __init__(
        self,
        capacity: int = 1024,
        *,
        n_vocab: int = 97,
        max_batch_tokens: int = 64,
        run: int = 1,
        ring: int | None = None,
        kinds: Sequence[Kind] = (),
        fingerprint: str = "fake",
        ignores_abort: bool = False,
        clones: bool = True,
        row_bytes: int = 8,
        images: bool = True,
    ) -> None:
        super().__init__(CellCache(capacity, run=run), max_batch_tokens, n_vocab)
        self._ring = ring
        self._kinds = tuple(kinds)
        self._fingerprint = fingerprint
        self._ignores_abort = ignores_abort
        self._clones = clones
        self._images = images
        self.rows = FakeRows(self, row_bytes)
        self._keys = np.full(self.cache.capacity, -(1 << 62), np.int64)  # what every cell holds
        self._written: dict[int, int] = {}  # sequence -> one past the highest position ever written, for the ring
        self.adapters_of: dict[int, AdapterSet] = defaultdict(lambda: NO_ADAPTERS)  # sequences of images have none
        self._extra: dict[int, int] = defaultdict(int)  # cells beyond those that were asked for
        self._abort = threading.Event()
        self._busy = threading.Lock()
        self._in_forward = False

        self.forward_gate = Gate("forward")  # after placement, where the real one computes
        self.clone_gate = Gate("clone")
        self.open_gate = Gate("open")
        self.forward_faults = _Faults()
        self.clone_faults = _Faults()
        self.open_faults = _Faults()
        self.rewind_faults = _Faults()
        self.overruns = False  # every forward writes one cell more for each of its sequences than it says

        self.calls: list[Call] = []
        self.forwards: list[Forward] = []
        self.on_forward: Callable[[Forward], None] | None = None
        self.n_accepts = 0
        self.n_aborts = 0
        self.n_opened = 0
        self.n_closed = 0
        self.issued: list[int] = []
        self.violations: list[str] = []

    # ---- for tests

    def expected(self, history: Sequence[Entry], n: int, adapters: AdapterSet = NO_ADAPTERS) -> list[int]:
        """The greedy continuation of a history."""
        return continuation(history, n, self._n_vocab, adapters)

    @contextmanager
    def holding_forward(self, after: int = 0) -> Iterator[Gate]:
        """Hold forwards inside; the gate must have held one (contract R95), and is released at the end."""
        with _holding(self.forward_gate, after) as gate:
            yield gate

    @contextmanager
    def holding_clone(self, after: int = 0) -> Iterator[Gate]:
        """Hold clones inside, as `holding_forward`."""
        with _holding(self.clone_gate, after) as gate:
            yield gate

    def fail_forward(self, fault: Fault, at: int = 0) -> None:
        """Break a forward: raise `fault` after placement, or return what `fault(logits)` makes of the rows."""
        self.forward_faults.add(at, fault)

    def fail_clone(self, fault: BaseException | int, at: int = 0) -> None:
        """Break a clone: raise `fault`, or return a sequence that is so many positions longer than was asked for."""
        self.clone_faults.add(at, fault)

    @property
    def n_forwards(self) -> int:
        """Forwards that have begun."""
        return len(self.forwards)

    def calls_of(self, name: str) -> list[Call]:
        """The calls of one method, in order."""
        return [call for call in self.calls if call.name == name]

    def chunks_of(self, sequence: int) -> list[Chunk]:
        """What was computed of a sequence, in order; forwards that did not end well apart."""
        done = [forward for forward in self.forwards if forward.outcome == "done"]
        return [chunk for forward in done for chunk in forward.chunks if chunk.sequence == sequence]

    def keys(self, sequence: int) -> list[int]:
        """What the cells of a sequence hold, in position order."""
        return [int(key) for key in self._keys[self.cache.cells_of(sequence)]]

    def check_balance(self) -> None:
        """What was opened is closed, every cell is free, and nobody called from two threads at once (contract R100)."""
        assert not self.violations, self.violations
        assert self.n_opened == self.n_closed, f"{self.n_opened} sequences opened, {self.n_closed} closed"
        assert self.cache.free_cells + self.cache.used_cells == self.cache.capacity
        assert self.cache.used_cells == 0, f"{self.cache.used_cells} cells are still owned"
        assert len(set(self.issued)) == len(self.issued), "a sequence id was issued twice"

    # ---- limits

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def bytes_per_cell(self) -> int:
        return BYTES_PER_CELL

    def count_cells(self, sequences: Iterable[int]) -> int:
        with self._call("count_cells"):
            return self.cache.count_cells(sequences)

    # ---- sequences

    def open(self, adapters: AdapterSet | None = None) -> int:
        with self._call("open") as done:
            self.open_gate.enter()
            _raise(self.open_faults.next())
            sequence = done(self._opened(self.cache.open()))
            self.adapters_of[sequence] = self.adapters if adapters is None else adapters
            return sequence

    def close(self, sequence: int) -> None:
        with self._call("close", sequence):
            self.cache.close(sequence)
            self._written.pop(sequence, None)
            self._extra.pop(sequence, None)
            self.n_closed += 1

    def rewind(self, sequence: int, to: int) -> None:
        with self._call("rewind", sequence, to):
            _raise(self.rewind_faults.next())
            if to > self.length_now(sequence):
                self.violations.append(f"rewind of {sequence} to {to}, it has {self.length_now(sequence)}")
            self.cache.rewind(sequence, to)
            self._extra[sequence] = 0

    def length(self, sequence: int) -> int:
        with self._call("length", sequence):
            return self.length_now(sequence)

    def length_now(self, sequence: int) -> int:
        """`length` for a test: recorded nowhere."""
        return self.cache.length(sequence) - self._extra.get(sequence, 0)

    @property
    def clones_anywhere(self) -> bool:
        return self._clones and self._ring is None

    def clone(self, source: int, upto: int) -> int | None:
        with self._call("clone", source, upto) as done:
            self.clone_gate.enter()
            fault = self.clone_faults.next()
            _raise(fault)
            if not self._clones or not self._holds_window(source, upto):
                return None
            if isinstance(fault, int):
                upto += fault
            child = self._opened(self.cache.clone(source, upto))
            self.adapters_of[child] = self.adapters_of[source]
            self._written[child] = upto
            return done(child)

    def _opened(self, sequence: int) -> int:
        self.n_opened += 1
        self.issued.append(sequence)
        self._written[sequence] = 0
        return sequence

    def _holds_window(self, sequence: int, upto: int) -> bool:
        if self._ring is None:
            return True
        return max(0, upto - self._ring) >= self._written.get(sequence, 0) - self._ring

    # ---- images

    @property
    def description(self) -> Mapping[str, str]:
        return {"model": "fake", "fingerprint": self._fingerprint}

    def read_image(self, parts: Sequence[tuple[int, int]]) -> CellImageReader | None:
        with self._call("read_image"):
            return CellImageReader(self.cache, self.rows, self._turn("read"), parts) if self._images else None

    def write_image(self, image: KvImage) -> _FakeWriter | None:
        with self._call("write_image"):
            return _FakeWriter(self, image, self._turn("write")) if self._images else None

    def _turn(self, name: str) -> _FakeTurn:
        return _FakeTurn(self, name)

    # ---- steps

    def accepts(self, prepared: PreparedInput) -> bool:
        self.n_accepts += 1
        return prepared.kind in self._kinds and getattr(prepared, "fingerprint", "") in ("", self._fingerprint)

    def forward(self, batch: Batch) -> Logits:
        with self._call("forward"):
            self._in_forward = True
            try:
                return self._forward(batch)
            finally:
                self._in_forward = False

    def _forward(self, batch: Batch) -> Logits:
        record = Forward(self._chunks(batch))
        self.forwards.append(record)
        if self.on_forward is not None:
            self.on_forward(record)
        fault = self.forward_faults.next()
        try:
            if not 0 < batch.n_tokens <= self._max_batch_tokens:
                self.violations.append(f"a forward of {batch.n_tokens} tokens")
            if len({self.adapters_of[sequence] for sequence in batch.sequences.tolist()}) > 1:
                self.violations.append("a forward of sequences with different adapters")
            for sequence, extra in self._extra.items():
                if extra:
                    self.cache.rewind(sequence, self.length_now(sequence))
                    self._extra[sequence] = 0
            step = self.cache.declare(batch.sequences)
            placement = step.place(step.positions if batch.positions is None else batch.positions)
        except Exception:
            record.outcome = "refused"
            raise
        self._write(batch, placement)
        self.forward_gate.enter(self._is_aborted)
        if self._is_aborted():
            record.outcome = "aborted"
            raise AbortedError("the forward was told to stop")
        record.outcome = "failed"
        _raise(fault)
        logits = self._logits(batch, placement)
        placement.commit()
        if self.overruns:
            self._overrun(sorted(set(batch.sequences.tolist())))
        returned: Any = fault(logits) if callable(fault) else logits
        record.outcome = "done" if returned is logits else "failed"
        return returned  # type: ignore[no-any-return]

    def _chunks(self, batch: Batch) -> tuple[Chunk, ...]:
        slices: tuple[PreparedSlice, ...] = tuple(getattr(batch, "prepared", ()))
        found = []
        for sequence in dict.fromkeys(batch.sequences.tolist()):
            rows = np.flatnonzero(batch.sequences == sequence)
            try:
                start = self.length_now(sequence)
            except UnknownSequenceError:
                start = 0
            prepared = next((each for each in slices if each.row in rows), None)
            tokens = tuple(batch.tokens[rows].tolist())
            n_outputs = int(np.count_nonzero(batch.wants_logits[rows]))
            found.append(Chunk(sequence, start, start + rows.size, tokens, prepared, n_outputs))
        return tuple(found)

    def _write(self, batch: Batch, placement: Placement) -> None:
        keys = batch.tokens.astype(np.int64)
        for piece in getattr(batch, "prepared", ()):
            n = piece.stop - piece.start
            keys[piece.row : piece.row + n] = [opaque_key(piece.source, i) for i in range(piece.start, piece.stop)]
        self._keys[placement.cells] = keys
        for sequence, position in zip(batch.sequences.tolist(), placement.positions.tolist(), strict=True):
            self._written[sequence] = max(self._written[sequence], position + 1)

    def _logits(self, batch: Batch, placement: Placement) -> Logits:
        """Rows in batch order, read from the cells: those that the sequence had, and those of this step before a row."""
        hashers: dict[int, Any] = {}
        rows = []
        for i, sequence in enumerate(batch.sequences.tolist()):
            if sequence not in hashers:
                before = self.cache.cells_of(sequence)[: self.cache.length(sequence)]
                first = np.array(adapter_keys(self.adapters_of[sequence]), "<i8").tobytes()
                hashers[sequence] = hashlib.blake2b(first + self._keys[before].astype("<i8").tobytes(), digest_size=8)
            hashers[sequence].update(struct.pack("<q", int(self._keys[placement.cells[i]])))
            if batch.wants_logits[i]:
                rows.append(_row_of(hashers[sequence].digest(), self._n_vocab))
        return np.array(rows, np.float32).reshape(len(rows), self._n_vocab)

    def _overrun(self, sequences: list[int]) -> None:
        step = self.cache.declare(sequences)
        placement = step.place(step.positions)
        self._keys[placement.cells] = -7
        placement.commit()
        for sequence in sequences:
            self._extra[sequence] += 1

    # ---- aborting

    def _is_aborted(self) -> bool:
        return self._abort.is_set() and not self._ignores_abort

    def abort(self) -> None:
        self.n_aborts += 1
        self._abort.set()
        self.forward_gate.interrupt()

    def clear_abort(self) -> None:
        self._abort.clear()

    # ---- one thread at a time

    @contextmanager
    def _call(self, name: str, *arguments: int) -> Iterator[Callable[[int], int]]:
        results: list[int] = []

        def done(result: int) -> int:
            results.append(result)
            return result

        in_forward, n_forwards = self._in_forward, len(self.forwards)
        if not self._busy.acquire(blocking=False):
            self.violations.append(f"{name} while another call was running")
            raise AssertionError(self.violations[-1])
        try:
            yield done
        finally:
            self._busy.release()
            result = results[0] if results else None
            self.calls.append(Call(name, threading.get_ident(), in_forward, n_forwards, arguments, result))


class _FakeTurn:
    """`with turn:` is a call like any other, each time."""

    def __init__(self, executor: FakeExecutor, name: str) -> None:
        self._executor: FakeExecutor = weakref.proxy(executor)
        self._name = name

    def __enter__(self) -> None:
        self._running = self._executor._call(self._name)
        self._running.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._running.__exit__(*error)


class FakeRows:
    """The rows of a fake executor's cells; `write_fault` breaks the next write."""

    def __init__(self, executor: FakeExecutor, row_bytes: int) -> None:
        self._executor: FakeExecutor = weakref.proxy(executor)
        self.row_bytes = row_bytes
        self.write_fault: BaseException | None = None
        self.parts: list[tuple[str, int, int]] = []  # read or write, rows, forwards that had begun before it

    def make_room(self, extent: int) -> None:
        assert extent <= self._executor.capacity

    def read(self, cells: npt.NDArray[np.int64]) -> Rows:
        self.parts.append(("read", cells.size, self._executor.n_forwards))
        rows = np.zeros((cells.size, self.row_bytes), np.uint8)
        rows[:, :8] = self._executor._keys[cells].astype("<i8")[:, None].view(np.uint8)
        return rows

    def write(self, cells: npt.NDArray[np.int64], rows: Rows) -> None:
        self.parts.append(("write", cells.size, self._executor.n_forwards))
        fault, self.write_fault = self.write_fault, None
        _raise(fault)
        self._executor._keys[cells] = np.ascontiguousarray(rows[:, :8]).view("<i8")[:, 0]


class _FakeWriter(CellImageWriter):
    """Counts the sequences that it opens."""

    def __init__(self, executor: FakeExecutor, image: KvImage, turn: _FakeTurn) -> None:
        self._executor = executor
        super().__init__(executor.cache, executor.rows, turn, image)
        self._opened = [] if self._adoption is None else [executor._opened(each) for each in self._adoption.sequences]
        for sequence, n in zip(self._opened, image.lengths, strict=True):
            executor._written[sequence] = n

    def _drop(self) -> None:
        if self._adoption is not None:
            self._executor.n_closed += len(self._adoption.sequences)
        super()._drop()


@contextmanager
def _holding(gate: Gate, after: int) -> Iterator[Gate]:
    before = gate.n_held
    gate.close(after)
    try:
        yield gate
    finally:
        gate.release()
    assert gate.n_held > before, "the gate held nothing"


def _raise(fault: Fault | None) -> None:
    if isinstance(fault, BaseException):
        raise fault
