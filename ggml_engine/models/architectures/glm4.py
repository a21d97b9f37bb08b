"""`glm4`: GLM-4-0414, and the text of GLM-4.1V.

Norms before and after attention and feed-forward, gate and up in one weight, half of each head rotated, attention's and
feed-forward's last products summed in f32. GLM Team 2024, arXiv:2406.12793; llama.cpp's src/models/glm4.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggml_engine.ggml.ops import ROPE_NEOX, ROPE_NORMAL, Tensor
from ggml_engine.models.architecture import Architecture, attention_weights, embedding_and_output, matrix, norm
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import sandwich_norm_decoder
from ggml_engine.models.metadata import MetadataReader, inverse_sqrt_f32
from ggml_engine.models.rope import read_rope, rotates_by_sections
from ggml_engine.models.sizes import read_rms_eps, read_sizes
from ggml_engine.models.weights import TensorSpec


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check. The models that see pictures rotate by sections, and in another order of pairs."""
    sizes = read_sizes(reader)
    mode = ROPE_NEOX if rotates_by_sections(reader) else ROPE_NORMAL
    return Hyperparameters(
        architecture="glm4",
        **sizes.keywords(),
        norm_eps=read_rms_eps(reader),
        rope=(read_rope(reader, mode, sizes),) * sizes.n_layer,
        window=(0,) * sizes.n_layer,
        attention_scale=inverse_sqrt_f32(sizes.n_embd_head_v[0]),
    )


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = embedding_and_output(hp)
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il)
        specs += attention_weights(hp, il, biases=True, output_bias=False)
        specs += norm(hp, "post_attention_norm", il)
        specs += norm(hp, "ffn_norm", il)
        specs += matrix("ffn_up", (hp.n_embd, 2 * hp.n_ff[il]), il)
        specs += matrix("ffn_down", (hp.n_ff[il], hp.n_embd), il)
        specs += norm(hp, "post_ffw_norm", il)
    return specs


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    return sandwich_norm_decoder(
        g,
        lambda g, x, il: g.self_attention(x, il, f32_accumulation=True),
        lambda g, x, il: g.ffn(x, il, "swiglu", f32_accumulation=True),
    )


ARCHITECTURE = Architecture("glm4", hyperparameters, tensors, graph)
