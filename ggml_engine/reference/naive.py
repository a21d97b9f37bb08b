"""Models by definition, in numpy float64: one sequence, the whole score matrix, a mask from the window's words.

Shares with the engine only how a file is read (`weights`), so that a mistake elsewhere is not repeated here. Slow on
purpose: nothing is cached, a weight is widened whenever it is used. Sources: Touvron et al., arXiv:2302.13971 (llama);
Gemma 3 report, arXiv:2503.19786.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ggml_engine.errors import HyperparameterError, InputError, UnsupportedArchitectureError
from ggml_engine.ggml.gguf import GGUFArray, GGUFFile, GGUFType
from ggml_engine.reference.weights import Array, FileWeights

ARCHITECTURES = ("llama", "gemma3")

_HEAD_ROWS = 1 << 14  # of the output matrix at once: a large vocabulary would take gigabytes in float64


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis."""
    normed: Array = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight
    return normed


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    with np.errstate(over="ignore"):  # exp of a large number is infinite, and x / inf is the 0 that is wanted
        gated: Array = x / (1 + np.exp(-x))
    return gated


def gelu(x: Array) -> Array:
    """The tanh approximation, exact."""
    bent: Array = 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * x * (1 + 0.044715 * x * x)))
    return bent


def ggml_gelu(x: Array) -> Array:
    """As ggml's CPU has it: a table over f16 arguments with f16 results, between -10 and 10."""
    inside = x.clip(-10, 10).astype(np.float16).astype(np.float64)
    rounded = gelu(inside).astype(np.float16).astype(np.float64)
    return np.where(x <= -10, 0.0, np.where(x >= 10, x, rounded))


