"""How many bytes the K and V of a token take in a model of any architecture, as far as its tensors say."""

from __future__ import annotations

import re

from ggml_engine.ggml.gguf import GGUFFile
from ggml_engine.ggml.tensor_types import TensorType

# Where a layer has both, K and V are what they give. Latent attention keeps less than its second product gives.
_PROJECTION = re.compile(r"blk\.\d+\.attn_(k|v)\.weight")
_LATENT = re.compile(r"blk\.\d+\.attn_kv_a_mqa\.weight")
_FUSED = re.compile(r"blk\.\d+\.attn_qkv\.weight")


def estimate_bytes_per_cell(file: GGUFFile, k_type: TensorType, v_type: TensorType) -> int:
    """Bytes of one token in all layers; 0 where the tensors do not say it, or nothing is kept per token.

    Exact where every layer has a K and a V of its own; too many where layers share them.
    """
    latent = [info.shape[1] for name, info in file.tensors.items() if _LATENT.fullmatch(name)]
    if latent:
        return round(sum(latent) * _bytes_of(k_type))
    widths = {"k": 0, "v": 0}
    for name, info in file.tensors.items():
        if (found := _PROJECTION.fullmatch(name)) and len(info.shape) == 2:
            widths[found[1]] += info.shape[1]
        elif _FUSED.fullmatch(name) and len(info.shape) == 2:
            rest = max(0, info.shape[1] - info.shape[0]) // 2  # Q is as wide as the model
            widths = {kind: width + rest for kind, width in widths.items()}
    return round(widths["k"] * _bytes_of(k_type) + widths["v"] * _bytes_of(v_type))


def _bytes_of(kind: TensorType) -> float:
    return kind.block_bytes / kind.block_size
