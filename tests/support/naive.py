"""Models by definition, in numpy float64: one sequence, the whole score matrix, a mask from the window's words.

Reads its weights with gguf-py and shares nothing with the engine, so that a mistake there is not repeated here. Slow on
purpose. Sources: Touvron et al., arXiv:2302.13971 (llama); Gemma 3 report, arXiv:2503.19786.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def silu(x: Array) -> Array:
    """x * sigmoid(x)."""
    return x / (1 + np.exp(-x))


def gelu(x: Array) -> Array:
    """The tanh approximation, exact."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * x * (1 + 0.044715 * x * x)))


def ggml_gelu(x: Array) -> Array:
    """As ggml's CPU has it: a table over f16 arguments with f16 results, between -10 and 10."""
    rounded = gelu(x.astype(np.float16).astype(np.float64)).astype(np.float16).astype(np.float64)
    return np.where(x <= -10, 0.0, np.where(x >= 10, x, rounded))


def softmax(x: Array) -> Array:
    """Over the last axis."""
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


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
    seen = q <= p
    return seen & (q > p - window) if window else seen


def attention(q: Array, k: Array, v: Array, seen: npt.NDArray[np.bool_], scale: float) -> Array:
    """q and k [tokens, heads, size], v [tokens, heads, its own size] to [tokens, heads * v's size]; k, v: kv heads."""
    group = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("phd,qhd->hpq", q, k) * scale
    weights = softmax(np.where(seen, scores, -np.inf))
    return np.einsum("hpq,qhd->phd", weights, v).reshape(len(q), -1)


class NaiveModel:
    """A `llama` or `gemma3` file, run by definition."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        reader = gguf.GGUFReader(path)
        self._values: dict[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        self._tensors: dict[str, Array] = {
            tensor.name: np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float64)
            for tensor in reader.tensors
        }
        self.architecture: str = self._values["general.architecture"]
        if self.architecture not in {"llama", "gemma3"}:
            raise ValueError(f"no definition of {self.architecture}")
        self.n_layer = int(self._get("block_count"))
        self.n_embd = int(self._get("embedding_length"))
        self.n_head = int(self._get("attention.head_count"))
        self.n_head_kv = self._get("attention.head_count_kv", self.n_head)  # or one for each layer
        self.head_size = int(self._get("attention.key_length", self.n_embd // self.n_head))
        self.eps = float(np.float32(self._get("attention.layer_norm_rms_epsilon")))

    def _get(self, key: str, default: Any = None) -> Any:
        return self._values.get(f"{self.architecture}.{key}", default)

    def weight(self, name: str) -> Array:
        """A tensor in float64; matrices are [n_out, n_in]."""
        return self._tensors[f"{name}.weight"]

    def window(self, layer: int) -> int:
        """How far back a layer sees; 0 is everything."""
        window = int(self._get("attention.sliding_window", 0)) if self.architecture == "gemma3" else 0
        pattern = self._get("attention.sliding_window_pattern", 6)
        if not isinstance(pattern, list):
            pattern = [pattern == 0 or i % pattern < pattern - 1 for i in range(self.n_layer)]
        return window if pattern[layer] else 0

    def logits(self, tokens: Sequence[int]) -> Array:
        """[n_tokens, n_vocab] of one sequence from position 0."""
        x = self.weight("token_embd")[np.asarray(tokens)]
        positions = np.arange(len(tokens), dtype=np.float64)
        gemma = self.architecture == "gemma3"
        if gemma:
            x = x * float(np.float32(np.sqrt(np.float32(self.n_embd))))
        for layer in range(self.n_layer):
            x = (self._gemma3_block if gemma else self._llama_block)(layer, x, positions)
        x = rms_norm(x, self.weight("output_norm"), self.eps)
        head = "output" if "output.weight" in self._tensors else "token_embd"
        logits = x @ self.weight(head).T
        cap = float(self._get("final_logit_softcapping", 0.0)) if gemma else 0.0
        return cap * np.tanh(logits / cap) if cap else logits

    def _linear(self, name: str, x: Array) -> Array:
        return x @ self.weight(name).T + self._tensors.get(f"{name}.bias", 0.0)

    def _project(self, layer: int, x: Array) -> tuple[Array, Array, Array]:
        n_kv = int(self.n_head_kv[layer] if isinstance(self.n_head_kv, list) else self.n_head_kv)
        heads = {"q": self.n_head, "k": n_kv, "v": n_kv}
        q, k, v = (self._linear(f"blk.{layer}.attn_{which}", x).reshape(len(x), n, -1) for which, n in heads.items())
        return q, k, v

    def _llama_block(self, layer: int, x: Array, positions: Array) -> Array:
        block = f"blk.{layer}"
        q, k, v = self._project(layer, rms_norm(x, self.weight(f"{block}.attn_norm"), self.eps))
        base = float(self._get("rope.freq_base", 10000.0))
        factors = self._tensors.get("rope_freqs.weight")
        positions = positions / float(self._get("rope.scaling.factor", 1.0))
        q = rotate(q, positions, base, neox=False, factors=factors)
        k = rotate(k, positions, base, neox=False, factors=factors)
        seen = visible(len(x), self.window(layer))
        x = x + self._linear(f"{block}.attn_output", attention(q, k, v, seen, self.head_size**-0.5))
        h = rms_norm(x, self.weight(f"{block}.ffn_norm"), self.eps)
        h = silu(self._linear(f"{block}.ffn_gate", h)) * self._linear(f"{block}.ffn_up", h)
        return x + self._linear(f"{block}.ffn_down", h)

    def _gemma3_block(self, layer: int, x: Array, positions: Array) -> Array:
        block = f"blk.{layer}"
        q, k, v = self._project(layer, rms_norm(x, self.weight(f"{block}.attn_norm"), self.eps))
        q = rms_norm(q, self.weight(f"{block}.attn_q_norm"), self.eps)
        k = rms_norm(k, self.weight(f"{block}.attn_k_norm"), self.eps)
        window = self.window(layer)
        if window:
            base = float(self._get("rope.freq_base_swa", 10000.0))
        else:
            base = float(self._get("rope.freq_base", 10000.0))
            positions = positions / float(self._get("rope.scaling.factor", 1.0))
        q, k = rotate(q, positions, base, neox=True), rotate(k, positions, base, neox=True)
        # the 27B (62 layers) divides by another size (llama.cpp src/models/gemma3.cpp)
        scale = (self.n_embd / self.n_head) ** -0.5 if self.n_layer == 62 else self.head_size**-0.5
        h = self._linear(f"{block}.attn_output", attention(q, k, v, visible(len(x), window), scale))
        x = x + rms_norm(h, self.weight(f"{block}.post_attention_norm"), self.eps)
        h = rms_norm(x, self.weight(f"{block}.ffn_norm"), self.eps)
        h = ggml_gelu(self._linear(f"{block}.ffn_gate", h)) * self._linear(f"{block}.ffn_up", h)
        return x + rms_norm(self._linear(f"{block}.ffn_down", h), self.weight(f"{block}.post_ffw_norm"), self.eps)
