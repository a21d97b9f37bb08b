"""`OurDriver`: a `GgmlExecutor` as the benchmark drives it.

A step is what the control plane makes of it: a `Batch`, and `forward`, which returns the logits as an array.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ggml_engine.bench.driver import N_BATCH, Room, TokenIds
from ggml_engine.errors import CacheError
from ggml_engine.executor.batch import Batch
from ggml_engine.executor.executor import GgmlExecutor
from ggml_engine.executor.options import ExecutorOptions
from ggml_engine.models.model import Model

_BLOCK = 256  # llama.cpp pads its contexts to as much
_RUN = 64  # cells that a sequence may leave unused at its end


def capacity_for(room: Room) -> int:
    """Cells that a pool needs for it, with what sequences leave unused in their runs."""
    n = room.n_cells + room.n_sequences * _RUN
    return -(-n // _BLOCK) * _BLOCK


class OurDriver:
    """Drives an executor of its own over a model. Raises OptionError for options that cannot be."""

    def __init__(self, model: Model, options: ExecutorOptions, room: Room, name: str = "ours") -> None:
        capacity = max(options.capacity, capacity_for(room))
        self.name = name
        self.n_vocab = model.hp.n_vocab
        self.executor = GgmlExecutor(model, replace(options, capacity=capacity, max_batch_tokens=N_BATCH))
        self._sequences: list[int] = [self.executor.open() for _ in range(room.n_sequences)]

    def clear(self) -> None:
        """See Driver."""
        self.rewind([0] * len(self._sequences))

    def prefill(self, sequence: int, tokens: TokenIds) -> None:
        """See Driver."""
        name = self._sequences[sequence]
        for start in range(0, tokens.size, N_BATCH):
            self.executor.forward(Batch.of_sequence(name, tokens[start : start + N_BATCH]))

    def decode(self, tokens: TokenIds) -> None:
        """See Driver."""
        names = np.array(self._sequences[: tokens.size], np.int64)
        self.executor.forward(Batch(tokens, names, np.ones(tokens.size, np.bool_)))

    def share(self, n_sequences: int) -> None:
        """See Driver."""
        first = self._sequences[0]
        for i in range(1, n_sequences):
            clone = self.executor.clone(first, self.executor.length(first))
            if clone is None:
                raise CacheError(f"the cache has no room for {n_sequences} clones, or has no clones")
            self._replace(i, clone)

    def copy(self, n_sequences: int) -> None:
        """See Driver."""
        first = self._sequences[0]
        reader = self.executor.read_image([(first, self.executor.length(first))])
        if reader is None:
            raise CacheError("this kind of cache holds one sequence")
        rows = reader.read(0, reader.image.n_rows)
        for i in range(1, n_sequences):
            if self.executor.length(self._sequences[i]):
                continue
            writer = self.executor.write_image(reader.image)
            if writer is None:
                raise CacheError("this kind of cache holds one sequence")
            writer.write(rows)
            self._replace(i, writer.commit()[0])

    def _replace(self, i: int, sequence: int) -> None:
        self.executor.close(self._sequences[i])
        self._sequences[i] = sequence

    def rewind(self, lengths: Sequence[int]) -> None:
        """See Driver."""
        for sequence, length in zip(self._sequences, lengths, strict=False):
            self.executor.rewind(sequence, length)

    def close(self) -> None:
        """See Driver."""
        self.executor.close_all()
