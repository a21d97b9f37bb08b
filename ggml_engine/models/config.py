"""Hyperparameters: read from a file's metadata once, checked once, frozen.

Owns the rules for what a value may be; what an architecture needs of them is said in its own file. Names of sizes are
GGUF's (`n_embd`, `n_head_kv`, `n_rot`). Nothing here touches a tensor.
Keys and defaults: docs/gguf.md of ggml, and llama.cpp's loader where that page is silent.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, fields

import numpy as np

from ggml_engine.errors import GraphError, HyperparameterError
from ggml_engine.ggml.gguf import GGUFArray, GGUFFile, GGUFType
from ggml_engine.ggml.ops import Rope

MAX_LAYERS = 512
MAX_CONTEXT = 1 << 28  # positions are i32, and a mask of this length could not be allocated anyway
# below this, scaled positions leave what an f32 holds exactly, and YaRN's growth comes near zero
_MIN_SCALING = 1e-3
_SCALING_RULE = "0 (none) or above 0.001"
_MAX_SIZE = 1 << 24  # of any one dimension of a weight
_LAYER_NAME = re.compile(r"blk\.(?P<layer>[0-9]{1,9})\.")


@dataclass(frozen=True, slots=True)
class KvLayer:
    """What one layer keeps per cell: elements of K and V over `n_head` heads.

    `window` is how far back its queries see (0 = everything).
    """

    n_embd_k: int
    n_embd_v: int
    window: int = 0
    n_head: int = 1

    @property
    def head_k(self) -> int:
        """Elements of K per head."""
        return self.n_embd_k // self.n_head

    @property
    def head_v(self) -> int:
        """Elements of V per head."""
        return self.n_embd_v // self.n_head


@dataclass(frozen=True, slots=True)
class Hyperparameters:
    """What a model's graph is built from. Tuples have one entry per layer."""

    architecture: str
    n_layer: int
    n_ctx_train: int
    n_embd: int
    n_vocab: int
    n_ff: tuple[int, ...]
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    n_embd_head_k: int
    n_embd_head_v: int
    norm_rms_eps: float
    rope: tuple[Rope, ...]
    window: tuple[int, ...]
    attention_scale: float
    logit_softcap: float = 0.0

    @classmethod
    def of(
        cls,
        architecture: str,
        sizes: Sizes,
        *,
        norm_rms_eps: float,
        rope: tuple[Rope, ...],
        window: tuple[int, ...],
        attention_scale: float,
        logit_softcap: float = 0.0,
    ) -> Hyperparameters:
        """The sizes, with what an architecture makes of the rest."""
        common = {field.name: getattr(sizes, field.name) for field in fields(sizes) if field.name != "n_rot"}
        return cls(
            architecture=architecture,
            norm_rms_eps=norm_rms_eps,
            rope=rope,
            window=window,
            attention_scale=attention_scale,
            logit_softcap=logit_softcap,
            **common,
        )

    def kv_layers(self) -> tuple[KvLayer, ...]:
        """What each layer keeps per cell."""
        return tuple(
            KvLayer(n_head_kv * self.n_embd_head_k, n_head_kv * self.n_embd_head_v, window, n_head_kv)
            for n_head_kv, window in zip(self.n_head_kv, self.window, strict=True)
        )


