"""Hyperparameters of decoders whose layers are all alike.

One kind of norm, one head size, one rotation, no windows. What an architecture has besides, it sets with
`dataclasses.replace`.
"""

from __future__ import annotations

from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.metadata import MetadataReader, inverse_sqrt_f32
from ggml_engine.models.rope import read_long_context, read_rope
from ggml_engine.models.sizes import check_whole_heads, read_layer_norm_eps, read_rms_eps, read_sizes


def read_uniform(
    reader: MetadataReader,
    mode: int,
    *,
    has_layer_norm: bool = False,
    has_whole_heads: bool = True,
    log_multiplier: float = 0.0,
) -> Hyperparameters:
    """Read and check. `mode` is the order of rotated pairs, `log_multiplier` YaRN's for all dimensions (0: none).

    With `has_whole_heads` heads of K, of V and what is rotated of them must be of one size.
    """
    sizes = read_sizes(reader)
    if has_whole_heads:
        check_whole_heads(reader, sizes)
    return Hyperparameters(
        architecture=reader.architecture,
        **sizes.keywords(),
        norm_eps=read_layer_norm_eps(reader) if has_layer_norm else read_rms_eps(reader),
        has_layer_norm=has_layer_norm,
        rope=(read_rope(reader, mode, sizes, log_multiplier=log_multiplier),) * sizes.n_layer,
        n_ctx_long=read_long_context(reader, sizes),
        window=(0,) * sizes.n_layer,
        attention_scale=inverse_sqrt_f32(sizes.n_embd_head_k[0]),
    )
