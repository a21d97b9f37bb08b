"""The vocabulary that architecture files are written in: norm, q/k/v, rope, attention, feed-forward, output.

One `ModelGraph` builds one graph: it holds the builder, the weights, the step's inputs and the cache's face, and names
every tensor that it makes. It knows no architecture; what differs between them is in their files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from ggml_engine.ggml.ops import GraphBuilder, Rope, Tensor, wrap
from ggml_engine.models.adapted import AdaptedProducts
from ggml_engine.models.attention import AttentionForm, KvStore, attend
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.joint import JointProducts

Activation: TypeAlias = Literal["swiglu", "geglu", "reglu", "gelu", "relu", "relu_squared", "silu"]
OfPositions = Callable[[npt.NDArray[np.int32]], npt.NDArray[np.float32]]


@dataclass(frozen=True, slots=True)
class PreparedRows:
    """Embeddings that come from outside: `rows` f32 [n_embd, n] stand in the step's rows `ids` i64 [n]."""

    rows: Tensor
    ids: Tensor


@dataclass(frozen=True, slots=True)
class ModelGraph:
    """What an architecture builds from. Activations are f32 [n_embd, tokens]."""

    b: GraphBuilder
    hp: Hyperparameters
    weights: Mapping[str, Tensor]
    tokens: Tensor  # i32 [tokens]
    positions: Tensor  # i32 [tokens]
    of_positions: Callable[[str, OfPositions], Tensor]  # an input f32 [1, 1, tokens] of this name, by position
    outputs: Tensor | None  # i32 [outputs]: the tokens whose logits are wanted; None for all of them
    n_outputs: int
    n_ctx: int  # the longest that a sequence can get
    kv: KvStore
    form: AttentionForm
    prepared: PreparedRows | None = None
    rows_apart: bool = False  # a token's bits must not depend on what the others are
    ends_at_norm: bool = False  # the result is what the output weight would be multiplied with
    adapted: AdaptedProducts | None = None
    joint: JointProducts | None = None

    def weight(self, name: str) -> Tensor:
        """A required tensor; `name` without ".weight"."""
        return self.weights[f"{name}.weight"]

    def embed(self, scale: float | None = None) -> Tensor:
        """The embeddings of the step's tokens, times `scale`, and prepared ones, as they are, where those stand.

        Plus those of their positions, where the model has any: a position beyond that table must not come here.
        """
        x = self.b.get_rows(self.weight("token_embd"), self.tokens, "inp_embd")
        if self.adapted is not None:
            x = self.adapted.add_to_rows(x, "token_embd.weight", self.tokens)
        if scale is not None:
            x = self.b.scale(x, scale, "inp_scaled")
        if self.prepared is not None:
            x = self.b.set_rows(x, self.prepared.rows, self.prepared.ids, "inp_with_prepared")
        if (table := self.weights.get("position_embd.weight")) is not None:
            x = self.b.add(x, self.b.get_rows(table, self.positions, "position_embd"), "inp_with_positions")
        return x

    # ---- norms and products

    def norm(self, x: Tensor, weight: str, name: str = "", *, eps: float | None = None) -> Tensor:
        """The model's kind of norm, times a weight, plus the bias if the file has one; `eps` stands for the model's."""
        eps = self.hp.norm_eps if eps is None else eps
        scaled = self.b.layer_norm(x, eps) if self.hp.has_layer_norm else self.rms_norm(x, eps)
        y = self.b.mul(scaled, self.weight(weight), name or f"{weight}.out")
        if self.joint is not None and not self.hp.has_layer_norm:
            self.joint.note_norm(y, x, self.weight(weight), eps)
        bias = self.weights.get(f"{weight}.bias")
        return y if bias is None else self.b.add(y, bias, f"{weight}.biased")

    def rms_norm(self, x: Tensor, eps: float | None = None) -> Tensor:
        """RMS norm without a weight."""
        return self.b.rms_norm(x, self.hp.norm_eps if eps is None else eps)

    def optional_norm(self, x: Tensor, weight: str) -> Tensor:
        """As `norm`, where the file has the weight; else x."""
        return self.norm(x, weight) if f"{weight}.weight" in self.weights else x

    def head_norm(self, x: Tensor, weight: str) -> Tensor:
        """Norm of every head of x [head, heads, tokens], or of all of them as one row where the weight is as wide.

        x where the file has no such weight.
        """
        found = self.weights.get(f"{weight}.weight")
        if found is None or found.ne[0] == x.ne[0]:
            return self.optional_norm(x, weight)
        return self.heads(self.norm(self.all_heads(x), weight), x.ne[1])

    def linear(self, x: Tensor, weight: str, *, f32_accumulation: bool = False) -> Tensor:
        """weight x, times the scale, plus what adapters change, plus the bias, where there are any."""
        if not f32_accumulation:
            return self.linears(x, [weight])[0]
        y = self.b.mul_mat(self.weight(weight), x, f"{weight}.out", f32_accumulation=True)
        return self._completed(y, weight, x)

    def linears(self, x: Tensor, weights: Sequence[str]) -> list[Tensor]:
        """As `linear`, of several weights: those that can be are one operation."""
        found: dict[str, Tensor] = {}
        if self.joint is not None:
            taken = {name: self.weight(name) for name in weights if self.joint.takes(x, self.weight(name))}
            found = self.joint.multiply(x, taken) if taken else {}
        for name in weights:
            if name not in found:
                found[name] = self.b.mul_mat(self.weight(name), x, f"{name}.out")
        return [self._completed(found[name], name, x) for name in weights]

    def _completed(self, y: Tensor, weight: str, x: Tensor) -> Tensor:
        """A product with the scale, what adapters change, and the bias, where there are any."""
        if (scale := self.weights.get(f"{weight}.scale")) is not None:
            y = self.b.mul(y, scale, f"{weight}.scaled")
        y = self._with_changes(y, weight, x)
        if (bias := self.weights.get(f"{weight}.bias")) is not None:
            y = self.b.add(y, bias, f"{weight}.biased")
        return y

    def add(self, a: Tensor, b: Tensor, name: str = "") -> Tensor:
        """a + b, in the operation of the product that one of them is, where it is one."""
        summed = None if self.joint is None else self.joint.add(a, b, name)
        return self.b.add(a, b, name) if summed is None else summed

    def product(self, x: Tensor, weight: str, name: str = "") -> Tensor:
        """weight x and what adapters change of it, without scale and bias."""
        return self._with_changes(self.b.mul_mat(self.weight(weight), x, name or f"{weight}.out"), weight, x)

    def _with_changes(self, y: Tensor, weight: str, x: Tensor) -> Tensor:
        return y if self.adapted is None else self.adapted.add_to_product(y, f"{weight}.weight", x)

    # ---- attention

    def heads(self, x: Tensor, n_head: int) -> Tensor:
        """[head * n_head, tokens] as [head, n_head, tokens]."""
        if not x.is_contiguous:
            size = x.ne[0] // n_head
            return self.b.view(x, (size, n_head, x.ne[1]), (x.type.row_bytes(size), x.nb[1]), 0)
        return self.b.reshape(x, x.ne[0] // n_head, n_head, x.ne[1])

    def all_heads(self, x: Tensor) -> Tensor:
        """[head, heads, tokens] as [head * heads, tokens]; heads lie one after the other."""
        if x.is_contiguous:
            return self.b.reshape(x, x.ne[0] * x.ne[1], x.ne[2])
        return self.b.view(x, (x.ne[0] * x.ne[1], x.ne[2]), (x.nb[2],), 0)

    def qkv(self, x: Tensor, il: int, *, clamp: float = 0.0) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of a layer, [head, heads, tokens] each, whether their weights are one tensor or three.

        `clamp` > 0 bounds them.
        """
        if self.hp.has_fused_qkv:
            return self.split_qkv(self._clamped(self._fused_qkv(x, il), clamp), il)
        parts = self._qkv_parts(il)
        products = self.linears(x, [f"blk.{il}.attn_{part}" for part, _, _ in parts])
        q, k, v = (
            self.heads(self._clamped(y, clamp), n_head) for y, (_, n_head, _) in zip(products, parts, strict=True)
        )
        return q, k, v

    def _fused_qkv(self, x: Tensor, il: int) -> Tensor:
        """What one weight makes of x, plus its bias, or those of q, k and v where the file has these apart."""
        name = f"blk.{il}.attn_qkv"
        fused = self.linear(x, name)
        apart = [self.weights.get(f"blk.{il}.attn_{part}.bias") for part in "qkv"]
        biases = [bias for bias in apart if bias is not None]
        if f"{name}.bias" in self.weights or len(biases) < len(apart):
            return fused
        bias = self.b.concat(self.b.concat(biases[0], biases[1], 0), biases[2], 0)
        return self.b.add(fused, bias, f"{name}.biased")

    def split_qkv(self, fused: Tensor, il: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of a layer, as views [head, heads, tokens] of the three after each other."""
        views = []
        first = 0
        for _, n_head, size in self._qkv_parts(il):
            strides = (fused.type.row_bytes(size), fused.nb[1])
            views.append(self.b.view(fused, (size, n_head, fused.ne[1]), strides, fused.type.row_bytes(first)))
            first += n_head * size
        return views[0], views[1], views[2]

    def _qkv_parts(self, il: int) -> tuple[tuple[str, int, int], ...]:
        """Name, number of heads and size of a head of each."""
        hp = self.hp
        return (
            ("q", hp.n_head[il], hp.n_embd_head_k[il]),
            ("k", hp.n_head_kv[il], hp.n_embd_head_k[il]),
            ("v", hp.n_head_kv[il], hp.n_embd_head_v[il]),
        )

    def _clamped(self, x: Tensor, bound: float) -> Tensor:
        return self.b.clamp(x, -bound, bound) if bound > 0 else x

    def rope(self, x: Tensor, rope: Rope | None, name: str, factors: Tensor | None = None) -> Tensor:
        """Rotate by position; x where the layer does not."""
        return x if rope is None else self.b.rope(x, self.positions, rope, factors, name)

    def rope_factors(self) -> Tensor | None:
        """Factors of rotation frequencies: the file's fixed ones, or its long or short ones by the context's length."""
        fixed = self.weights.get("rope_freqs.weight")
        if fixed is not None:
            return fixed
        length = "long" if self.n_ctx > self.hp.n_ctx_long else "short"
        return self.weights.get(f"rope_factors_{length}.weight")

    def rotated_qkv(self, x: Tensor, il: int, factors: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """As `qkv`, with the heads of q and k normed where the file has norms, and rotated."""
        prefix = f"blk.{il}"
        q, k, v = self.qkv(x, il)
        has_norms = any(f"{prefix}.attn_{part}_norm.weight" in self.weights for part in "qk")
        both = None if has_norms or self.hp.rope[il] is None else self._together(q, k)
        if both is not None:
            rotated = self.rope(both, self.hp.rope[il], f"{prefix}.qk_rope", factors)
            return self._heads_of(rotated, 0, q.ne[1]), self._heads_of(rotated, q.ne[1], k.ne[1]), v
        q = self.rope(self.head_norm(q, f"{prefix}.attn_q_norm"), self.hp.rope[il], f"{prefix}.q_rope", factors)
        k = self.rope(self.head_norm(k, f"{prefix}.attn_k_norm"), self.hp.rope[il], f"{prefix}.k_rope", factors)
        return q, k, v

    def _together(self, q: Tensor, k: Tensor) -> Tensor | None:
        """Heads of q, then of k, as one tensor [head, heads, tokens], where they lie so; else None."""
        n_tokens, source = q.ne[2], q.ptr.view_src
        if n_tokens > 1 and self.form is not AttentionForm.CELLS:
            return None  # ggml's forms take other paths for queries whose tokens lie apart
        follows = bool(source) and source == k.ptr.view_src and q.ne[0] == k.ne[0] and q.nb[1] == k.nb[1]
        if not follows or k.ptr.view_offs != q.ptr.view_offs + q.ne[1] * q.nb[1]:
            return None
        if n_tokens > 1 and q.nb[2] != k.nb[2]:
            return None
        n_head = q.ne[1] + k.ne[1]
        stride = q.nb[2] if n_tokens > 1 else n_head * q.nb[1]
        return self.b.view(wrap(source), (q.ne[0], n_head, n_tokens), (q.nb[1], stride), int(q.ptr.view_offs))

    def _heads_of(self, x: Tensor, first: int, n: int) -> Tensor:
        """Heads `first` to `first + n` of x [head, heads, tokens], packed where there is one token."""
        strides = (x.nb[1], x.nb[2] if x.ne[2] > 1 else n * x.nb[1])
        return self.b.view(x, (x.ne[0], n, x.ne[2]), strides, first * x.nb[1])

    def self_attention(
        self,
        x: Tensor,
        il: int,
        factors: Tensor | None = None,
        *,
        scaled_queries: bool = False,
        f32_accumulation: bool = False,
    ) -> Tensor | None:
        """Attention over `rotated_qkv` of x: [n_embd, tokens].

        `scaled_queries` multiplies the queries by the scale in place of the scores; the rest as in `attention`.
        """
        q, k, v = self.rotated_qkv(x, il, factors)
        scale = self.hp.attention_scale
        if scaled_queries and self.form is not AttentionForm.CELLS:  # the kernel scales queries anyway
            q, scale = self.b.scale(q, scale, f"blk.{il}.q_scaled"), 1.0
        return self.attention(il, q, k, v, scale, f32_accumulation=f32_accumulation)

    def attention(
        self,
        il: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        scale: float,
        *,
        sinks: Tensor | None = None,
        f32_accumulation: bool = False,
    ) -> Tensor | None:
        """`mixed_values`, multiplied by the output weight: [n_embd, tokens]."""
        mixed = self.mixed_values(il, q, k, v, scale, sinks=sinks)
        if mixed is None:
            return None
        return self.linear(mixed, f"blk.{il}.attn_output", f32_accumulation=f32_accumulation)

    def mixed_values(
        self,
        il: int,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        scale: float,
        *,
        sinks: Tensor | None = None,
        v_up: Tensor | None = None,
    ) -> Tensor | None:
        """Store k and v [head, heads, tokens], attend with q: the values' mix, [head_v * heads, tokens].

        A layer that reads another's K and V gives None for its own. `sinks` f32 [heads] are scores that only the
        softmax sees; `v_up` [head_v, size, heads] multiplies each head's mix. None in the last layer of a step that
        wants no logits: what it leaves behind is K and V.
        """
        store = self.hp.kv_index(il)
        q = self.kv.rotate_k(store, q)
        self.b.expand(q)
        if k is not None and v is not None:
            self._store(store, k, v)
        if self.n_outputs == 0 and il == self.hp.n_layer - 1:
            return None
        rows = self.kv.read(store)
        softcap = self.hp.attention_softcap
        mixed = attend(
            self.b, q, rows, self.form, scale, softcap, f"blk.{il}.attn", sinks=sinks, v_up=v_up
        )  # fmt: skip
        return self.kv.rotate_v(store, mixed)

    def _store(self, store: int, k: Tensor, v: Tensor) -> None:
        k, v = self.kv.rotate_k(store, k), self.kv.rotate_v(store, self.all_heads(v))
        for x in (v, k):
            self.b.expand(x)
        self.kv.write(store, self.all_heads(k), v)  # before the read of the same memory

    # ---- feed-forward

    def ffn(self, x: Tensor, il: int, activation: Activation, *, f32_accumulation: bool = False) -> Tensor:
        """down(act(gate x) * up x) for the gated ones (Shazeer 2020, arXiv:2002.05202), else down(act(up x))."""
        return self.mlp(x, f"blk.{il}.ffn", activation, f32_accumulation=f32_accumulation)

    def mlp(
        self, x: Tensor, prefix: str, activation: Activation, suffix: str = "", *, f32_accumulation: bool = False
    ) -> Tensor:
        """As `ffn`, of the weights `prefix`_up`suffix` and so on.

        Without a gate weight the gated ones take gate and up as the halves of what the up weight gives.
        """
        up, gate = f"{prefix}_up{suffix}", f"{prefix}_gate{suffix}"
        if f"{gate}.weight" in self.weights:
            gated, y = self.linears(x, [gate, up])
            y = self.gated(activation, gated, y, f"{prefix}_act{suffix}")
        else:
            y = self.activated(activation, self.linear(x, up), f"{prefix}_act{suffix}")
        return self.linear(y, f"{prefix}_down{suffix}", f32_accumulation=f32_accumulation)

    def gated(self, activation: Activation, gate: Tensor, up: Tensor, name: str) -> Tensor:
        """act(gate) * up."""
        if activation == "swiglu":
            return self.b.swiglu(gate, up, name)
        if activation == "geglu":
            return self.b.geglu(gate, up, name)
        if activation == "reglu":
            return self.b.reglu(gate, up, name)
        raise ValueError(f"{activation} has no gate")

    def activated(self, activation: Activation, x: Tensor, name: str) -> Tensor:
        """act(x); of the gated ones over the halves of x."""
        if activation == "swiglu":
            return self.b.swiglu_halves(x, name)
        if activation == "geglu":
            return self.b.geglu_halves(x, name)
        if activation == "gelu":
            return self.b.gelu(x, name)
        if activation == "silu":
            return self.b.silu(x, name)
        if activation == "relu":
            return self.b.relu(x, name)
        if activation == "relu_squared":
            return self.b.sqr(self.b.relu(x), name)
        raise ValueError(f"{activation} needs a gate")

    # ---- the end

    def only_outputs(self, x: Tensor) -> Tensor:
        """The columns of the tokens whose logits are wanted."""
        return x if self.outputs is None else self.b.get_rows(x, self.outputs)

    def at_last_layer(self, il: int, *xs: Tensor) -> list[Tensor]:
        """In the last layer only the outputs' columns go on."""
        return [self.only_outputs(x) for x in xs] if il == self.hp.n_layer - 1 else list(xs)

    def logits(self, x: Tensor) -> Tensor:
        """Final norm, output weight, scale and cap, where there are any: f32 [n_vocab, outputs].

        Of a graph that `ends_at_norm` the normed x alone: f32 [n_embd, outputs].
        """
        normed = self.norm(x, "output_norm")
        if self.ends_at_norm:
            return normed
        y = self.linear(normed, "output")
        if self.hp.logit_scale != 1.0:
            y = self.b.scale(y, self.hp.logit_scale, "result_scaled")
        return self.softcap(y, self.hp.logit_softcap) if self.hp.logit_softcap else y

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap) (Gemma Team 2024, arXiv:2408.00118)."""
        return self.b.scale(self.b.tanh(self.b.scale(x, 1.0 / cap)), cap)
