"""The vocabulary that architecture files are written in: norm, q/k/v, rope, attention, feed-forward, output.

One `ModelGraph` builds one graph: it holds the builder, the weights, the step's inputs and the cache's face, and names
every tensor that it makes. It knows no architecture; what differs between them is in their files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ggml_engine.ggml.ops import GraphBuilder, Rope, Tensor
from ggml_engine.models.attention import AttentionForm, KvStore, attend
from ggml_engine.models.config import Hyperparameters


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
    outputs: Tensor | None  # i32 [outputs]: the tokens whose logits are wanted; None for all of them
    n_outputs: int
    kv: KvStore
    form: AttentionForm
    prepared: PreparedRows | None = None

    def weight(self, name: str) -> Tensor:
        """A required tensor; `name` without ".weight"."""
        return self.weights[f"{name}.weight"]

    def embed(self, scale: float | None = None) -> Tensor:
        """The embeddings of the step's tokens, times `scale`, and prepared ones, as they are, where those stand."""
        x = self.b.get_rows(self.weight("token_embd"), self.tokens, "inp_embd")
        if scale is not None:
            x = self.b.scale(x, scale, "inp_scaled")
        if self.prepared is not None:
            x = self.b.set_rows(x, self.prepared.rows, self.prepared.ids, "inp_with_prepared")
        return x

    def norm(self, x: Tensor, weight: str, name: str = "") -> Tensor:
        """RMS norm, times a weight."""
        scaled = self.b.rms_norm(x, self.hp.norm_rms_eps)
        return self.b.mul(scaled, self.weight(weight), name or f"{weight}.out")

    def linear(self, x: Tensor, weight: str) -> Tensor:
        """weight x, plus the bias if the file has one."""
        y = self.b.mul_mat(self.weight(weight), x, f"{weight}.out")
        bias = self.weights.get(f"{weight}.bias")
        return y if bias is None else self.b.add(y, bias, f"{weight}.biased")

    def heads(self, x: Tensor, n_head: int) -> Tensor:
        """[head * n_head, tokens] as [head, n_head, tokens]."""
        return self.b.reshape(x, x.ne[0] // n_head, n_head, x.ne[1])

    def qkv(self, x: Tensor, il: int) -> tuple[Tensor, Tensor, Tensor]:
        """Query and key of a layer, [head, heads, tokens] each, and value, [n_embd_v, tokens]."""
        prefix = f"blk.{il}"
        n_head, n_head_kv = self.hp.n_head[il], self.hp.n_head_kv[il]
        return (
            self.heads(self.linear(x, f"{prefix}.attn_q"), n_head),
            self.heads(self.linear(x, f"{prefix}.attn_k"), n_head_kv),
            self.linear(x, f"{prefix}.attn_v"),
        )

    def rope(self, x: Tensor, rope: Rope, name: str, factors: Tensor | None = None) -> Tensor:
        """Rotate by position."""
        return self.b.rope(x, self.positions, rope, factors, name)

    def attention(self, il: int, q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float = 0.0) -> Tensor | None:
        """Store k and v, attend with q, multiply by the output weight: [n_embd, tokens].

        None in the last layer of a step that wants no logits: what it leaves behind is K and V.
        """
        q, k, v = self.kv.rotate_k(il, q), self.kv.rotate_k(il, k), self.kv.rotate_v(il, v)
        for x in (q, v, k):
            self.b.expand(x)
        n_tokens = q.ne[2]
        self.kv.write(il, self.b.reshape(k, k.ne[0] * k.ne[1], n_tokens), v)  # before the read of the same memory
        if self.n_outputs == 0 and il == self.hp.n_layer - 1:
            return None
        mixed = attend(self.b, q, self.kv.read(il), self.form, scale, softcap, f"blk.{il}.attn")
        mixed = self.kv.rotate_v(il, mixed)
        return self.linear(mixed, f"blk.{il}.attn_output")

    def only_outputs(self, x: Tensor) -> Tensor:
        """The columns of the tokens whose logits are wanted."""
        return x if self.outputs is None else self.b.get_rows(x, self.outputs)

    def swiglu_ffn(self, x: Tensor, il: int) -> Tensor:
        """down(silu(gate x) * up x) (Shazeer 2020, arXiv:2002.05202)."""
        prefix = f"blk.{il}"
        up = self.linear(x, f"{prefix}.ffn_up")
        gate = self.linear(x, f"{prefix}.ffn_gate")
        return self.linear(self.b.swiglu(gate, up, f"{prefix}.ffn_swiglu"), f"{prefix}.ffn_down")

    def geglu_ffn(self, x: Tensor, il: int) -> Tensor:
        """down(gelu(gate x) * up x) (Shazeer 2020, arXiv:2002.05202)."""
        prefix = f"blk.{il}"
        up = self.linear(x, f"{prefix}.ffn_up")
        gate = self.linear(x, f"{prefix}.ffn_gate")
        return self.linear(self.b.geglu(gate, up, f"{prefix}.ffn_geglu"), f"{prefix}.ffn_down")

    def logits(self, x: Tensor) -> Tensor:
        """Final norm and output weight: f32 [n_vocab, outputs]."""
        return self.b.mul_mat(self.weight("output"), self.norm(x, "output_norm"), "result_output")

    def softcap(self, x: Tensor, cap: float) -> Tensor:
        """cap * tanh(x / cap) (Gemma Team 2024, arXiv:2408.00118)."""
        return self.b.scale(self.b.tanh(self.b.scale(x, 1.0 / cap)), cap)
