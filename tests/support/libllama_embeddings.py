"""libllama's embeddings of texts on the same file, by its low-level calls: decoders and encoders."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ggml_engine.ggml.tensor_types import TensorType
from ggml_engine.reference.libllama import import_libllama

Rows = npt.NDArray[np.float32]
POOLING_NUMBERS = {"none": 0, "mean": 1, "cls": 2, "last": 3}
_MATMUL, _FLASH = 0, 1


def reference_embeddings(
    path: Path, texts: Sequence[Sequence[int]], pooling: str, *, flash: bool = False, kv_type: TensorType = TensorType.F32,
    use_extra_bufts: bool = True,
) -> list[Rows]:  # fmt: skip
    """Not normalised: f32 [n_embd] of each text, or [tokens, n_embd] without pooling; one forward, one thread."""
    llama = import_libllama()
    llama.llama_backend_init()
    model_params = llama.llama_model_default_params()
    model_params.n_gpu_layers, model_params.use_extra_bufts = 0, use_extra_bufts
    model = llama.llama_model_load_from_file(os.fsencode(path), model_params)
    assert model
    params = llama.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = 512
    params.n_seq_max = 1 << (len(texts) - 1).bit_length()  # it dies of numbers that do not divide its forward
    params.n_threads = params.n_threads_batch = 1
    params.flash_attn_type = _FLASH if flash else _MATMUL
    params.type_k = params.type_v = int(kv_type)
    params.swa_full = params.kv_unified = True
    params.embeddings, params.pooling_type = True, POOLING_NUMBERS[pooling]
    context = llama.llama_init_from_model(model, params)
    assert context
    try:
        return _embed(llama, model, context, texts, pooled=pooling != "none")
    finally:
        llama.llama_free(context)
        llama.llama_model_free(model)


def _embed(llama: Any, model: Any, context: Any, texts: Sequence[Sequence[int]], *, pooled: bool) -> list[Rows]:
    n_embd = llama.llama_model_n_embd(model)
    rows = [(token, position, number) for number, text in enumerate(texts) for position, token in enumerate(text)]
    batch = llama.llama_batch_init(len(rows), 0, 1)
    batch.n_tokens = len(rows)
    for i, (token, position, number) in enumerate(rows):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.seq_id[i][0] = token, position, 1, number
        batch.logits[i] = True
    compute = llama.llama_decode if llama.llama_get_memory(context) else llama.llama_encode
    assert compute(context, batch) == 0
    llama.llama_batch_free(batch)
    if pooled:
        found = [llama.llama_get_embeddings_seq(context, number) for number in range(len(texts))]
        return [np.ctypeslib.as_array(pointer, shape=(n_embd,)).copy() for pointer in found]
    every = np.ctypeslib.as_array(llama.llama_get_embeddings(context), shape=(len(rows), n_embd)).copy()
    return np.split(every, np.cumsum([len(text) for text in texts])[:-1])
