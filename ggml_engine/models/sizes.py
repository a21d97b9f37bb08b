"""The sizes of a decoder, and other values that most architectures have, read from metadata and checked.

Names of sizes are GGUF's (`n_embd`, `n_head_kv`, `n_rot`). Nothing here touches a tensor's data.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import Any

from ggml_engine.errors import HyperparameterError
from ggml_engine.ggml.gguf import GGUFArray
from ggml_engine.models.metadata import MetadataReader

MAX_LAYERS = 512
MAX_CONTEXT = 1 << 28  # positions are i32, and a mask of this length could not be allocated anyway
MAX_SIZE = 1 << 24  # of any one dimension of a weight
_LAYER_NAME = re.compile(r"blk\.(?P<layer>[0-9]{1,9})\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of a decoder. Tuples have one entry per layer."""

    n_layer: int
    n_ctx_train: int
    n_embd: int
    n_vocab: int
    n_ff: tuple[int, ...]
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    n_embd_head_k: tuple[int, ...]
    n_embd_head_v: tuple[int, ...]
    n_rot: int
    has_fused_qkv: bool  # one tensor holds the weights of query, key and value

    def keywords(self) -> dict[str, Any]:
        """All sizes by name: what `Hyperparameters` takes beside what an architecture makes of the rest."""
        return {field.name: getattr(self, field.name) for field in fields(Sizes)}


def read_sizes(reader: MetadataReader) -> Sizes:
    """The sizes that every decoder has, checked against each other and against the embedding table.

    Layers that only predict further tokens at once (`nextn_predict_layers`, the last ones) are left out.
    """
    if not reader.flag("attention.causal", True):
        raise HyperparameterError(reader.key("attention.causal"), "is false, but tokens here see none that follow them")
    n_all = reader.integer("block_count", 1, MAX_LAYERS)
    n_layer = n_all - reader.integer("nextn_predict_layers", 0, n_all - 1, 0)
    _check_layers_present(reader, n_layer, n_all)
    n_embd = reader.integer("embedding_length", 1, MAX_SIZE)
    n_head = reader.per_layer("attention.head_count", n_layer, 1, 1 << 16)
    n_head_kv = reader.per_layer("attention.head_count_kv", n_layer, 1, 1 << 16, n_head)
    for heads, heads_kv in zip(n_head, n_head_kv, strict=True):
        if heads % heads_kv:
            reason = f"{heads} query heads do not divide into groups for {heads_kv} K/V heads"
            raise HyperparameterError(reader.key("attention.head_count_kv"), reason)
    implied = _implied_head_size(reader, n_embd, n_head[0])
    n_embd_head_k = reader.integer("attention.key_length", 1, 1 << 16, implied)
    n_embd_head_v = reader.integer("attention.value_length", 1, 1 << 16, implied)
    n_rot = reader.integer("rope.dimension_count", 2, n_embd_head_k, n_embd_head_k)
    if n_rot % 2:
        raise HyperparameterError(reader.key("rope.dimension_count"), f"must be even, is {n_rot}")
    if n_embd_head_k % 2:  # ggml takes also what is not rotated by pairs
        name = "attention.key_length" if "attention.key_length" in reader else "attention.head_count"
        raise HyperparameterError(reader.key(name), f"makes heads of {n_embd_head_k} elements: their size must be even")
    context = reader.integer("context_length", 1, 2**63)
    return Sizes(
        n_layer=n_layer,
        n_ctx_train=min(context, MAX_CONTEXT),
        n_embd=n_embd,
        n_vocab=_embedding_rows(reader, n_embd),
        n_ff=reader.per_layer("feed_forward_length", n_layer, 1, MAX_SIZE),
        n_head=n_head,
        n_head_kv=n_head_kv,
        n_embd_head_k=(n_embd_head_k,) * n_layer,
        n_embd_head_v=(n_embd_head_v,) * n_layer,
        n_rot=n_rot,
        has_fused_qkv="blk.0.attn_qkv.weight" in reader.file.tensors,
    )


def check_whole_heads(reader: MetadataReader, sizes: Sizes) -> None:
    """Raise HyperparameterError where heads of K and V differ in size, or are not rotated as a whole."""
    head_k, head_v = sizes.n_embd_head_k[0], sizes.n_embd_head_v[0]
    if head_v != head_k:
        raise HyperparameterError(reader.key("attention.value_length"), f"must be key_length {head_k}, is {head_v}")
    check_whole_rotation(reader, sizes)