class MetadataReader:
    """Typed access to a file's metadata. Keys without a dot-separated prefix get the architecture's."""

    def __init__(self, file: GGUFFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def key(self, name: str) -> str:
        """The full key of an architecture's own value."""
        return f"{self.architecture}.{name}"

    def __contains__(self, name: str) -> bool:
        return self.key(name) in self.file.metadata

    def integer(self, name: str, low: int, high: int, default: int | None = None) -> int:
        """An integer in [low, high]."""
        key = self.key(name)
        value = self.file.metadata.get(key)
        if value is None:
            if default is None:
                raise HyperparameterError(key, "the file does not have this value")
            return default
        if isinstance(value, bool) or not isinstance(value, int):
            raise HyperparameterError(key, f"an integer is needed, the file has {_shown(value)}")
        if not low <= value <= high:
            raise HyperparameterError(key, f"must be {low} to {high}, is {value}")
        return value

    def number(self, name: str, accept: Callable[[float], bool], rule: str, default: float | None = None) -> float:
        """A number, rounded to f32 as ggml takes it, that is finite and that `accept`s; `rule` says what that asks."""
        key = self.key(name)
        value = self.file.metadata.get(key)
        if value is None:
            if default is None:
                raise HyperparameterError(key, "the file does not have this value")
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise HyperparameterError(key, f"a number is needed, the file has {_shown(value)}")
        rounded = to_f32(value)
        if not math.isfinite(rounded) or not accept(rounded):
            raise HyperparameterError(key, f"must be {rule}, is {value}")
        return rounded

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self.file.metadata.get(self.key(name), default)
        if not isinstance(value, str):
            raise HyperparameterError(self.key(name), f"a string is needed, the file has {_shown(value)}")
        return value

    def per_layer(self, name: str, n_layer: int, low: int, high: int, default: tuple[int, ...] | None = None) -> tuple[
        int, ...
    ]:  # fmt: skip
        """One integer per layer: a scalar counts for all, an array must have one for each."""
        value = self.file.metadata.get(self.key(name))
        if not isinstance(value, GGUFArray):
            if value is None and default is not None:
                return default
            return (self.integer(name, low, high),) * n_layer
        numbers = self._array(name, value, n_layer)
        for number in numbers:
            if not low <= number <= high:
                raise HyperparameterError(self.key(name), f"must be {low} to {high} in every layer, has {number}")
        return numbers

    def flags(self, name: str, n_layer: int) -> tuple[bool, ...] | None:
        """An array of one truth value per layer; None when the value is absent or a scalar."""
        value = self.file.metadata.get(self.key(name))
        if not isinstance(value, GGUFArray):
            return None
        return tuple(number != 0 for number in self._array(name, value, n_layer))

    def _array(self, name: str, value: GGUFArray, n_layer: int) -> tuple[int, ...]:
        key = self.key(name)
        if len(value) < n_layer:
            raise HyperparameterError(key, f"one value for each of {n_layer} layers is needed, there are {len(value)}")
        if value.kind is GGUFType.STRING:
            raise HyperparameterError(key, "integers are needed, the file has strings")
        array = value.numpy()
        if not np.issubdtype(array.dtype, np.integer) and array.dtype != np.bool_:
            raise HyperparameterError(key, f"integers are needed, the file has {array.dtype}")
        return tuple(int(number) for number in array[:n_layer])


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def to_f32(value: float) -> float:
    """The nearest f32: infinite or zero where that has no room."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(value))


def inverse_sqrt_f32(n: int) -> float:
    """1 / sqrt(n) with libllama's two roundings to f32, so that scores come out the same."""
    return float(np.float32(1.0) / np.sqrt(np.float32(n)))


def positive(value: float) -> bool:
    """Whether a number is above zero."""
    return value > 0


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of a decoder. Tuples have one entry per layer."""

    n_layer: int
    n_ctx_train: int
    n_embd: int
    n_vocab: int
    n_ff: tuple[int, ...]
    n_head: tuple[int, ...]
    n_head_kv: tuple[int, ...]
    n_embd_head_k: int
    n_embd_head_v: int
    n_rot: int


def read_sizes(reader: MetadataReader) -> Sizes:
    """The sizes that every decoder has, checked against each other and against the embedding table."""
    n_layer = reader.integer("block_count", 1, MAX_LAYERS)
    _check_layers_present(reader, n_layer)
    n_embd = reader.integer("embedding_length", 1, _MAX_SIZE)
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
    context = reader.integer("context_length", 1, 2**63)
    return Sizes(
        n_layer, min(context, MAX_CONTEXT), n_embd, _embedding_rows(reader, n_embd),
        reader.per_layer("feed_forward_length", n_layer, 1, _MAX_SIZE), n_head, n_head_kv, n_embd_head_k,
        n_embd_head_v, n_rot,
    )  # fmt: skip


def _check_layers_present(reader: MetadataReader, n_layer: int) -> None:
    named = [match for name in reader.file.tensors if (match := _LAYER_NAME.match(name))]
    present = {int(match["layer"]) for match in named}
    beyond = sorted(layer for layer in present if layer >= n_layer)
    missing = [layer for layer in range(n_layer) if layer not in present]
    if beyond or missing:
        reason = f"is {n_layer}, but the file has tensors of {len(present)} layers"
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


def read_window(reader: MetadataReader) -> int:
    """The sliding window in positions; 0 when the file has none.

    One longer than the context stays what it is: its layers see everything, but may rotate by another base.
    """
    return reader.integer("attention.sliding_window", 0, 2**31 - 1, 0)


def read_rope(reader: MetadataReader, mode: int, sizes: Sizes) -> Rope:
    """Base, scaling and YaRN terms of the rotation (Peng et al., arXiv:2309.00071; llama.cpp's llama-context.cpp)."""
    base = reader.number("rope.freq_base", positive, "above 0", 10000.0)
    kind = reader.text("rope.scaling.type", "linear")
    if kind == "longrope":
        reason = "'longrope' (factors by length of the context) is not supported here yet"
        raise HyperparameterError(reader.key("rope.scaling.type"), reason)
    if kind not in {"none", "linear", "yarn"}:
        raise HyperparameterError(reader.key("rope.scaling.type"), f"none, linear or yarn, is {kind!r}")
    factor_key = "rope.scaling.factor" if "rope.scaling.factor" in reader else "rope.scale_linear"
    factor = reader.number(factor_key, lambda value: value == 0 or value > _MIN_SCALING, _SCALING_RULE, 0.0)
    scale = 1.0 if factor == 0.0 or kind == "none" else 1.0 / factor
    ext_factor = 1.0 if kind == "yarn" else 0.0
    attn_factor = reader.number("rope.scaling.attn_factor", positive, "above 0", 1.0)
    if kind == "yarn":
        # YaRN scales attention by 0.1 ln(1/scale) + 1; ggml multiplies that in again, so take one out
        growth = 1.0 + 0.1 * math.log(1.0 / scale)
        attn_factor *= (growth if scale < 1.0 else 1.0) / growth
    rope = Rope(
        n_dims=sizes.n_rot,
        base=base,
        mode=mode,
        scale=scale,
        n_ctx_orig=reader.integer("rope.scaling.original_context_length", 1, 2**31 - 1, sizes.n_ctx_train),
        ext_factor=ext_factor,
        attn_factor=attn_factor,
    )
    try:
        rope.check()
    except GraphError as error:
        raise HyperparameterError(reader.key("rope"), str(error)) from None
    return rope
