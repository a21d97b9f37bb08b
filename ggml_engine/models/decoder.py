"""The layers that most decoders have: attention, residual, feed-forward, residual, with norms before, after or both.

An architecture that is this gives its attention and its feed-forward; one that is not writes its own layer and runs it
through `run_layers`.
"""

from __future__ import annotations

from collections.abc import Callable

from ggml_engine.ggml.ops import Tensor
from ggml_engine.models.blocks import ModelGraph

Layer = Callable[[ModelGraph, Tensor, int], Tensor | None]  # of x [n_embd, tokens] and the layer's number
FeedForward = Callable[[ModelGraph, Tensor, int], Tensor]


def run_layers(g: ModelGraph, x: Tensor, layer: Layer) -> Tensor | None:
    """All layers over x; None when a step that wants no logits ends with the last layer's K and V."""
    for il in range(g.hp.n_layer):
        after = layer(g, x, il)
        if after is None:
            return None
        x = after
    return x


def pre_norm_decoder(
    g: ModelGraph, attention: Layer, feed_forward: FeedForward, *, ffn_norm: str = "ffn_norm"
) -> Tensor | None:
    """Logits of a decoder whose layers add attention of the normed x to x, then feed-forward of the normed sum.

    Takes the scales of `hp` into account. `ffn_norm` is the name of the second norm.
    """

    def layer(g: ModelGraph, x: Tensor, il: int) -> Tensor | None:
        prefix = f"blk.{il}"
        attended = attention(g, g.norm(x, f"{prefix}.attn_norm"), il)
        if attended is None:
            return None
        attended, x = g.at_last_layer(il, attended, x)
        x = g.b.add(scaled(g, attended), x, f"{prefix}.attn_residual")
        fed = feed_forward(g, g.norm(x, f"{prefix}.{ffn_norm}"), il)
        return g.b.add(scaled(g, fed), x, f"{prefix}.ffn_residual")

    scale = g.hp.embedding_scale
    x = run_layers(g, g.embed(None if scale == 1.0 else scale), layer)
    return None if x is None else g.logits(x)


def sandwich_norm_decoder(
    g: ModelGraph,
    attention: Layer,
    feed_forward: FeedForward,
    *,
    x: Tensor | None = None,
    norms_before: bool = True,
    eps_after: float | None = None,
) -> Tensor | None:
    """As `pre_norm_decoder`, with norms also of what is added (Ding et al. 2021, arXiv:2105.13290).

    `x` stands for the embeddings. Without `norms_before` there are only those (Liu et al. 2021, arXiv:2111.09883);
    `eps_after` is theirs, where it is not the model's.
    """

    def before(g: ModelGraph, x: Tensor, weight: str) -> Tensor:
        return g.norm(x, weight) if norms_before else x

    def layer(g: ModelGraph, x: Tensor, il: int) -> Tensor | None:
        prefix = f"blk.{il}"
        attended = attention(g, before(g, x, f"{prefix}.attn_norm"), il)
        if attended is None:
            return None
        attended, x = g.at_last_layer(il, attended, x)
        attended = g.norm(attended, f"{prefix}.post_attention_norm", eps=eps_after)
        x = g.b.add(attended, x, f"{prefix}.attn_residual")
        fed = feed_forward(g, before(g, x, f"{prefix}.ffn_norm"), il)
        return g.b.add(g.norm(fed, f"{prefix}.post_ffw_norm", eps=eps_after), x, f"{prefix}.ffn_residual")

    scale = g.hp.embedding_scale
    x = run_layers(g, g.embed(None if scale == 1.0 else scale) if x is None else x, layer)
    return None if x is None else g.logits(x)


def scaled(g: ModelGraph, x: Tensor) -> Tensor:
    """x by the residual scale, where there is one."""
    return x if g.hp.residual_scale == 1.0 else g.b.scale(x, g.hp.residual_scale)