def softmax(x: Array) -> Array:
    """Over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    weights: Array = e / e.sum(axis=-1, keepdims=True)
    return weights


def rotate(x: Array, positions: Array, base: float, *, neox: bool, factors: Array | None = None) -> Array:
    """Rotary embedding of x [tokens, heads, size]: pairs side by side, or (neox) half a head apart."""
    size = x.shape[-1]
    angles = positions[:, None] * base ** (-np.arange(0, size, 2) / size)
    if factors is not None:
        angles = angles / factors
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
    first, second = (x[..., : size // 2], x[..., size // 2 :]) if neox else (x[..., 0::2], x[..., 1::2])
    out = np.empty_like(x)
    turned = first * cos - second * sin, first * sin + second * cos
    if neox:
        out[..., : size // 2], out[..., size // 2 :] = turned
    else:
        out[..., 0::2], out[..., 1::2] = turned
    return out


def visible(n_tokens: int, window: int) -> npt.NDArray[np.bool_]:
    """[query, key]: q <= p, and with a window w also p - w < q; window 0 is everything."""
    p, q = np.arange(n_tokens)[:, None], np.arange(n_tokens)[None, :]
    seen: npt.NDArray[np.bool_] = q <= p
    return seen & (q > p - window) if window else seen


def attention(q: Array, k: Array, v: Array, seen: npt.NDArray[np.bool_], scale: float) -> Array:
    """q and k [tokens, heads, size], v [tokens, heads, its own size] to [tokens, heads * v's size]; k, v: kv heads."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.matmul(q.transpose(1, 0, 2), k.transpose(1, 2, 0)) * scale  # [heads, queries, keys]
    mixed = np.matmul(softmax(np.where(seen, scores, -np.inf)), v.transpose(1, 0, 2))
    return np.ascontiguousarray(mixed.transpose(1, 0, 2)).reshape(len(q), -1)


class NaiveModel:
    """A `llama` or `gemma3` file, run by definition; no handle on it stays open.

    Raises GGUFError for a file that cannot be read, UnsupportedArchitectureError, and HyperparameterError for what the
    definition here leaves out (YaRN, experts, heads that are rotated in part).
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = path
        with GGUFFile.open(path) as file:
            self.architecture = file.metadata.text("general.architecture")
            if self.architecture not in ARCHITECTURES:
                raise UnsupportedArchitectureError(
                    f"there is a definition of {', '.join(ARCHITECTURES)}, not of {self.architecture!r}"
                )
            prefix = f"{self.architecture}."
            self._values = {
                key.removeprefix(prefix): _plain(file.metadata[key]) for key in file.metadata if key.startswith(prefix)
            }
            self.n_layer = int(self._values["block_count"])
            self.n_embd = int(self._values["embedding_length"])
            self.n_head = self._per_layer("attention.head_count", None)
            self.n_head_kv = self._per_layer("attention.head_count_kv", self.n_head)
            self.head_size = int(self._values.get("attention.key_length", self.n_embd // self.n_head[0]))
            self.eps = float(np.float32(self._values["attention.layer_norm_rms_epsilon"]))
            self.n_vocab = file.tensors["token_embd.weight"].shape[1]
        self._check()

    def _per_layer(self, key: str, default: list[int] | None) -> list[int]:
        value = self._values.get(key, default)
        if value is None:
            raise HyperparameterError(f"{self.architecture}.{key}", "is missing")
        return value if isinstance(value, list) else [int(value)] * self.n_layer

    def _check(self) -> None:
        kind = self._values.get("rope.scaling.type", "linear")
        wrong = {
            "rope.scaling.type": kind not in ("none", "linear"),
            "rope.scaling.attn_factor": self._values.get("rope.scaling.attn_factor", 1.0) != 1.0,
            "rope.dimension_count": self._values.get("rope.dimension_count", self.head_size) != self.head_size,
            "expert_count": bool(self._values.get("expert_count", 0)),
        }
        for key, is_wrong in wrong.items():
            if is_wrong:
                reason = f"is {self._values[key]!r}, which the definition here leaves out"
                raise HyperparameterError(f"{self.architecture}.{key}", reason)

    def window(self, layer: int) -> int:
        """How far back a layer sees; 0 is everything."""
        window = int(self._values.get("attention.sliding_window", 0)) if self.architecture == "gemma3" else 0
        pattern = self._values.get("attention.sliding_window_pattern", 6)
        if not isinstance(pattern, list):
            pattern = [pattern == 0 or i % pattern < pattern - 1 for i in range(self.n_layer)]
        return window if pattern[layer] else 0

    def logits(self, tokens: Sequence[int] | npt.NDArray[np.integer[Any]]) -> Array:
        """f64 [n_tokens, n_vocab] of one sequence from position 0. Raises InputError for no tokens or unknown ones."""
        ids = np.asarray(tokens, np.int64)
        if not ids.size or ids.min() < 0 or ids.max() >= self.n_vocab:
            raise InputError(f"one or more token ids of 0 to {self.n_vocab - 1} are needed, got {list(tokens)[:8]}")
        with GGUFFile.open(self._path) as file:
            return _Forward(self, FileWeights(file)).logits(ids)

    def base(self, layer: int) -> float:
        """The base of a layer's rotation."""
        key = "rope.freq_base_swa" if self.window(layer) else "rope.freq_base"
        return float(self._values.get(key, 10000.0))

    def scaling(self, layer: int) -> float:
        """What positions are divided by in a layer: long contexts are for layers that see far."""
        if self.window(layer) or self._values.get("rope.scaling.type") == "none":
            return 1.0
        return float(self._values.get("rope.scaling.factor", self._values.get("rope.scale_linear", 0.0))) or 1.0

    @property
    def scale(self) -> float:
        """What scores are multiplied by; gemma3's 27B (62 layers) has another (llama.cpp src/models/gemma3.cpp)."""
        is_27b = self.architecture == "gemma3" and self.n_layer == 62
        return float((self.n_embd / self.n_head[0] if is_27b else self.head_size) ** -0.5)

    @property
    def softcap(self) -> float:
        """The bound of logits; 0 is none."""
        return float(self._values.get("final_logit_softcapping", 0.0)) if self.architecture == "gemma3" else 0.0


class _Forward:
    """One run of a model over an open file."""

    def __init__(self, model: NaiveModel, weights: FileWeights) -> None:
        self._model = model
        self._weights = weights

    def logits(self, tokens: npt.NDArray[np.int64]) -> Array:
        model = self._model
        x = self._weights.rows("token_embd.weight", tokens)
        positions = np.arange(len(tokens), dtype=np.float64)
        gemma = model.architecture == "gemma3"
        if gemma:
            x = x * float(np.sqrt(np.float32(model.n_embd)))
        for layer in range(model.n_layer):
            x = (self._gemma3_block if gemma else self._llama_block)(layer, x, positions)
        logits = self._head(self._norm("output_norm", x))
        return model.softcap * np.tanh(logits / model.softcap) if model.softcap else logits

    def _head(self, x: Array) -> Array:
        name = "output.weight" if "output.weight" in self._weights else "token_embd.weight"
        logits = np.empty((len(x), self._model.n_vocab))
        for start in range(0, self._model.n_vocab, _HEAD_ROWS):
            stop = min(start + _HEAD_ROWS, self._model.n_vocab)
            logits[:, start:stop] = x @ self._weights.rows(name, np.arange(start, stop)).T
        return logits

    def _norm(self, name: str, x: Array) -> Array:
        return rms_norm(x, self._weights.tensor(f"{name}.weight"), self._model.eps)

    def _linear(self, name: str, x: Array) -> Array:
        product = x @ self._weights.tensor(f"{name}.weight").T
        bias = f"{name}.bias"
        return product + self._weights.tensor(bias) if bias in self._weights else product

    def _heads(self, layer: int, x: Array) -> tuple[Array, Array, Array]:
        n_kv = self._model.n_head_kv[layer]
        heads = {"q": self._model.n_head[layer], "k": n_kv, "v": n_kv}
        q, k, v = (self._linear(f"blk.{layer}.attn_{which}", x).reshape(len(x), n, -1) for which, n in heads.items())
        return q, k, v

    def _attend(self, layer: int, q: Array, k: Array, v: Array, positions: Array, factors: Array | None) -> Array:
        model = self._model
        neox = model.architecture == "gemma3"
        base, positions = model.base(layer), positions / model.scaling(layer)
        q, k = (rotate(x, positions, base, neox=neox, factors=factors) for x in (q, k))
        mixed = attention(q, k, v, visible(len(q), model.window(layer)), model.scale)
        return self._linear(f"blk.{layer}.attn_output", mixed)

    def _llama_block(self, layer: int, x: Array, positions: Array) -> Array:
        block = f"blk.{layer}"
        q, k, v = self._heads(layer, self._norm(f"{block}.attn_norm", x))
        factors = self._weights.tensor("rope_freqs.weight") if "rope_freqs.weight" in self._weights else None
        x = x + self._attend(layer, q, k, v, positions, factors)
        h = self._norm(f"{block}.ffn_norm", x)
        h = silu(self._linear(f"{block}.ffn_gate", h)) * self._linear(f"{block}.ffn_up", h)
        return x + self._linear(f"{block}.ffn_down", h)

    def _gemma3_block(self, layer: int, x: Array, positions: Array) -> Array:
        block = f"blk.{layer}"
        q, k, v = self._heads(layer, self._norm(f"{block}.attn_norm", x))
        q, k = self._norm(f"{block}.attn_q_norm", q), self._norm(f"{block}.attn_k_norm", k)
        x = x + self._norm(f"{block}.post_attention_norm", self._attend(layer, q, k, v, positions, None))
        h = self._norm(f"{block}.ffn_norm", x)
        h = ggml_gelu(self._linear(f"{block}.ffn_gate", h)) * self._linear(f"{block}.ffn_up", h)
        return x + self._norm(f"{block}.post_ffw_norm", self._linear(f"{block}.ffn_down", h))


def _plain(value: object) -> Any:
    if not isinstance(value, GGUFArray):
        return value
    return None if value.kind is GGUFType.STRING else value.numpy().tolist()
