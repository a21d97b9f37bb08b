"""A step taken apart: which rows are whose, the batch that they make, and what must come back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ggml_engine.control.session_state import SessionState
from ggml_engine.control.step_plan import Want, plan_step
from ggml_engine.control.work import Work
from ggml_engine.errors import ExecutorError
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.outputs import NeededRows, Outputs, WholeRows
from ggml_engine.executor.prepared import PreparedInput, PreparedSlice
from ggml_engine.executor.protocol import Executor
from ggml_engine.ggml.candidates import RowNeed


@dataclass(slots=True, eq=False)
class Running:
    """A generation that has begun, or waits for room."""

    session: SessionState
    work: Work
    first: int = 0  # the session's position before it
    is_admitted: bool = False

    @property
    def is_to_end(self) -> bool:
        """Whether its caller has no more use for it."""
        return self.work.state.cancel_requested or self.session.close_requested


@dataclass(slots=True, eq=False)
class Part:
    """The rows of one generation in a step."""

    running: Running
    n: int
    tokens: npt.NDArray[np.int32]
    n_outputs: int  # of its last rows
    is_prefill: bool
    prepared: tuple[PreparedInput, int, int] | None = None  # the input and its positions that these rows are


def plan_parts(
    ready: Sequence[Running],
    executor: Executor,
    prefill_budget: int,
    turn: int,
    max_decodes: int | None,
    *,
    others_stream: bool,
) -> list[Part]:
    """The parts of the next step, of those in `ready` that get a row; the rest as in `plan_step`."""
    wants = [Want(each.work.n_wanted, each.work.limit(executor.n_vocab), each.work.is_decode) for each in ready]
    taken = plan_step(wants, executor.max_batch_tokens, prefill_budget, turn, max_decodes, others_stream)
    parts = []
    for running, n in zip(ready, taken, strict=True):
        if n:
            work = running.work
            parts.append(Part(running, n, work.tokens(n), work.n_outputs(n), not work.is_decode))
    return parts


def batch_of(parts: Sequence[Part]) -> Batch:
    """The step of all parts, in their order."""
    if len(parts) == 1 and not parts[0].is_prefill:
        return Batch.of_next_token(parts[0].running.session.sequence, parts[0].tokens)
    n_tokens = sum(part.n for part in parts)
    tokens, sequences = np.empty(n_tokens, np.int32), np.empty(n_tokens, np.int64)
    wanted, prepared = np.zeros(n_tokens, np.bool_), []
    row = 0
    for part in parts:
        end = row + part.n
        tokens[row:end] = part.tokens
        sequences[row:end] = part.running.session.sequence
        wanted[end - part.n_outputs : end] = True
        if part.prepared is not None:
            prepared.append(PreparedSlice(*part.prepared, row))
            tokens[row:end] = 0
        row = end
    return Batch(tokens, sequences, wanted, prepared=tuple(prepared))


def rows_of(parts: Iterable[Part]) -> list[range]:
    """Which outputs of the step each part's are."""
    found, first = [], 0
    for part in parts:
        found.append(range(first, first + part.n_outputs))
        first += part.n_outputs
    return found


def needs_of(parts: Iterable[Part], n_vocab: int) -> list[RowNeed]:
    """What is needed of every output, in batch order."""
    return [need for part in parts for need in [part.running.work.need(n_vocab)] * part.n_outputs]


def checked_outputs(outputs: Outputs, n_outputs: int, n_vocab: int) -> Outputs:
    """Raises ExecutorError for whole rows that are not as many, or not as wide, as was asked for."""
    if type(outputs) is not NeededRows and isinstance(outputs, WholeRows):  # a check by an ABC takes longer
        _check_logits(outputs.logits, n_outputs, n_vocab)
    return outputs


def _check_logits(logits: object, n_outputs: int, n_vocab: int) -> None:
    shape = getattr(logits, "shape", None)
    if not isinstance(logits, np.ndarray) or shape != (n_outputs, n_vocab):
        raise ExecutorError(
            f"an executor returned {'rows of shape ' + repr(shape) if shape else repr(type(logits).__name__)}, "
            f"asked for were {n_outputs} rows of {n_vocab}"
        )
