"""The layers that most decoders have: attention and feed-forward, added one after the other or side by side; norms
before, after or both.

An architecture that is one of these gives its attention and its feed-forward; one that is not writes its own layer and
runs it through `run_layers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from ggml_engine.ggml.ops import Tensor
from ggml_engine.models.blocks import ModelGraph

Layer = Callable[[ModelGraph, Tensor, int], Tensor | None]  # of x [n_embd, tokens] and the layer's number
FeedForward = Callable[[ModelGraph, Tensor, int], Tensor]


def self_attention(g: ModelGraph, x: Tensor, il: int) -> Tensor | None:
    """The attention of most: `ModelGraph.self_attention`, nothing set."""
    return g.self_attention(x, il)


def swiglu_ffn(g: ModelGraph, x: Tensor, il: int) -> Tensor:
    """The feed-forward of most."""
    return g.ffn(x, il, "swiglu")


def run_layers(g: ModelGraph, x: Tensor, layer: Layer) -> Tensor | None:
    """All layers over x; None when a step that wants no logits ends with the last layer's K and V."""
    for il in range(g.hp.n_layer):
        after = layer(g, x, il)
        if after is None:
            return None
        x = after
    return x


def pre_norm_decoder(
    g: ModelGraph,
    attention: Layer = self_attention,
    feed_forward: FeedForward = swiglu_ffn,
    *,
    ffn_norm: str = "ffn_norm",
) -> Tensor | None:
    """Logits of a decoder whose layers are `pre_norm_layer`s.

    Takes the scales of `hp` into account.
    """
    scale = g.hp.embedding_scale
    x = run_layers(
        g,
        g.embed(None if scale == 1.0 else scale),
        lambda g, x, il: pre_norm_layer(g, x, il, attention, feed_forward, ffn_norm=ffn_norm),
    )
    return None if x is None else g.logits(x)


def pre_norm_layer(
    g: ModelGraph, x: Tensor, il: int, attention: Layer, feed_forward: FeedForward, *, ffn_norm: str = "ffn_norm"
) -> Tensor | None:
    """x plus attention of the normed x, then that plus feed-forward of it normed. `ffn_norm` names the second norm."""
    prefix = f"blk.{il}"
    attended = attention(g, g.norm(x, f"{prefix}.attn_norm"), il)
    if attended is None:
        return None
    attended, x = g.at_last_layer(il, attended, x)
    x = g.add(scaled(g, attended), x, f"{prefix}.attn_residual")
    fed = feed_forward(g, g.norm(x, f"{prefix}.{ffn_norm}"), il)
    return g.add(scaled(g, fed), x, f"{prefix}.ffn_residual")


def parallel_decoder(
    g: ModelGraph, attention: Layer, feed_forward: FeedForward, *, added_last: Literal["residual", "attention"]
) -> Tensor | None:
    """Logits of a decoder whose layers add attention and feed-forward of one normed x to x.

    `added_last` as in `parallel_layer`.
    """
    x = run_layers(
        g, g.embed(), lambda g, x, il: parallel_layer(g, x, il, attention, feed_forward, added_last=added_last)
    )
    return None if x is None else g.logits(x)


def parallel_layer(
    g: ModelGraph,
    x: Tensor,
    il: int,
    attention: Layer,
    feed_forward: FeedForward,
    *,
    attn_norm: str = "attn_norm",
    ffn_norm: str = "attn_norm",
    added_last: Literal["residual", "attention", "feed_forward"],
) -> Tensor | None:
    """x plus attention plus feed-forward, both of x normed: by the norms of these names, once where that is one.

    `added_last` is the term that is added to the sum of the other two, which decides how the sum is rounded.
    """
    prefix = f"blk.{il}"
    normed = g.norm(x, f"{prefix}.{attn_norm}")
    attended = attention(g, normed, il)
    if attended is None:
        return None
    attended, x, normed = g.at_last_layer(il, attended, x, normed)
    if ffn_norm != attn_norm:
        normed = g.norm(x, f"{prefix}.{ffn_norm}")
    terms = {"residual": x, "attention": attended, "feed_forward": feed_forward(g, normed, il)}
    last = terms.pop(added_last)
    first, second = terms.values()
    return g.add(g.add(first, second, f"{prefix}.partial_sum"), last, f"{prefix}.sum")


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
        x = g.add(attended, x, f"{prefix}.attn_residual")
        fed = feed_forward(g, before(g, x, f"{prefix}.ffn_norm"), il)
        return g.add(g.norm(fed, f"{prefix}.post_ffw_norm", eps=eps_after), x, f"{prefix}.ffn_residual")

    scale = g.hp.embedding_scale
    x = run_layers(g, g.embed(None if scale == 1.0 else scale) if x is None else x, layer)
    return None if x is None else g.logits(x)


def scaled(g: ModelGraph, x: Tensor) -> Tensor:
    """x by the residual scale, where there is one."""
    return x if g.hp.residual_scale == 1.0 else g.b.scale(x, g.hp.residual_scale)
