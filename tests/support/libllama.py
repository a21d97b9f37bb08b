"""libllama as an oracle: `ggml_engine.reference.libllama`, with gguf-py's types and shorter ways to ask."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt

from ggml_engine.reference.libllama import Libllama

Type = gguf.GGMLQuantizationType


class Oracle(Libllama):
    """Of the last token alone, where not all logits are asked for."""

    def forward(  # type: ignore[override]
        self, tokens: Sequence[int], start_position: int = 0, *, all_logits: bool = True, sequence: int = 0
    ) -> npt.NDArray[np.float32]:
        """f32 [n_tokens, n_vocab], or [n_vocab] of the last one."""
        wanted = np.full(len(tokens), all_logits)
        wanted[-1] = True
        rows = super().forward(tokens, start_position, wants_logits=wanted, sequence=sequence)
        return rows if all_logits else rows[0]


def reference_logits(path: Path, tokens: Sequence[int], **options: object) -> npt.NDArray[np.float32]:
    """One forward over all tokens in a fresh context: f32 [n_tokens, n_vocab]."""
    with Oracle(path, **options) as oracle:  # type: ignore[arg-type]
        return oracle.forward(tokens)
