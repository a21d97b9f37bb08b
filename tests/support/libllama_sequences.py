"""libllama with several sequences in one unified cache: what our executor's batches, clones and rewinds are beside."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from libllama import Oracle

Logits = npt.NDArray[np.float32]


class SequencesOracle(Oracle):
    """Sequences are numbers below `n_sequences`; each begins empty."""

    def __init__(self, path: Path, *, n_sequences: int = 4, **options: Any) -> None:
        super().__init__(path, n_seq_max=n_sequences, **options)
        self.lengths = [0] * n_sequences

    def append(self, parts: Sequence[tuple[int, Sequence[int]]], wants_logits: Sequence[bool] | None = None) -> Logits:
        """Appends to several sequences in one batch, part after part: f32 [outputs, n_vocab], of all by default."""
        llama = self._llama
        rows = [(token, self.lengths[sequence] + i, sequence) for sequence, ids in parts for i, token in enumerate(ids)]
        batch = llama.llama_batch_init(len(rows), 0, 1)
        try:
            batch.n_tokens = len(rows)
            for i, (token, position, sequence) in enumerate(rows):
                batch.token[i], batch.pos[i] = token, position
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
                batch.logits[i] = wants_logits is None or wants_logits[i]
            assert llama.llama_decode(self._context, batch) == 0
            n_outputs = len(rows) if wants_logits is None else sum(wants_logits)
            logits: Logits = np.empty((n_outputs, self.n_vocab), np.float32)
            if n_outputs:
                found = np.ctypeslib.as_array(llama.llama_get_logits(self._context), shape=(logits.size,))
                logits[:] = found.reshape(logits.shape)
        finally:
            llama.llama_batch_free(batch)
        for sequence, ids in parts:
            self.lengths[sequence] += len(ids)
        return logits

    def copy(self, source: int, target: int, length: int) -> None:
        """`target` begins with the first `length` tokens of `source`, and shares its cells."""
        memory = self._llama.llama_get_memory(self._context)
        self._llama.llama_memory_seq_cp(memory, source, target, 0, length)
        self.lengths[target] = length

    def cut(self, sequence: int, length: int) -> None:
        """Only the first `length` tokens stay."""
        assert self._llama.llama_memory_seq_rm(self._llama.llama_get_memory(self._context), sequence, length, -1)
        self.lengths[sequence] = length
