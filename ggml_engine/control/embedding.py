"""Embeddings of texts: the hidden states of their tokens, pooled.

Texts share forwards as far as these have room; what does not fit into one goes on in the next. Knows tokens and an
executor, no text and no model. A step is one forward, so that whoever shares the executor waits for no more than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import ContextLengthError, ExecutorError, InputError, PoolFullError
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.protocol import Executor
from ggml_engine.models.pooling import Pooling, Rows, unit_rows


@dataclass(slots=True, eq=False)
class _Text:
    tokens: npt.NDArray[np.int32]
    n_done: int = 0
    sequence: int | None = None
    total: npt.NDArray[np.float64] | None = None  # of the rows so far, where they are averaged
    rows: list[Rows] = field(default_factory=list)  # those that are kept

    @property
    def n_left(self) -> int:
        return int(self.tokens.size) - self.n_done


class Embedding:
    """Texts on their way to embeddings. `step` until it says that there is no more, then `result`.

    `tokens` are i32 [n] each. "mean" averages the hidden states of a text, "last" and "cls" take its last or first
    one, "none" keeps all. `normalize` gives rows of length 1. Raises InputError where there is nothing to embed.
    """

    def __init__(self, tokens: Iterable[npt.NDArray[np.int32]], pooling: Pooling, *, normalize: bool = True) -> None:
        self._pooling = pooling
        self._normalize = normalize
        self._texts = [_Text(ids) for ids in tokens]
        if not self._texts:
            raise InputError("there is nothing to embed: no texts")
        for number, text in enumerate(self._texts):
            if not text.tokens.size:
                raise InputError(f"there is nothing to embed: text {number} has no tokens")

    def check_length(self, most: int) -> None:
        """Raise ContextLengthError for a text of more tokens."""
        for number, text in enumerate(self._texts):
            if text.tokens.size > most:
                raise ContextLengthError(int(text.tokens.size), most, f"text {number}")

    @property
    def is_begun(self) -> bool:
        """Whether a text holds cells: it is not through, and its next tokens go on with what these hold."""
        return any(text.sequence is not None for text in self._texts)

    def step(self, executor: Executor, *, begins: bool = True) -> bool:
        """At most one forward; whether there is more to do. The executor is the same every time.

        Where it `begins` no text, only those go on that are begun, so that soon none holds any cells.

        A step that raises has closed every sequence, PoolFullError included: all texts that were not through begin
        again with the next step.
        """
        pieces = self._pieces(executor.max_batch_tokens, begins)
        if not pieces:
            return any(text.n_left for text in self._texts)
        try:
            self._compute(executor, pieces)
        except BaseException:
            self.abandon(executor)
            raise
        return any(text.n_left for text in self._texts)

    def abandon(self, executor: Executor) -> None:
        """Close what is open; texts that are not through are at their beginning again."""
        for text in self._texts:
            if text.sequence is not None:
                with suppress(Exception):  # an executor that broke must not keep the others open
                    executor.close(text.sequence)
                text.sequence, text.n_done, text.total = None, 0, None
                text.rows.clear()

    def result(self) -> Rows | list[Rows]:
        """f32 [texts, width]; without pooling a list of f32 [tokens, width]."""
        if self._pooling == "none":
            return [self._finished(np.concatenate(text.rows)) for text in self._texts]
        if self._pooling == "mean":
            pooled = [text.total / text.tokens.size for text in self._texts if text.total is not None]
            return self._finished(np.stack(pooled))
        return self._finished(np.concatenate([text.rows[0] for text in self._texts]))

    def _finished(self, rows: npt.NDArray[np.floating]) -> Rows:
        return unit_rows(rows) if self._normalize else rows.astype(np.float32)

    # ---- a step

    def _pieces(self, room: int, begins: bool) -> list[tuple[_Text, int]]:
        """Texts in their order and how many tokens of each, `room` in all."""
        pieces = []
        for text in self._texts:
            n = min(text.n_left, room) if begins or text.sequence is not None else 0
            if n:
                pieces.append((text, n))
                room -= n
        return pieces

    def _compute(self, executor: Executor, pieces: Sequence[tuple[_Text, int]]) -> None:
        """A forward of as many pieces from the first on as there are cells for."""
        while True:
            wanted = [self._wanted(text, n) for text, n in pieces]
            for text, _ in pieces:
                if text.sequence is None:
                    text.sequence = executor.open()
            marks = np.concatenate(wanted)
            batch = Batch(
                np.concatenate([text.tokens[text.n_done : text.n_done + n] for text, n in pieces]),
                np.concatenate([np.full(n, text.sequence, np.int64) for text, n in pieces]),
                marks,
            )
            try:
                rows = executor.forward_hidden(batch)
            except PoolFullError:
                if len(pieces) == 1:
                    raise
                pieces = self._fewer(executor, pieces)
            else:
                break
        n_rows = int(np.count_nonzero(marks))
        if rows.ndim != 2 or len(rows) != n_rows:
            raise ExecutorError(f"an executor returned rows of shape {rows.shape}, asked for were {n_rows}")
        for (text, n), mark in zip(pieces, wanted, strict=True):
            n_rows = int(np.count_nonzero(mark))
            self._take(text, rows[:n_rows])
            rows = rows[n_rows:]
            text.n_done += n
            if not text.n_left and text.sequence is not None:
                executor.close(text.sequence)
                text.sequence = None

    def _fewer(self, executor: Executor, pieces: Sequence[tuple[_Text, int]]) -> Sequence[tuple[_Text, int]]:
        """The first half; texts of the other one that have not begun hold nothing."""
        n_kept = len(pieces) // 2
        for text, _ in pieces[n_kept:]:
            if text.sequence is not None and not text.n_done:
                executor.close(text.sequence)
                text.sequence = None
        return pieces[:n_kept]

    def _wanted(self, text: _Text, n: int) -> npt.NDArray[np.bool_]:
        """Whose hidden states are wanted of the next `n` tokens."""
        wanted = np.full(n, self._pooling in ("mean", "none"))
        if self._pooling == "cls":
            wanted[0] = text.n_done == 0
        elif self._pooling == "last":
            wanted[-1] = text.n_left == n
        return wanted

    def _take(self, text: _Text, rows: Rows) -> None:
        if self._pooling == "mean":
            total = rows.sum(axis=0, dtype=np.float64)
            text.total = total if text.total is None else text.total + total
        elif len(rows):
            text.rows.append(rows)
