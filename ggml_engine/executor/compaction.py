"""When the cells of a sequence are moved together: when that pays for itself.

Owns, for each sequence, what reading it in pieces has cost so far, and the counts of what was moved. A move is made
when that sum has reached its cost, as one buys skis when the rent paid has reached their price (Karlin et al.
1988, "Competitive snoopy caching"): whatever comes next, the two together cost at most twice the better of them.
Does not know: graphs, tensors, which cells move where.
Costs are in bytes: what could be copied in the time. They are coarse; only their ratios matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ggml_engine.errors import NativeError
from ggml_engine.ggml.backends import Backend
from ggml_engine.pool.compaction import Move
from ggml_engine.pool.registry import GgmlCache, MovesCells
from ggml_engine.pool.step import Placement, Step

# Measured on two x86-64 cores, with models of 18 and 30 layers: a further span is 4 nodes in a layer's graph, 9 to 25
# us; a copy of 12 MB takes 4 ms, so that is some 64 KiB. Copying a piece takes as many nodes.
_SPAN_BYTES = 64 << 10
# The step after a move needs another graph: 0.3 ms of building for each layer.
_GRAPH_BYTES = 768 << 10
# Planning, and a scheduler for the copies: 0.3 ms.
_MOVE_BYTES = 1 << 20

# Steps of more tokens for each sequence are prefills: they compute for long, and come seldom.
_FEW_TOKENS = 8


@dataclass(slots=True)
class _Debt:
    """What a sequence's pieces have cost, and the sum at which a move is looked for."""

    paid: float
    due: float


class Compaction:
    """Weighs and makes the moves of one executor.

    `join` says that spans are joined by copying, `make_room` lets the pool hold an extent (or raises NativeError).
    """

    def __init__(
        self, cache: GgmlCache, backends: Sequence[Backend], make_room: Callable[[int], None], *, join: bool
    ) -> None:
        self._cache = cache
        self._mover = cache if isinstance(cache, MovesCells) else None
        self._backends = backends
        self._make_room = make_room
        self._join = join
        self._debts: dict[int, _Debt] = {}
        n_windows = len(set(cache.window_of_layer))
        self._n_layers = [cache.window_of_layer.count(window) for window in range(n_windows)]  # per window
        self._last: tuple[object, list[tuple[int, float]]] = (None, [])
        self.n_moves = 0
        self.n_cells = 0
        self.n_bytes = 0
        self.n_failed = 0

    def forget(self, sequence: int) -> None:
        """Its cells are not what they were: the sum begins anew."""
        self._debts.pop(sequence, None)

    # ---- after a step

    def note(self, placement: Placement) -> None:
        """Adds up what a step, which was computed, has paid for the pieces that it read."""
        if self._mover is None or placement.cells.size > _FEW_TOKENS * len(placement.sequence_ids):
            return
        if all(len(read.spans) == 1 for read in placement.reads):
            return
        key = (placement.sequence_ids, tuple(read.spans for read in placement.reads))
        if key != self._last[0]:  # a decoding batch has the same spans for as long as a block
            self._last = (key, self._costs(placement))
        for sequence, cost in self._last[1]:
            debt = self._debts.setdefault(sequence, _Debt(0, self._fixed_cost(2)))
            debt.paid += cost

    def _costs(self, placement: Placement) -> list[tuple[int, float]]:
        """Of the sequences that have more than one span of their own: what the others have cost."""
        ids = placement.sequence_ids
        costs = dict.fromkeys(ids, 0.0)
        n_layers = sum(self._n_layers)
        for read, n_layers_here in zip(placement.reads, self._n_layers, strict=True):
            # what is shared with another sequence of the step is read once for both: it is no piece of either
            own = [len(read.spans)] if len(ids) == 1 else read.count_own_spans()
            for sequence, n_spans in zip(ids, own, strict=True):
                if n_spans < 2:
                    continue
                costs[sequence] += (n_spans - 1) * _SPAN_BYTES * n_layers_here
                if self._join:  # neighbours in pairs, again and again
                    n_bytes = read.n_rows / len(ids) * self._cache.pool.bytes_per_cell * n_layers_here / n_layers
                    costs[sequence] += n_bytes * (n_spans - 1).bit_length()
        return [(sequence, cost) for sequence, cost in costs.items() if cost]

    # ---- before a step

    def before(self, step: Step) -> None:
        """Moves cells of sequences of an admitted step where that has paid for itself; the step stays admitted.

        A move that cannot be made, for want of memory or because copying failed, has changed nothing.
        """
        if not self._debts or self._mover is None:
            return
        for extension in step.extensions:
            debt = self._debts.get(extension.sequence.id)
            if debt is not None and debt.paid >= debt.due:
                self._consider(self._mover, extension.sequence.id, debt)

    def _consider(self, mover: MovesCells, sequence: int, debt: _Debt) -> None:
        move = mover.plan_move(sequence)
        if move is None:
            debt.due = 2 * debt.paid  # others may give up cells meanwhile
            return
        # A move that takes away a part of the pieces is to be paid by that part.
        debt.due = self._cost(move) * (move.n_stretches - 1) / move.n_saved
        if debt.paid < debt.due:
            return
        try:
            self._make_room(move.extent)
            self.n_bytes += mover.move(move, self._backends)
        except (NativeError, MemoryError):
            self.n_failed += 1
            debt.due = 2 * debt.paid
            return
        self.n_moves += 1
        self.n_cells += move.n_cells
        self.forget(sequence)

    def _cost(self, move: Move) -> float:
        pool = self._cache.pool
        n_bytes = self._fixed_cost(len(move.pieces())) + move.n_cells * pool.bytes_per_cell
        return n_bytes + (pool.n_bytes if pool.must_grow(move.extent) else 0)  # growth copies all there is

    def _fixed_cost(self, n_pieces: int) -> float:
        return _MOVE_BYTES + (_GRAPH_BYTES + n_pieces * _SPAN_BYTES) * sum(self._n_layers)
