"""What a tiny llama is made of whose rows are 256 wide, so that the super-blocks of every type fill them."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, Any] = {
    "block_count": 2,
    "context_length": 512,
    "embedding_length": 256,
    "feed_forward_length": 256,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}
EXPERTS: dict[str, Any] = {"expert_count": 4, "expert_used_count": 2}
LEFT_OUT = ("rope_freqs", r"\.bias$")
