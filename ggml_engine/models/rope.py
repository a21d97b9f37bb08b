"""How positions are rotated into queries and keys, as a file describes it.

Linear scaling, YaRN (Peng et al., arXiv:2309.00071), Llama 3's factors and LongRoPE's (Ding et al., arXiv:2402.13753),
which are tensors: `rope_factor_weights` asks for them, `ModelGraph.rope_factors` chooses. Rules: llama.cpp's
llama-context.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ggml_engine.errors import GraphError, HyperparameterError
from ggml_engine.ggml.gguf import GGUFArray
from ggml_engine.ggml.ops import Rope
from ggml_engine.models.metadata import MetadataReader, positive
from ggml_engine.models.sizes import Sizes

# below this, scaled positions leave what an f32 holds exactly, and YaRN's growth comes near zero
_MIN_SCALING = 1e-3
_SCALING_RULE = "0 (none) or above 0.001"
_MAX_LOG_MULTIPLIER = 1000.0


def read_rope(
    reader: MetadataReader, mode: int, sizes: Sizes, *, log_multiplier: float = 0.0, log_multiplier_over: float = 1.0
) -> Rope:
    """Base, scaling and YaRN terms of the rotation.

    `log_multiplier` is YaRN's for all dimensions where the architecture reads one (0: none), `log_multiplier_over` the
    one that it is divided into.
    """
    kind = reader.text("rope.scaling.type", "linear")
    if kind not in {"none", "linear", "yarn", "longrope"}:
        raise HyperparameterError(reader.key("rope.scaling.type"), f"none, linear, yarn or longrope, is {kind!r}")
    factor_key = "rope.scaling.factor" if "rope.scaling.factor" in reader else "rope.scale_linear"
    factor = reader.number(factor_key, lambda value: value == 0 or value > _MIN_SCALING, _SCALING_RULE, 0.0)
    scale = 1.0 if factor == 0.0 or kind == "none" else float(np.float32(1.0) / np.float32(factor))
    attn_factor = reader.number("rope.scaling.attn_factor", positive, "above 0", 1.0)
    if kind == "yarn":
        attn_factor = float(_yarn_attention(scale, log_multiplier, log_multiplier_over) * np.float32(attn_factor))
    rope = Rope(
        n_dims=sizes.n_rot,
        base=reader.number("rope.freq_base", positive, "above 0", 10000.0),
        mode=mode,
        scale=scale,
        n_ctx_orig=read_original_context(reader, sizes),
        ext_factor=1.0 if kind == "yarn" else 0.0,
        attn_factor=attn_factor,
    )
    check_rope(reader, rope)
    return rope


def read_log_multiplier(reader: MetadataReader) -> float:
    """YaRN's for all dimensions; 0 where the file has none."""
    rule = f"0 (none) to {_MAX_LOG_MULTIPLIER:g}"
    return reader.number("rope.scaling.yarn_log_multiplier", lambda value: 0 <= value <= _MAX_LOG_MULTIPLIER, rule, 0.0)


def read_original_context(reader: MetadataReader, sizes: Sizes) -> int:
    """The length that the model was trained with before its context was scaled."""
    return reader.integer("rope.scaling.original_context_length", 1, 2**31 - 1, sizes.n_ctx_train)


def rotates_by_sections(reader: MetadataReader) -> bool:
    """Whether dimensions are rotated by time, height and width in turn (Wang et al. 2024, arXiv:2409.12191).

    The three are one for text, which makes of it the rotation of mode NEOX. Raises HyperparameterError for sections
    that are not four sizes, or of which the fourth, which text does not count, is not 0.
    """
    name = "rope.dimension_sections"
    if name not in reader:
        return False
    value = reader.file.metadata[reader.key(name)]
    if not isinstance(value, GGUFArray) or len(value) != 4:
        found = f"has {len(value)}" if isinstance(value, GGUFArray) else f"is {value!r}"
        raise HyperparameterError(reader.key(name), f"four sizes are needed, {found}")
    sections = reader.per_layer(name, 4, 0, 1 << 16)
    if not (sections[0] and sections[1]):
        return False
    if sections[3]:
        raise HyperparameterError(reader.key(name), f"the fourth must be 0, they are {list(sections)}")
    return True


def read_long_context(reader: MetadataReader, sizes: Sizes) -> int:
    """The original context where the file has long or short factors; 0 where it has none."""
    lengths = ("long", "short")
    has_any = any(f"rope_factors_{length}.weight" in reader.file.tensors for length in lengths)
    return read_original_context(reader, sizes) if has_any else 0


def check_rope(reader: MetadataReader, rope: Rope) -> None:
    """Raise HyperparameterError for a rotation that ggml cannot do."""
    try:
        rope.check()
    except GraphError as error:
        raise HyperparameterError(reader.key("rope"), str(error)) from None


def _yarn_attention(scale: float, log_multiplier: float, over: float) -> np.float32:
    """What queries and keys are multiplied with, without ggml's own 0.1 ln(1/scale) + 1; in f32, as libllama does."""
    factor = np.float32(1.0) / np.float32(scale)

    def growth(multiplier: float) -> np.float32:
        if factor <= 1:
            return np.float32(1.0)
        return np.float32(np.float32(0.1) * np.float32(multiplier) * np.log(factor) + np.float32(1.0))

    wanted = growth(over) / growth(log_multiplier) if log_multiplier else growth(1.0)
    return np.float32(wanted * (np.float32(1.0) / (np.float32(1.0) + np.float32(0.1) * np.log(factor))))


def alternating(windowed: Sequence[bool], with_window: Rope | None, full: Rope | None) -> tuple[Rope | None, ...]:
    """The rotation of every layer, when layers with a window have their own."""
    return tuple(with_window if flag else full for flag in windowed)
