"""What libllama's loader must not be given: it ends the process, hangs or reads astray where it should refuse.

Our parser has accepted the file's structure, and `vocab_tables` its tokenizer, before. This looks at what the loader
does with metadata and tensors of any architecture; sizes and shapes it checks itself.
"""

from __future__ import annotations

import math
from typing import Final

from ggml_engine.errors import HyperparameterError, UnsupportedArchitectureError, VocabularyError, WeightError
from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.gguf_metadata import GGUFArray, GGUFType
from ggml_engine.ggml.ops.rope import MAX_ATTENTION_FACTOR
from ggml_engine.ggml.tensor_types import TensorType

_MAX_LAYERS: Final = 512  # LLAMA_MAX_LAYERS
_MAX_EXPERTS: Final = 1024  # LLAMA_MAX_EXPERTS
_INTEGER_TABLE: Final = "ffn_gate_tid2eid"  # the one kind of tensor that libllama reads as integers


def check_for_libllama(file: GGUFFile) -> None:
    """Refuse what libllama's loader would not survive.

    Raises HyperparameterError, WeightError, VocabularyError, and UnsupportedArchitectureError for an architecture of
    no name.
    """
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or not name:
        raise UnsupportedArchitectureError(f"{file.path} does not say which architecture it holds")
    _check_integer(file, f"{name}.block_count", 1, _MAX_LAYERS, is_needed=True)
    _check_integer(file, f"{name}.expert_count", 0, _MAX_EXPERTS)
    n_experts = file.metadata.get(f"{name}.expert_count", 0)
    least, most = (1, int(n_experts)) if isinstance(n_experts, int) and n_experts else (0, 0)
    _check_integer(file, f"{name}.expert_used_count", least, most, is_needed=bool(least))
    _check_integer(file, f"{name}.context_length", 1, 2**31 - 1)
    _check_integer(file, f"{name}.attention.sliding_window", 0, 2**31 - 1)
    for key in (f"{name}.rope.dimension_count", f"{name}.rope.dimension_count_swa"):
        _check_integer(file, key, 2, 2**31 - 1)
        if isinstance(n_rot := file.metadata.get(key), int) and n_rot % 2:
            raise HyperparameterError(key, f"must be even, is {n_rot}")
    key = f"{name}.rope.scaling.attn_factor"
    if isinstance(factor := file.metadata.get(key), float) and not 0 < factor <= MAX_ATTENTION_FACTOR:
        raise HyperparameterError(key, f"must be above 0 and up to {MAX_ATTENTION_FACTOR:g}, is {factor}")
    for key, value in file.metadata.items():
        if key.startswith(f"{name}.") and isinstance(value, float) and not math.isfinite(value):
            raise HyperparameterError(key, f"must be a finite number, is {value}")
        if key.startswith(f"{name}.") and key.endswith("_epsilon") and not _is_epsilon(value):
            raise HyperparameterError(key, f"must be above 0 and below 1, is {value!r}")
    for tensor, info in file.tensors.items():
        is_table = _INTEGER_TABLE in tensor and info.type is TensorType.I32
        if not info.type.can_multiply and not is_table:
            raise WeightError(tensor, f"is stored as {info.type.name}, which no weight may be")
    _check_tokens(file)


def _check_integer(file: GGUFFile, key: str, low: int, high: int, *, is_needed: bool = False) -> None:
    value = file.metadata.get(key)
    if value is None and not is_needed:
        return
    values = value.numpy().tolist() if isinstance(value, GGUFArray) and value.kind is not GGUFType.STRING else [value]
    for each in values:
        if isinstance(each, bool) or not isinstance(each, int) or not low <= each <= high:
            raise HyperparameterError(key, f"must be {low} to {high}, is {each!r}")


def _is_epsilon(value: object) -> bool:
    return isinstance(value, float) and 0 < value < 1


def _check_tokens(file: GGUFFile) -> None:
    texts = file.metadata.array("tokenizer.ggml.tokens", GGUFType.STRING).strings()
    if len(set(texts)) < len(texts) or not texts:
        n = len(texts) - len(set(texts))
        raise VocabularyError(f"{file.path}: {n} tokens have the text of another, which ends a process in libllama")
    for key in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
        found = file.metadata.get(key)
        if isinstance(found, GGUFArray) and len(found) != len(texts):
            raise VocabularyError(f"{file.path}: {key} has {len(found)} elements for {len(texts)} tokens")