def check_whole_rotation(reader: MetadataReader, sizes: Sizes) -> None:
    """Raise HyperparameterError where a part of a head alone is rotated."""
    head_k = sizes.n_embd_head_k[0]
    if sizes.n_rot != head_k:
        reason = f"must equal the head size {head_k}, is {sizes.n_rot}"
        raise HyperparameterError(reader.key("rope.dimension_count"), reason)


def layer_of(name: str) -> int | None:
    """The layer that a tensor's name says; None for a tensor of none."""
    match = _LAYER_NAME.match(name)
    return None if match is None else int(match["layer"])


def _check_layers_present(reader: MetadataReader, n_layer: int, n_all: int) -> None:
    present = {layer for name in reader.file.tensors if (layer := layer_of(name)) is not None}
    beyond = sorted(layer for layer in present if layer >= n_all)
    missing = [layer for layer in range(n_layer) if layer not in present]
    if beyond or missing:
        reason = f"is {n_all}, but the file has tensors of {len(present)} layers"
        reason += f", layer {beyond[0]} among them" if beyond else f", none of layer {missing[0]}"
        raise HyperparameterError(reader.key("block_count"), reason)


def _implied_head_size(reader: MetadataReader, n_embd: int, n_head: int) -> int:
    if reader.key("attention.key_length") in reader.file.metadata:
        return max(1, n_embd // n_head)
    if n_embd % n_head:
        reason = f"{n_head} heads do not divide an embedding of {n_embd}, and the file names no key_length"
        raise HyperparameterError(reader.key("attention.head_count"), reason)
    return n_embd // n_head


def _embedding_rows(reader: MetadataReader, n_embd: int) -> int:
    info = reader.file.tensors.get("token_embd.weight")
    if info is None or len(info.shape) != 2:
        # it is reported with the other weights, with the shape that it ought to have
        tokens = reader.file.metadata.get("tokenizer.ggml.tokens")
        return len(tokens) if isinstance(tokens, GGUFArray) and len(tokens) else 1
    if info.shape[0] != n_embd:
        reason = f"is {n_embd}, but token_embd.weight has rows of {info.shape[0]}"
        raise HyperparameterError(reader.key("embedding_length"), reason)
    rows = info.shape[1]
    claimed = reader.integer("vocab_size", 1, 2**31 - 1, rows)
    if claimed != rows:
        raise HyperparameterError(reader.key("vocab_size"), f"is {claimed}, but token_embd.weight has {rows} rows")
    return rows


def read_rms_eps(reader: MetadataReader) -> float:
    """The epsilon of RMS norms."""
    return reader.number("attention.layer_norm_rms_epsilon", lambda eps: 0 < eps < 1, "above 0 and below 1")


def read_layer_norm_eps(reader: MetadataReader) -> float:
    """The epsilon of layer norms."""
    return reader.number("attention.layer_norm_epsilon", lambda eps: 0 < eps < 1, "above 0 and below 1")


def read_window(reader: MetadataReader) -> int:
    """The sliding window in positions; 0 when the file has none.

    One longer than the context stays what it is: its layers see everything, but may rotate by another base.
    """
    return reader.integer("attention.sliding_window", 0, 2**31 - 1, 0)


def read_needed_window(reader: MetadataReader, default: int | None = None) -> int:
    """The sliding window of an architecture that has layers with one in every file."""
    return reader.integer("attention.sliding_window", 1, 2**31 - 1, default)


def read_windowed_layers(
    reader: MetadataReader, n_layer: int, pattern: int, *, full_first: bool = False
) -> tuple[bool, ...]:
    """Which layers see through the window: the file's flags, or all but every n-th one.

    `pattern` is that n where the file names none, 0 means all of them; the layer that sees everything is the last of
    each n, or the first with `full_first`.
    """
    flags = reader.flags("attention.sliding_window_pattern", n_layer)
    if flags is not None:
        return flags
    n = reader.integer("attention.sliding_window_pattern", 0, 1 << 16, pattern)
    full = 0 if full_first else n - 1
    return tuple(n == 0 or il % n != full for il in range(n_layer))


def read_scale(reader: MetadataReader, name: str, default: float | None = None) -> float:
    """A factor above zero; 0 in the file stands for 1, as in libllama."""
    value = reader.number(name, lambda value: value >= 0, "0 (none) or above", default)
    return value or 1.0


def read_softcap(reader: MetadataReader, name: str, default: float | None = 0.0) -> float:
    """The bound of a scaled tanh; 0 for none."""
    return reader.number(name, lambda cap: cap == 0 or cap > 1e-3, "0 (none) or above 0.001", default)
