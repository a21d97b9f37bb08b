"""What an architecture is: three functions, in the order in which its file writes them.

And the weights that most of them ask for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ggml_engine.ggml.ops import Tensor
from ggml_engine.models.blocks import ModelGraph
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.metadata import MetadataReader
from ggml_engine.models.weights import Role, TensorSpec


@dataclass(frozen=True, slots=True)
class Architecture:
    """One value of `general.architecture`."""

    name: str
    hyperparameters: Callable[[MetadataReader], Hyperparameters]
    tensors: Callable[[Hyperparameters], Sequence[TensorSpec]]
    graph: Callable[[ModelGraph], Tensor | None]  # logits f32 [n_vocab, outputs]; None when none are wanted


def embedding_and_output(
    hp: Hyperparameters, *, tied: bool = True, norm_bias: bool | None = None, output_bias: bool = False
) -> list[TensorSpec]:
    """Token embedding, final norm and output weight: the embedding's where the file has none and may be `tied`.

    Biases as in `norm`; `output_bias` allows for one.
    """
    table = (hp.n_embd, hp.n_vocab)
    specs = [
        TensorSpec("token_embd.weight", table, Role.ROWS),
        *_norm("output_norm", hp.n_embd, hp.n_layer, norm_bias),
        TensorSpec(
            "output.weight", table, Role.MATMUL, hp.n_layer, tied_to="token_embd.weight" if tied else None
        ),
        TensorSpec("output.scale", (1,), Role.MUL, hp.n_layer, required=False),
    ]  # fmt: skip
    if output_bias:
        specs.append(TensorSpec("output.bias", (hp.n_vocab,), Role.ADD, hp.n_layer, required=False))
    return specs


def matrix(
    name: str, shape: tuple[int, int], il: int, *, bias: bool = False, required: bool = True
) -> list[TensorSpec]:
    """A weight of a layer with its optional scale (of tensor types that need one); `bias` allows for a bias."""
    specs = [
        TensorSpec(f"blk.{il}.{name}.weight", shape, Role.MATMUL, il, required=required),
        TensorSpec(f"blk.{il}.{name}.scale", (1,), Role.MUL, il, required=False),
    ]
    if bias:
        specs.append(TensorSpec(f"blk.{il}.{name}.bias", (shape[1],), Role.ADD, il, required=False))
    return specs


def attention_weights(
    hp: Hyperparameters, il: int, *, biases: bool, output_bias: bool | None = None
) -> list[TensorSpec]:
    """q, k, v (or all three as one) and output weights of a layer; `biases` allows for theirs.

    `output_bias` is the same for the output, where that is another thing.
    """  # fmt: skip
    n_q = hp.n_head[il] * hp.n_embd_head_k[il]
    n_k = hp.n_head_kv[il] * hp.n_embd_head_k[il]
    n_v = hp.n_head_kv[il] * hp.n_embd_head_v[il]
    if hp.has_fused_qkv:
        specs = matrix("attn_qkv", (hp.n_embd, n_q + n_k + n_v), il, bias=biases)
        if biases:  # some files keep these apart, beside the fused weight
            specs += [
                TensorSpec(f"blk.{il}.attn_{part}.bias", (n,), Role.ADD, il, required=False)
                for part, n in (("q", n_q), ("k", n_k), ("v", n_v))
            ]
    else:
        specs = [
            spec
            for part, n in (("q", n_q), ("k", n_k), ("v", n_v))
            for spec in matrix(f"attn_{part}", (hp.n_embd, n), il, bias=biases)
        ]
    n_mixed = hp.n_head[il] * hp.n_embd_head_v[il]
    return specs + matrix(
        "attn_output", (n_mixed, hp.n_embd), il, bias=biases if output_bias is None else output_bias
    )  # fmt: skip


def with_biases(specs: Sequence[TensorSpec], *weights: str) -> list[TensorSpec]:
    """The same, but that the biases of these weights must be there."""
    needed = tuple(f"{weight}.bias" for weight in weights)
    return [replace(spec, required=True) if spec.name.endswith(needed) else spec for spec in specs]


def head_norms(hp: Hyperparameters, il: int, *, required: bool = True, own_weights: bool = False) -> list[TensorSpec]:
    """Norms of every query head and every key head; `own_weights`: no two heads share theirs."""
    size = hp.n_embd_head_k[il]
    return [
        TensorSpec(
            f"blk.{il}.attn_{part}_norm.weight", (size, n_head) if own_weights else (size,), Role.MUL, il,
            required=required,
        )
        for part, n_head in (("q", hp.n_head[il]), ("k", hp.n_head_kv[il]))
    ]  # fmt: skip


def gated_ffn_weights(hp: Hyperparameters, il: int, *, biases: bool = False) -> list[TensorSpec]:
    """gate, up and down weights of a layer; `biases` allows for their biases."""
    return [*matrix("ffn_gate", (hp.n_embd, hp.n_ff[il]), il, bias=biases), *ffn_weights(hp, il, biases=biases)]


def ffn_weights(hp: Hyperparameters, il: int, *, biases: bool = False) -> list[TensorSpec]:
    """up and down weights of a layer; `biases` allows for their biases."""
    return [
        *matrix("ffn_up", (hp.n_embd, hp.n_ff[il]), il, bias=biases),
        *matrix("ffn_down", (hp.n_ff[il], hp.n_embd), il, bias=biases),
    ]


def norm(
    hp: Hyperparameters, name: str, il: int, *, n: int | None = None, bias: bool | None = None, required: bool = True
) -> list[TensorSpec]:
    """A norm over the embedding, or over `n` elements.

    `bias`: True for one that must be there, False for one that may be; None for none.
    """  # fmt: skip
    return _norm(f"blk.{il}.{name}", hp.n_embd if n is None else n, il, bias, required=required)


def _norm(name: str, n: int, il: int, bias: bool | None, *, required: bool = True) -> list[TensorSpec]:
    specs = [TensorSpec(f"{name}.weight", (n,), Role.MUL, il, required=required)]
    if bias is not None:
        specs.append(TensorSpec(f"{name}.bias", (n,), Role.ADD, il, required=bias))
    return specs


def rope_factor_weights(n_rot: int) -> list[TensorSpec]:
    """Factors of rotation frequencies, all optional: fixed ones, or long and short ones (see `models/rope.py`)."""
    names = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
    return [TensorSpec(name, (n_rot // 2,), Role.ROPE_FACTORS, 0, required=False) for name in names]
