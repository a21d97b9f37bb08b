"""Random GGUF models of a few hundred KiB, whole enough for libllama to load, tokenize and run.

Weights are drawn so that activations stay near one and logits spread by about two: flat logits would hide mistakes,
large ones would make float64 and float32 part. Same arguments, same bytes.
"""

from __future__ import annotations

import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt

Type = gguf.GGMLQuantizationType
F32 = Type.F32
F16 = Type.F16
BF16 = Type.BF16
Q8_0 = Type.Q8_0
Q4_0 = Type.Q4_0

UNK, BOS, EOS = 0, 1, 2
N_SPECIAL = 3
N_BYTES = 256
VOCAB = 320  # the default: specials, bytes, the letters and a few words


def tokens(n_vocab: int) -> tuple[list[bytes], list[float], list[int]]:
    """Texts, scores and types of a sentencepiece vocabulary: specials, all bytes, then pieces that merge."""
    texts = [b"<unk>", b"<s>", b"</s>"] + [f"<0x{byte:02X}>".encode() for byte in range(N_BYTES)]
    kinds = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL] + [gguf.TokenType.BYTE] * N_BYTES
    space = "\u2581"
    pieces = [
        space,
        *string.ascii_lowercase,
        "th",
        "he",
        "in",
        "er",
        "an",
        space + "t",
        space + "a",
        "the",
        space + "the",
    ]
    pieces += [f"<extra_{i}>" for i in range(max(0, n_vocab - len(texts) - len(pieces)))]
    if not 0 < n_vocab - len(texts) <= len(pieces):
        raise ValueError(f"a vocabulary of {len(texts) + 1} or more tokens is needed, asked for {n_vocab}")
    pieces = pieces[: n_vocab - len(texts)]
    scores = [0.0] * len(texts) + [-float(i) for i in range(len(pieces))]
    kinds += [gguf.TokenType.NORMAL] * len(pieces)
    return texts + [piece.encode() for piece in pieces], scores, [int(kind) for kind in kinds]


class _Weights:
    """Draws tensors and hands them to the writer in their storage type; one-dimensional ones stay f32."""

    def __init__(self, writer: gguf.GGUFWriter, seed: int, matrix_type: Type) -> None:
        self._writer = writer
        self._rng = np.random.default_rng(seed)
        self._type = matrix_type

    def matrix(self, name: str, n_in: int, n_out: int, gain: float = 1.0) -> None:
        """[n_out, n_in] in numpy's order, ne0 = n_in: keeps the variance of its input, times gain squared."""
        values = self._rng.standard_normal((n_out, n_in), np.float32) * np.float32(gain / np.sqrt(n_in))
        self.add(name, values)

    def add(self, name: str, values: npt.NDArray[np.float32]) -> None:
        """A matrix of given values."""
        if self._type == F32:
            self._writer.add_tensor(name, values)
        elif self._type == F16:
            self._writer.add_tensor(name, values.astype(np.float16))
        else:
            self._writer.add_tensor(name, gguf.quants.quantize(values, self._type), raw_dtype=self._type)

    def norm(self, name: str, n: int) -> None:
        """Around one, so that leaving it out shows."""
        self._writer.add_tensor(name, (1 + 0.2 * self._rng.standard_normal(n)).astype(np.float32))

    def bias(self, name: str, n: int) -> None:
        """Large enough to show."""
        self._writer.add_tensor(name, (0.5 * self._rng.standard_normal(n)).astype(np.float32))

    def vector(self, name: str, values: npt.ArrayLike) -> None:
        """Stored as f32."""
        self._writer.add_tensor(name, np.asarray(values, np.float32))


def _common(writer: gguf.GGUFWriter, n_vocab: int, chat_template: str | None) -> None:
    texts, scores, kinds = tokens(n_vocab)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(texts)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_unk_token_id(UNK)
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(True)
    if chat_template is not None:
        writer.add_chat_template(chat_template)


def _sizes(
    writer: gguf.GGUFWriter, n_layer: int, n_embd: int, n_head: int, n_head_kv: int | Sequence[int], head_size: int,
    value_size: int, n_ff: int, context_length: int, rope_base: float, eps: float,
) -> None:  # fmt: skip
    writer.add_block_count(n_layer)
    writer.add_context_length(context_length)
    writer.add_embedding_length(n_embd)
    writer.add_feed_forward_length(n_ff)
    writer.add_head_count(n_head)
    writer.add_head_count_kv(n_head_kv)
    writer.add_key_length(head_size)
    writer.add_value_length(value_size)
    writer.add_layer_norm_rms_eps(eps)
    writer.add_rope_freq_base(rope_base)


