"""Mixture of experts: its sizes and how experts are chosen and weighed (Shazeer et al., arXiv:1701.06538).

The graph is in `expert_ffn.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ggml_engine.errors import HyperparameterError
from ggml_engine.models.metadata import MetadataReader
from ggml_engine.models.sizes import MAX_SIZE

_MAX_EXPERTS = 1024


class Gating(Enum):
    """What turns a router's logits into weights. Numbers are those of `expert_gating_func` in files."""

    SOFTMAX = 1  # over all experts
    SIGMOID = 2
    SOFTMAX_OF_CHOSEN = 3  # over the chosen ones alone


@dataclass(frozen=True, slots=True)
class Experts:
    """The feed-forward of a layer with experts.

    `is_dense` says which layers have none. With `n_groups` above 1 experts are chosen within the best `n_groups_used`
    groups (DeepSeek-AI, arXiv:2412.19437). `normalised` weights sum to one; `weight_scale` multiplies them.
    """

    n_expert: int
    n_used: int
    n_ff: int
    gating: Gating
    normalised: bool
    weight_scale: float = 1.0
    n_ff_shared: int = 0  # of the experts that every token passes, together; 0: there are none
    n_groups: int = 0
    n_groups_used: int = 0
    is_dense: tuple[bool, ...] = ()  # empty: no layer is


def read_experts(
    reader: MetadataReader,
    n_layer: int,
    *,
    n_ff: int,
    n_ff_shared: int = 0,
    gating: Gating | None = None,
    normalised: bool | None = None,
    weight_scale: float | None = None,
    is_dense: tuple[bool, ...] = (),
) -> Experts:
    """The experts of a file. What is None is read from it: the gating (softmax by default), whether to normalise
    (no), and the scale (1).

    Raises HyperparameterError for counts that cannot be.
    """  # fmt: skip
    n_expert = reader.integer("expert_count", 1, _MAX_EXPERTS)
    n_used = reader.integer("expert_used_count", 1, n_expert)
    n_groups = reader.integer("expert_group_count", 0, n_expert, 0)
    n_groups_used = reader.integer("expert_group_used_count", 0, max(n_groups, 0), 0)
    if n_groups > 1:
        if n_expert % n_groups or n_expert // n_groups < 2:
            reason = f"{n_expert} experts do not divide into {n_groups} groups of two or more"
            raise HyperparameterError(reader.key("expert_group_count"), reason)
        if not 0 < n_groups_used < n_groups or n_used > n_groups_used * (n_expert // n_groups):
            reason = f"{n_used} experts cannot be chosen from {n_groups_used} of {n_groups} groups"
            raise HyperparameterError(reader.key("expert_group_used_count"), reason)
    if is_dense and len(is_dense) != n_layer:
        raise ValueError("one flag for each layer is needed")
    return Experts(
        n_expert=n_expert,
        n_used=n_used,
        n_ff=n_ff,
        gating=gating or _read_gating(reader),
        normalised=reader.flag("expert_weights_norm", False) if normalised is None else normalised,
        weight_scale=_read_weight_scale(reader) if weight_scale is None else weight_scale,
        n_ff_shared=n_ff_shared,
        n_groups=n_groups if n_groups > 1 else 0,
        n_groups_used=n_groups_used if n_groups > 1 else 0,
        is_dense=is_dense,
    )


def read_expert_length(reader: MetadataReader, default: int | None = None) -> int:
    """The width of one expert's feed-forward."""
    return reader.integer("expert_feed_forward_length", 1, MAX_SIZE, default)


def leading_dense(n_layer: int, n_dense: int) -> tuple[bool, ...]:
    """`is_dense` when the first `n_dense` layers have no experts."""
    return tuple(il < n_dense for il in range(n_layer))


def _read_gating(reader: MetadataReader) -> Gating:
    number = reader.integer("expert_gating_func", 0, 255, 0)
    if number not in {0, *(gating.value for gating in Gating)}:
        raise HyperparameterError(reader.key("expert_gating_func"), f"1 (softmax), 2 (sigmoid) or 3, is {number}")
    return Gating(number or 1)


def _read_weight_scale(reader: MetadataReader) -> float:
    return reader.number("expert_weights_scale", lambda value: value >= 0, "0 (none) or above", 0.0) or 1.0
