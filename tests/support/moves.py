"""Moves of cells without the weighing: at every step, or at once."""

from __future__ import annotations

import pytest

from ggml_engine.executor import compaction
from ggml_engine.executor.compaction import Compaction
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.pool.compaction import Move
from ggml_engine.pool.step import Step


def move_at_every_step(patch: pytest.MonkeyPatch) -> None:
    """Whatever saves a stretch of a sequence in a step is moved before it, at no cost."""
    before = Compaction.before

    def eager(self: Compaction, step: Step) -> None:
        for extension in step.extensions:
            self._debts[extension.sequence.id] = compaction._Debt(1.0, 0.0)
        before(self, step)

    patch.setattr(Compaction, "before", eager)
    patch.setattr(Compaction, "_cost", lambda *_: 0.0)


def move_now(executor: GgmlExecutor, sequence: int) -> Move | None:
    """The sequence's move, made, if there is one."""
    move: Move | None = executor.cache.plan_move(sequence)  # type: ignore[attr-defined]
    if move is not None:
        executor._make_room(move.extent)
        executor.cache.move(move, executor.model.backends)  # type: ignore[attr-defined]
    return move
