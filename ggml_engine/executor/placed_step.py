"""`PlacedStep`: a step that has its cells and its graph, and what is kept of it for the next one.

Where one sequence decodes alone, the next step has the same graph and all but the same inputs: it is the last one,
moved on by a token (`pool/next_token.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ggml_engine.executor.batch import Batch
from ggml_engine.executor.best_rows import BestKey
from ggml_engine.executor.graph_cache import ReadyGraph
from ggml_engine.models.adapter_set import AdapterSet
from ggml_engine.pool.cell_plan import CellPlan
from ggml_engine.pool.next_token import NextToken
from ggml_engine.pool.step import Placement


class Asked(NamedTuple):
    """What a step gives: hidden states or logits, and what of these is found in the graph."""

    gives_hidden: bool = False
    best: BestKey | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PlacedStep:
    """What a step is computed with; `place` is to be committed then."""

    place: Placement | NextToken
    plans: Sequence[CellPlan]
    ready: ReadyGraph
    adapters: AdapterSet
    asked: Asked

    def moves_on(self, batch: Batch, asked: Asked, max_cells: int, max_positions: int) -> bool:
        """Make this the step of `batch`; False, with nothing changed, where that is not its sequence's next token.

        False, too, where it needs more cells than are stored, or a position that the model does not have (0: any).
        """
        place = self.place
        return (
            isinstance(place, NextToken)
            and batch.n_tokens == batch.n_outputs == 1
            and batch.positions is None
            and not batch.prepared
            and batch.sequences.item() == place.sequence
            and asked == self.asked
            and place.cell + 1 < max_cells
            and (not max_positions or place.position + 1 < max_positions)
            and place.move_on()
        )
