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
    SQRT_SOFTPLUS = 4


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
    """The experts of a file. What is None is read from it: the gating (softmax by default, see `read_gating`), whether
    to normalise (no), and the scale (1).

    Raises HyperparameterError for counts that cannot be.
    """  # fmt: skip
    n_expert = reader.integer("expert_count", 1, _MAX_EXPERTS)
    n_used = _read_used(reader, n_layer, n_expert)
    n_groups = reader.integer("expert_group_count", 0, n_expert, 0)
    n_groups_used = reader.integer("expert_group_used_count", 0, n_expert, 0)
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
        gating=gating or read_gating(reader, Gating.SOFTMAX),
        normalised=reader.flag("expert_weights_norm", False) if normalised is None else normalised,
        weight_scale=_read_weight_scale(reader) if weight_scale is None else weight_scale,
        n_ff_shared=n_ff_shared,
        n_groups=n_groups if n_groups > 1 else 0,
        n_groups_used=n_groups_used if n_groups > 1 else 0,
        is_dense=is_dense,
    )


def read_expert_length(reader: MetadataReader, n_layer: int, *, n_ff: int | None = None) -> int:
    """The width of one expert's feed-forward; where the file names none or 0, that of all chosen ones is `n_ff`."""
    name = "expert_feed_forward_length"
    if n_ff is None:
        return _same_in_all_layers(reader, name, n_layer, 1, MAX_SIZE)
    found = _same_in_all_layers(reader, name, n_layer, 0, MAX_SIZE, 0)
    n_used = _read_used(reader, n_layer, _MAX_EXPERTS)
    if not found and n_ff < n_used:
        raise HyperparameterError(reader.key(name), f"the file has none, and {n_used} experts cannot share {n_ff}")
    return found or n_ff // n_used


def read_leading_dense(reader: MetadataReader, n_layer: int) -> tuple[bool, ...]:
    """`is_dense` of a file whose first layers have no experts."""
    n_dense = reader.integer("leading_dense_block_count", 0, MAX_SIZE, 0)
    return tuple(il < n_dense for il in range(n_layer))


def read_gating(reader: MetadataReader, default: Gating | None) -> Gating:
    """What the file names; `default` where it names none or 0, which is an error without one."""
    number = reader.integer("expert_gating_func", 0, 255, None if default is None else 0)
    if number == 0 and default is not None:
        return default
    if number not in {gating.value for gating in Gating}:
        known = "1 (softmax), 2 (sigmoid), 3 (softmax of the chosen) or 4 (root of softplus)"
        raise HyperparameterError(reader.key("expert_gating_func"), f"must be {known}, is {number}")
    return Gating(number)


def _read_used(reader: MetadataReader, n_layer: int, n_expert: int) -> int:
    return _same_in_all_layers(reader, "expert_used_count", n_layer, 1, n_expert)


def _same_in_all_layers(
    reader: MetadataReader, name: str, n_layer: int, low: int, high: int, default: int | None = None
) -> int:
    """A number, or an array of one number for each layer, in which all are the same."""
    numbers = set(reader.per_layer(name, n_layer, low, high, None if default is None else (default,)))
    if len(numbers) > 1:
        raise HyperparameterError(reader.key(name), f"must be the same in every layer, has {sorted(numbers)}")
    return numbers.pop()


def _read_weight_scale(reader: MetadataReader) -> float:
    return reader.number("expert_weights_scale", lambda value: value >= 0, "0 (none) or above", 0.0) or 1.0
