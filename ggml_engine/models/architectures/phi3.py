"""`phi3`: Phi 3, 3.5 and 4.

One weight each for q, k and v and for gate and up, rotation in halves (NEOX) by long or short factors (LongRoPE),
queries scaled instead of scores. Files may name a window, which is left out as in libllama: every layer sees all.
Abdin et al. 2024, arXiv:2404.14219; llama.cpp's src/models/phi3.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggml_engine.ggml.ops import ROPE_NEOX, Tensor
from ggml_engine.models.architecture import (
    Architecture,
    attention_weights,
    embedding_and_output,
    matrix,
    norm,
    rope_factor_weights,
)
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import pre_norm_decoder, swiglu_ffn
from ggml_engine.models.metadata import MetadataReader, inverse_sqrt_f32
from ggml_engine.models.rope import read_original_context, read_rope
from ggml_engine.models.sizes import read_rms_eps, read_sizes
from ggml_engine.models.weights import TensorSpec


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    sizes = read_sizes(reader)
    return Hyperparameters(
        architecture="phi3",
        **sizes.keywords(),
        norm_eps=read_rms_eps(reader),
        rope=(read_rope(reader, ROPE_NEOX, sizes),) * sizes.n_layer,
        n_ctx_long=read_original_context(reader, sizes),
        window=(0,) * sizes.n_layer,
        attention_scale=inverse_sqrt_f32(sizes.n_embd_head_k[0]),
    )


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = [*embedding_and_output(hp), *rope_factor_weights(hp.n_rot)]
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il)
        specs += attention_weights(hp, il, biases=True, output_bias=False)
        specs += norm(hp, "ffn_norm", il)
        specs += matrix("ffn_up", (hp.n_embd, 2 * hp.n_ff[il]), il)
        specs += matrix("ffn_down", (hp.n_ff[il], hp.n_embd), il)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    factors = g.rope_factors()
    return pre_norm_decoder(
        g,
        lambda g, x, il: g.self_attention(x, il, factors, scaled_queries=True),
        swiglu_ffn,
    )


ARCHITECTURE = Architecture("phi3", hyperparameters, tensors, graph)
