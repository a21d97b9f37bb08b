"""`gpt2`: GPT-2, Cerebras-GPT and others in their shape.

Learned embeddings of positions in the place of rotation, so that a sequence ends where their table does; pre-norm by
layer norms with biases, biases everywhere, no gate. Radford et al. 2019, "Language Models are Unsupervised Multitask
Learners"; llama.cpp's src/models/gpt2.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

from ggml_engine.ggml.ops import Tensor
from ggml_engine.models.architecture import (
    Architecture,
    attention_weights,
    embedding_and_output,
    ffn_weights,
    norm,
    with_biases,
)
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.decoder import pre_norm_decoder, self_attention
from ggml_engine.models.metadata import MetadataReader, inverse_sqrt_f32
from ggml_engine.models.sizes import read_layer_norm_eps, read_sizes
from ggml_engine.models.weights import Role, TensorSpec


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    sizes = read_sizes(reader)
    return Hyperparameters(
        architecture="gpt2",
        **sizes.keywords(),
        norm_eps=read_layer_norm_eps(reader),
        has_layer_norm=True,
        rope=(None,) * sizes.n_layer,
        max_positions=sizes.n_ctx_train,
        window=(0,) * sizes.n_layer,
        attention_scale=inverse_sqrt_f32(sizes.n_embd_head_k[0]),
    )


def tensors(hp: Hyperparameters) -> Sequence[TensorSpec]:
    """What the file must and may have."""
    specs = embedding_and_output(hp, norm_bias=True)
    specs.append(TensorSpec("position_embd.weight", (hp.n_embd, hp.max_positions), Role.ROWS))
    for il in range(hp.n_layer):
        specs += norm(hp, "attn_norm", il, bias=True)
        specs += attention_weights(hp, il, biases=True)
        specs += norm(hp, "ffn_norm", il, bias=True)
        specs += ffn_weights(hp, il, biases=True)
    return with_biases(specs, "attn_qkv", "attn_output", "ffn_up", "ffn_down")


def graph(g: ModelGraph) -> Tensor | None:
    """Logits of the tokens that want them."""
    return pre_norm_decoder(
        g, self_attention, lambda g, x, il: g.ffn(x, il, "gelu")
    )  # fmt: skip


ARCHITECTURE = Architecture("gpt2", hyperparameters, tensors, graph)
