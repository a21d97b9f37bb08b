"""Hyperparameters: read from a file's metadata once, checked once, frozen.

What every graph is built from; how an architecture reads them is said in its own file.
"""

from __future__ import annotations

from dataclasses import dataclass

from ggml_engine.ggml.ops import Rope
from ggml_engine.models.experts import Experts
from ggml_engine.models.sizes import Sizes


@dataclass(frozen=True, slots=True)
class KvLayer:
    """What one layer keeps per cell: elements of K and V over `n_head` heads.

    `window` is how far back its queries see (0 = everything); with `is_chunked` it does not slide, but is the chunk of
    so many positions that a query is in. `v_in_k`: V is the first `n_embd_v` elements of K.
    """

    n_embd_k: int
    n_embd_v: int
    window: int = 0
    n_head: int = 1
    v_in_k: bool = False
    is_chunked: bool = False

    @property
    def head_k(self) -> int:
        """Elements of K per head."""
        return self.n_embd_k // self.n_head

    @property
    def head_v(self) -> int:
        """Elements of V per head."""
        return self.n_embd_v // self.n_head


@dataclass(frozen=True, slots=True, kw_only=True)
class Hyperparameters(Sizes):
    """What a model's graph is built from. Tuples have one entry per layer."""

    architecture: str
    norm_eps: float
    has_layer_norm: bool = False  # norms are layer norms (Ba et al., arXiv:1607.06450), not RMS norms
    rope: tuple[Rope | None, ...]  # None: the layer does not rotate
    max_positions: int = 0  # a sequence cannot get longer: there is a vector for each position; 0: for any
    n_ctx_long: int = 0  # with a longer context the long factors of rotation apply; 0: there are none
    window: tuple[int, ...]
    has_chunks: bool = False  # windows are chunks of positions, and do not slide
    attention_scale: float
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    experts: Experts | None = None
    v_in_k: bool = False  # V is the first part of each K, of one head
    kv_source: tuple[int, ...] = ()  # whose K and V a layer reads; empty: each its own
    own: object = None  # what nobody but the architecture's own file reads

    def kv_owners(self) -> tuple[int, ...]:
        """The layers that keep K and V, in their order: an entry of `kv_layers` for each."""
        return tuple(sorted(set(self.kv_source))) if self.kv_source else tuple(range(self.n_layer))

    def kv_index(self, il: int) -> int:
        """Which entry of `kv_layers` a layer reads."""
        return self.kv_owners().index(self.kv_source[il]) if self.kv_source else il

    def owns_kv(self, il: int) -> bool:
        """Whether a layer keeps K and V of its own."""
        return not self.kv_source or self.kv_source[il] == il

    def kv_layers(self) -> tuple[KvLayer, ...]:
        """What is kept per cell, by the layers that keep any."""
        return tuple(
            KvLayer(
                self.n_head_kv[il] * self.n_embd_head_k[il],
                self.n_head_kv[il] * self.n_embd_head_v[il],
                self.window[il],
                self.n_head_kv[il],
                self.v_in_k,
                self.has_chunks and self.window[il] > 0,
            )
            for il in self.kv_owners()
        )
