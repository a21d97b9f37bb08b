"""`GgmlExecutor`: turns a batch into logits, or into hidden states.

Owns the cell cache, the graphs and the order of a step: declare, move, place, grow, fill, compute, commit. Everything
that touches ggml runs on the caller's thread; callers on several threads take turns. Knows no sampling and no text.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import (
    CacheError,
    ExecutorError,
    InputError,
    OptionError,
    PositionError,
    UnknownSequenceError,
)
from ggml_engine.executor.admission import accepts_embeddings, check_batch, check_positions
from ggml_engine.executor.attention_plan import AttentionPlan
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.best_rows import BestKey
from ggml_engine.executor.cell_image import CellImageReader, CellImageWriter
from ggml_engine.executor.compaction import Compaction
from ggml_engine.executor.graph_cache import GraphCache, ReadyGraph
from ggml_engine.executor.image import KvImage
from ggml_engine.executor.inputs import GraphKey
from ggml_engine.executor.options import DETERMINISTIC_ROW_TILE, ExecutorOptions
from ggml_engine.executor.outputs import Outputs, check_needs
from ggml_engine.executor.placed_step import Asked, PlacedStep
from ggml_engine.executor.prepared import PreparedInput
from ggml_engine.executor.protocol import Executor
from ggml_engine.executor.result_rows import ResultRows
from ggml_engine.executor.step_graphs import StepGraphs
from ggml_engine.executor.turn import Turn
from ggml_engine.ggml.abort import AbortFlag
from ggml_engine.ggml.candidates import RowNeed
from ggml_engine.models.adapter import Adapter
from ggml_engine.models.adapter_set import NO_ADAPTERS, AdapterSet
from ggml_engine.models.attention import AttentionForm
from ggml_engine.models.model import Model
from ggml_engine.pool.cells import CellCache
from ggml_engine.pool.next_token import NextToken
from ggml_engine.pool.pool_rows import PoolRows
from ggml_engine.pool.registry import CacheConfig, ClonesAnywhere, build_cache
from ggml_engine.pool.step import Placement

_LOGITS = Asked()


class GgmlExecutor(Executor):
    """Runs a model's steps over a cell cache."""

    def __init__(
        self, model: Model, options: ExecutorOptions | None = None, adapters: AdapterSet = NO_ADAPTERS
    ) -> None:
        self.options = options or ExecutorOptions()
        self.model = model
        if self.options.deterministic and not model.threads.are_same:
            raise OptionError(
                f"deterministic mode computes all steps with one number of threads, the model was loaded with "
                f"{model.threads.decode} threads and threads_batch {model.threads.prefill}"
            )
        if self.options.deterministic and model.prefill is not None:
            raise OptionError(
                "deterministic mode takes one layout of weights for steps of all lengths: it cannot go with "
                f"prefill_weights {model.prefill.layout!r}"
            )
        self._adapters = self._checked(adapters)
        self._adapters_of: dict[int, AdapterSet] = {}  # by sequence, of those that have some
        self.attention = AttentionPlan(model, self.options)
        self.form = self.attention.form  # of all steps; in auto the usual one over this layout
        self._kv_format = self.attention.kv_format
        self._reading = self.attention.reading
        self.cache = build_cache(
            self.options.cache_kind,
            CacheConfig(
                model.libraries,
                model.hp.kv_layers(),
                [model.layer_backends[il] for il in model.hp.kv_owners()],
                self.options.capacity,
                self._kv_format,
                self.options.run,
                self.options.read_block,
                self.attention.read_kind,
            ),
        )
        self._row_tile = DETERMINISTIC_ROW_TILE if self.options.deterministic else 1
        join = self.attention.joins
        self._compacts = self.options.compact and self.attention.has_masks  # pieces cost the kernel nothing
        self._compaction = Compaction(self.cache, model.backends, self._make_room, join=join)
        self._abort = AbortFlag(model.libraries)
        graphs = StepGraphs(
            model,
            self.cache,
            self._abort,
            join=join,
            reading=self._reading,
            is_deterministic=self.options.deterministic,
        )
        self.graphs = GraphCache(graphs.build, self.options.max_graphs, self.options.max_graph_bytes)
        on_device = model.n_offloaded > 0  # the output goes there first
        self._finds_in_graph = self.options.candidates == "graph" or (self.options.candidates == "auto" and on_device)
        self._current: ReadyGraph | None = None  # whose result is that of the newest step
        self._last: PlacedStep | None = None  # to be moved on by the next token
        self._moves_on = not self.attention.has_masks  # where all that changes is told by plans
        self._n_steps = 0
        self._result_rows = ResultRows(model.libraries, model.hp.n_vocab)
        self._rows = PoolRows(self.cache.pool, self._make_room)
        self.n_forwarded = 0
        self.n_rows_read = 0
        self.n_cells_peak = 0
        self._turn = Turn(self._close)

    # ---- limits

    @cached_property
    def capacity(self) -> int:
        """How many cells there are."""
        return self.cache.capacity

    @cached_property
    def max_positions(self) -> int:
        """The most positions of one sequence: all cells, or what the model has positions for."""
        return min(self.capacity, self.model.hp.max_positions or self.capacity)

    @property
    def free_cells(self) -> int:
        """How many cells no sequence owns."""
        return self.cache.free_cells

    @property
    def run(self) -> int:
        """How many cells a run has."""
        return self.cache.run

    @cached_property
    def max_batch_tokens(self) -> int:
        """The most tokens of one forward."""
        return self.options.max_batch_tokens

    @cached_property
    def n_vocab(self) -> int:
        """The width of a row of logits."""
        return self.model.hp.n_vocab

    # ---- what K/V is

    @cached_property
    def fingerprint(self) -> str:
        """64 hexadecimal digits that name the model and what of its execution K/V and logits depend on.

        The number of threads and the batches are not covered: outside of deterministic mode logits round by these, too.
        Made at the first use, when the model's file must be open (ClosedError).
        """
        o = self.options
        kinds = [backend.device.kind for backend in self.model.layer_backends]
        is_long = 0 < self.model.hp.n_ctx_long < self.capacity  # other factors of rotation
        # what auto takes may change with what was measured; it changes K and V by their last digits only
        stored: object = self._kv_format
        if self.attention.table is not None:
            stored = (self._kv_format.k_type, self._kv_format.v_type, o.v_layout, self.bytes_per_cell)
        form = self.form if self.attention.table is None else o.attention
        how = (form, stored, o.deterministic, o.run, o.read_block, o.cache_kind, kinds, is_long)
        name = f"{self.model.fingerprint}\n{how!r}\n"
        if (prefill := self.model.prefill) is not None:
            name += f"{prefill.layout} from {prefill.min_tokens} tokens on\n"
        import hashlib  # noqa: PLC0415  # it loads OpenSSL, and a start needs none

        return hashlib.sha256(name.encode()).hexdigest()

    @property
    def description(self) -> Mapping[str, str]:
        """Model, K/V types and what else of the execution K/V depends on, for people."""
        o = self.options
        name = self.model.file.metadata.get("general.name", "")
        return {
            "model": name if isinstance(name, str) else "",
            "architecture": self.model.hp.architecture,
            "k_type": o.k_type,
            "v_type": o.v_type,
            "v_layout": self._kv_format.v_layout if self.attention.table is None else o.v_layout,
            "attention": self.form.value if self.attention.table is None else "auto",
            "cache_kind": o.cache_kind,
            "run": str(o.run),
            "deterministic": str(o.deterministic).lower(),
            "prefill_weights": "off" if self.model.prefill is None else self.model.prefill.layout,
            "devices": ", ".join(sorted({backend.device.kind for backend in self.model.layer_backends})),
        }

    @property
    def bytes_per_cell(self) -> int:
        """Bytes that the K/V of a cell takes in all layers."""
        return self.cache.pool.bytes_per_cell

    def count_cells(self, sequences: Iterable[int]) -> int:
        """How many distinct cells these sequences own. Raises UnknownSequenceError."""
        with self._turn:
            return self.cache.count_cells(sequences)

    # ---- sequences

    @property
    def adapters(self) -> AdapterSet:
        """What a sequence is opened with where nothing else is asked for."""
        return self._adapters

    def open(self, adapters: AdapterSet | None = None) -> int:
        """A new, empty sequence, computed with these adapters (None: `self.adapters`), and so are its clones.

        Raises OptionError for adapters of another model, or that were freed.
        """
        with self._turn:
            wanted = self._checked(self._adapters if adapters is None else adapters)
            sequence = self.cache.open()
            self._adapt(sequence, wanted)
            return sequence

    def _checked(self, adapters: AdapterSet) -> AdapterSet:
        for adapter, scale in adapters.scaled:
            if not isinstance(adapter, Adapter) or adapter.model is not self.model:
                raise OptionError(f"{adapter!r} was loaded for another model")
            if adapter.is_closed:
                raise OptionError(f"{adapter!r} cannot be used any more")
            adapter.check_scale(scale)
        return adapters

    def _adapt(self, sequence: int, adapters: AdapterSet) -> None:
        if adapters.scaled:
            self._adapters_of[sequence] = adapters

    def drop_adapter(self, adapter: Adapter) -> None:
        """Free an adapter and the graphs over it; idempotent.

        Raises OptionError, with nothing freed, while sequences are open that use it, or new ones would.
        """
        with self._turn:
            n_users = sum(adapter in adapters.adapters for adapters in self._adapters_of.values())
            if n_users or adapter in self._adapters.adapters:
                what = f"{n_users} open sequences use" if n_users else "new sequences are opened with"
                raise OptionError(f"{what} {adapter!r}")
            self._current = self._last = None
            self.graphs.drop(lambda key: adapter in key.adapters)
            adapter.free()

    def close(self, sequence: int) -> None:
        """Drop a sequence; cells that nobody else owns are free again."""
        with self._turn:
            self._close(sequence)

    def _close(self, sequence: int) -> None:
        self.cache.close(sequence)
        self._adapters_of.pop(sequence, None)
        self._compaction.forget(sequence)

    def close_later(self, sequence: int) -> None:
        """Drop a sequence before the next call; takes no turn, so that a finalizer may call it."""
        self._turn.to_close.append(sequence)

    @property
    def clones_anywhere(self) -> bool:
        """Whether a sequence can be cloned at each of its positions: as the cache says."""
        return isinstance(self.cache, ClonesAnywhere) and self.cache.clones_anywhere

    def clone(self, source: int, upto: int) -> int | None:
        """A new sequence that shares the first `upto` positions of `source`; nothing is copied.

        None where the cache has no room for it, or no clones. Raises UnknownSequenceError and PositionError.
        """
        with self._turn:
            try:
                sequence = self.cache.clone(source, upto)
            except (UnknownSequenceError, PositionError):
                raise
            except CacheError:
                return None
            self._adapt(sequence, self._adapters_of.get(source, NO_ADAPTERS))
            return sequence

    def rewind(self, sequence: int, to: int) -> None:
        """Drop what a sequence holds from position `to` on."""
        with self._turn:
            self.cache.rewind(sequence, to)
            self._compaction.forget(sequence)

    def length(self, sequence: int) -> int:
        """Committed positions of a sequence."""
        with self._turn:
            return self.cache.length(sequence)

    # ---- K/V outside of the executor

    def read_image(self, parts: Sequence[tuple[int, int]]) -> CellImageReader | None:
        """What reads the K/V of sequences, each up to a position; None where the kind of cache is not made of cells.

        Raises UnknownSequenceError and PositionError.
        """
        with self._turn:
            if not isinstance(self.cache, CellCache):
                return None
            return CellImageReader(self.cache, self._rows, self._turn, parts)

    def write_image(self, image: KvImage) -> CellImageWriter | None:
        """What opens sequences and brings their K/V in; None where the kind of cache is not made of cells.

        Raises InputError for an image of others, PoolFullError, other kinds of CacheError for sequences that cannot be
        opened, and AllocationError; then nothing has changed.
        """
        with self._turn:
            if not isinstance(self.cache, CellCache):
                return None
            return CellImageWriter(self.cache, self._rows, self._turn, image)

    # ---- steps

    def accepts(self, prepared: PreparedInput) -> bool:
        """Whether it is embeddings of this model's width, made for this model or for any."""
        return accepts_embeddings(prepared, self.model.hp.n_embd, lambda: self.model.fingerprint)

    def abort(self) -> None:
        """Let the running forward end soon with AbortedError, and those that begin before `clear_abort`.

        Takes no turn. Stops between two nodes that the CPU computes, and nothing on devices that do not ask.
        """
        self._abort.set()

    def clear_abort(self) -> None:
        """Let forwards run again."""
        self._abort.clear()

    def forward(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Compute one step: logits f32 [outputs, n_vocab], in batch order.

        Raises InputError for unusable tokens and prepared inputs, and for sequences of different adapters,
        ContextLengthError for positions that the model does not have, and the kinds of CacheError for a step that
        cannot be, with nothing changed; ComputeError, and AbortedError after `abort`, leave the step's cells claimed
        until its sequences are rewound or closed. ClosedError after `close_all`.
        """
        with self._turn:
            return self._forward(batch, _LOGITS, self.n_vocab)

    def forward_outputs(self, batch: Batch, needs: Sequence[RowNeed]) -> Outputs:
        """As `forward`, with no more of each output than is needed: `needs` has one for each, in batch order.

        On devices candidates are found in the graph, elsewhere in the memory where rows were computed. A whole row can
        be asked for later, until the next forward (ExecutorError), and until graphs are dropped.
        """
        check_needs(needs, batch.n_outputs, self.n_vocab)
        with self._turn:
            asked = Asked(best=BestKey.of(needs)) if self._finds_in_graph else _LOGITS
            step = self._compute(batch, asked)
            found = self._result_rows.needed(step.ready, needs, partial(self._row_of_step, self._n_steps))
            self._commit(step, batch)
            return found

    def forward_hidden(self, batch: Batch) -> npt.NDArray[np.float32]:
        """As `forward`, with what the output weight would be multiplied with in place of logits: f32 [outputs, n_embd].

        The last layer's result after the final norm.
        """
        with self._turn:
            return self._forward(batch, Asked(gives_hidden=True), self.model.hp.n_embd)

    def _forward(self, batch: Batch, asked: Asked, width: int) -> npt.NDArray[np.float32]:
        step = self._compute(batch, asked)
        rows = self._result_rows.read(step.ready, (batch.n_outputs, width))
        self._commit(step, batch)
        return rows

    def _compute(self, batch: Batch, asked: Asked) -> PlacedStep:
        """A step whose graph has its results, to be committed when they were read."""
        last, self._last, self._current = self._last, None, None
        check_batch(self, batch, self.model.hp.n_embd)
        moves_on = last is not None and last.moves_on(batch, asked, self.cache.pool.rows, self.model.hp.max_positions)
        step = last if last is not None and moves_on else self._place(batch, asked)
        step.ready.inputs.fill(batch, step.place, step.adapters, step.plans)
        step.ready.graph.compute()
        self._n_steps += 1
        self._current = step.ready
        return step

    def _commit(self, step: PlacedStep, batch: Batch) -> None:
        place = step.place
        place.commit()
        self.n_forwarded += batch.n_tokens
        self.n_rows_read += place.n_rows
        self.n_cells_peak = max(self.n_cells_peak, self.cache.used_cells)
        if isinstance(place, NextToken):
            self.graphs.n_reused += 1
            self._last = step
        else:
            self._last = self._kept(step, place, batch)
            if self._compacts and not step.plans:
                self._compaction.note(place)

    def _kept(self, step: PlacedStep, place: Placement, batch: Batch) -> PlacedStep | None:
        """A committed step as it is kept for the next one, where it may be moved on to that."""
        if not self._moves_on or not isinstance(self.cache, CellCache):
            return None
        if batch.prepared or not batch.n_tokens == batch.n_outputs == 1:
            return None
        return replace(step, place=self.cache.next_token(place, step.plans))

    def _place(self, batch: Batch, asked: Asked) -> PlacedStep:
        """Admit a step, give it its cells, and find or build its graph."""
        step = self.cache.declare(batch.sequences)
        check_positions(step.positions, self.model.hp.max_positions, self.model.hp.architecture)
        adapters = self._adapters_in(batch)
        positions = step.positions if batch.positions is None else batch.positions
        if self._compacts and (positions is step.positions or np.array_equal(positions, step.positions)):
            # a step that is refused changes nothing
            self._compaction.before(step)
        placement = step.place(positions)
        self._make_room(placement.extent)
        # checked where the sequences were opened
        active = () if adapters is NO_ADAPTERS else cast("tuple[Adapter, ...]", adapters.adapters)
        form = self.attention.form_of(batch.n_tokens, placement.rows_read)
        reading = self._reading if form is AttentionForm.CELLS else None
        plans = () if reading is None else reading.plans(placement)
        key = GraphKey.of(
            batch, placement, self._row_tile, active, gives_hidden=asked.gives_hidden, plans=plans, form=form
        )
        ready = self.graphs.get(key if asked.best is None else key._replace(best=asked.best))
        return PlacedStep(placement, plans, ready, adapters, asked)

    def _adapters_in(self, batch: Batch) -> AdapterSet:
        """The adapters of all its sequences. Raises InputError where they are not the same."""
        if not self._adapters_of:
            return NO_ADAPTERS
        found = {self._adapters_of.get(sequence, NO_ADAPTERS) for sequence in set(batch.sequences.tolist())}
        if len(found) > 1:
            raise InputError(
                f"the sequences of a step have the same adapters, here they have {len(found)} sets of them"
            )
        return found.pop()

    def make_room(self) -> None:
        """Take the storage that a first step would take where cells are read by plans, while there is time to spare."""
        with self._turn:
            self._make_room(1)

    def _make_room(self, extent: int) -> None:
        if self._reading is not None:  # its reads end anywhere, and growing row by row would drop graphs each time
            block = self.options.read_block
            extent = min(-(-extent // block) * block, self.cache.capacity)
        if self.cache.pool.must_grow(extent):
            self._current = self._last = None
            self.graphs.clear()
            self.cache.pool.grow(extent)

    def _row_of_step(self, n_steps: int, row: int) -> npt.NDArray[np.float32]:
        with self._turn:
            if self._current is None or self._n_steps != n_steps:
                raise ExecutorError("a row of logits is asked for after what came next has taken its place")
            return self._result_rows.row(self._current, row)

    # ---- what can wait

    def want_idle_work(self) -> None:
        """Let `do_idle_work` measure attention where that was never done here, also without `calibrate`."""
        with self._turn:
            self.attention.want_times()

    def do_idle_work(self) -> bool:
        """A slice of measuring attention, where that was asked for and never done here; whether there is more."""
        with self._turn:
            return self.attention.measure_some()

    def stats(self) -> dict[str, Any]:
        """Counters since the start: tokens forwarded, rows read, cells moved, graphs, cells now and at most, bytes.

        "result_bytes" are those of logits, candidates and hidden states that came out of graphs into Python.
        """
        return {
            "tokens_forwarded": self.n_forwarded,
            "rows_read": self.n_rows_read,
            "result_bytes": self._result_rows.n_bytes,
            "moves": self._compaction.n_moves,
            "moves_failed": self._compaction.n_failed,
            "cells_moved": self._compaction.n_cells,
            "bytes_moved": self._compaction.n_bytes,
            "graphs_built": self.graphs.n_built,
            "graphs_reused": self.graphs.n_reused,
            "cells_used": self.cache.used_cells,
            "cells_peak": self.n_cells_peak,
            "cells_capacity": self.cache.capacity,
            "kv_bytes": self.cache.pool.n_bytes,
            "kv_capacity_bytes": self.cache.capacity * self.cache.pool.bytes_per_cell,
            "graph_bytes": self.graphs.working_bytes,
            "prefill_weight_bytes": 0 if self.model.prefill is None else self.model.prefill.n_bytes,
        }

    def memory(self, snapshots: Iterable[int] = ()) -> dict[str, int]:
        """Bytes of K/V by class of owner; a shared cell counts once, as live when a live sequence holds it.

        "live" are the cells of open sequences that are not in `snapshots`, "snapshot" those that only snapshots hold,
        "free" those that are stored and held by nobody; "storage" is what the pool takes now, the sum of the three
        unless a step's storage could not be had. Raises UnknownSequenceError.
        """
        with self._turn:
            parked = list(snapshots)
            self.cache.count_cells(parked)  # refuses ids that are not open
            n_live = self.cache.count_cells(set(self.cache.open_sequences) - set(parked))
            n_owned = self.cache.used_cells
            n_bytes = self.cache.pool.bytes_per_cell
            return {
                "live": n_live * n_bytes,
                "snapshot": (n_owned - n_live) * n_bytes,
                "free": max(0, self.cache.pool.rows - n_owned) * n_bytes,
                "storage": self.cache.pool.n_bytes,
            }

    def close_all(self) -> None:
        """Free graphs and pool; idempotent. Waits for a running step. The model stays."""
        with self._turn.lock:
            self._turn.is_closed = True
            self._current = self._last = None
            self.attention.free()
            self.graphs.clear()
            self.cache.free()