def _finish(writer: gguf.GGUFWriter, metadata: Mapping[str, Any]) -> None:
    for key, value in metadata.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write_llama(
    path: Path, *, n_layer: int = 2, n_embd: int = 64, n_head: int = 4, n_head_kv: int | Sequence[int] = 2,
    head_size: int | None = None, value_size: int | None = None, biases: bool = False, n_ff: int = 96, n_vocab: int = VOCAB, context_length: int = 512, seed: int = 0, tied: bool = False, types: Type = F32,
    rope_base: float = 10000.0, rope_factors: Sequence[float] | None = None, eps: float = 1e-5,
    chat_template: str | None = None, metadata: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """A `llama` model: grouped heads, rotary pairs side by side, gated SiLU.

    `types` is the storage type of all matrices. `rope_factors` (head_size / 2 of them) are Llama 3's. `n_head_kv` may
    differ by layer, and the heads of V may have their own `value_size`. `metadata` adds keys after the others.
    """
    head_size = n_embd // n_head if head_size is None else head_size
    value_size = head_size if value_size is None else value_size
    kv_heads = [n_head_kv] * n_layer if isinstance(n_head_kv, int) else list(n_head_kv)
    writer = gguf.GGUFWriter(path, "llama")
    _sizes(writer, n_layer, n_embd, n_head, n_head_kv, head_size, value_size, n_ff, context_length, rope_base, eps)
    writer.add_rope_dimension_count(head_size)
    writer.add_vocab_size(n_vocab)
    _common(writer, n_vocab, chat_template)
    weights = _Weights(writer, seed, types)
    weights.matrix("token_embd.weight", n_embd, n_vocab, gain=2.0)
    for layer in range(n_layer):
        block = f"blk.{layer}"
        weights.norm(f"{block}.attn_norm.weight", n_embd)
        weights.matrix(f"{block}.attn_q.weight", n_embd, n_head * head_size, gain=1.5)
        weights.matrix(f"{block}.attn_k.weight", n_embd, kv_heads[layer] * head_size, gain=1.5)
        weights.matrix(f"{block}.attn_v.weight", n_embd, kv_heads[layer] * value_size)
        weights.matrix(f"{block}.attn_output.weight", n_head * value_size, n_embd)
        weights.norm(f"{block}.ffn_norm.weight", n_embd)
        weights.matrix(f"{block}.ffn_gate.weight", n_embd, n_ff)
        weights.matrix(f"{block}.ffn_up.weight", n_embd, n_ff)
        weights.matrix(f"{block}.ffn_down.weight", n_ff, n_embd, gain=1.5)
        if biases:
            n_kv = kv_heads[layer]
            sizes = {"q": n_head * head_size, "k": n_kv * head_size, "v": n_kv * value_size, "output": n_embd}
            for part, size in sizes.items():
                weights.bias(f"{block}.attn_{part}.bias", size)
            for part, size in {"gate": n_ff, "up": n_ff, "down": n_embd}.items():
                weights.bias(f"{block}.ffn_{part}.bias", size)
    if rope_factors is not None:
        weights.vector("rope_freqs.weight", rope_factors)
    weights.norm("output_norm.weight", n_embd)
    if not tied:
        weights.matrix("output.weight", n_embd, n_vocab, gain=2.0)
    _finish(writer, metadata or {})
    return path


def write_gemma3(
    path: Path, *, n_layer: int = 7, n_embd: int = 64, n_head: int = 4, n_head_kv: int = 1, head_size: int = 32,
    value_size: int | None = None, n_ff: int = 96, n_vocab: int = VOCAB, context_length: int = 512, seed: int = 0, window: int = 5,
    pattern: int | Sequence[bool] | None = None, tied: bool = True, types: Type = F32, rope_base: float = 1e6,
    rope_base_swa: float | None = None, rope_scale: float | None = None, softcap: float | None = None, eps: float = 1e-6,
    chat_template: str | None = None, metadata: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """A `gemma3` model: windows of `window` tokens in all but every `pattern`-th layer (6 where the key is absent).

    A `pattern` of booleans says per layer whether it has the window. `rope_scale` divides positions in full layers.
    `window=0` leaves the key out: every layer is full.
    """
    value_size = head_size if value_size is None else value_size
    writer = gguf.GGUFWriter(path, "gemma3")
    _sizes(writer, n_layer, n_embd, n_head, n_head_kv, head_size, value_size, n_ff, context_length, rope_base, eps)
    if window:
        writer.add_sliding_window(window)
    if pattern is not None:
        writer.add_sliding_window_pattern(pattern)
    if rope_base_swa is not None:
        writer.add_float32("gemma3.rope.freq_base_swa", rope_base_swa)
    if rope_scale is not None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope_scale)
    if softcap is not None:
        writer.add_final_logit_softcapping(softcap)
    _common(writer, n_vocab, chat_template)
    weights = _Weights(writer, seed, types)
    weights.matrix("token_embd.weight", n_embd, n_vocab, gain=2.0)
    for layer in range(n_layer):
        block = f"blk.{layer}"
        weights.norm(f"{block}.attn_norm.weight", n_embd)
        weights.matrix(f"{block}.attn_q.weight", n_embd, n_head * head_size)
        weights.matrix(f"{block}.attn_k.weight", n_embd, n_head_kv * head_size)
        weights.matrix(f"{block}.attn_v.weight", n_embd, n_head_kv * value_size)
        weights.norm(f"{block}.attn_q_norm.weight", head_size)
        weights.norm(f"{block}.attn_k_norm.weight", head_size)
        weights.matrix(f"{block}.attn_output.weight", n_head * value_size, n_embd)
        weights.norm(f"{block}.post_attention_norm.weight", n_embd)
        weights.norm(f"{block}.ffn_norm.weight", n_embd)
        weights.matrix(f"{block}.ffn_gate.weight", n_embd, n_ff)
        weights.matrix(f"{block}.ffn_up.weight", n_embd, n_ff)
        weights.matrix(f"{block}.ffn_down.weight", n_ff, n_embd)
        weights.norm(f"{block}.post_ffw_norm.weight", n_embd)
    weights.norm("output_norm.weight", n_embd)
    if not tied:
        weights.matrix("output.weight", n_embd, n_vocab, gain=2.0)
    _finish(writer, metadata or {})
    return path
