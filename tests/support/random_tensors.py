"""What a tiny model's tensors hold, by name: random, and such that every one of them shows in the logits.

Matrices keep the variance of what they multiply, so that activations stay near one; logits spread by about two. Norms
are around one, and biases large enough to be missed. The same name, shape and seed give the same numbers.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Draw = Callable[[np.random.Generator, tuple[int, ...]], npt.NDArray[np.floating]]


def _normal(mean: float, spread: float) -> Draw:
    return lambda rng, shape: mean + spread * rng.standard_normal(shape)


def _uniform(low: float, high: float) -> Draw:
    return lambda rng, shape: rng.uniform(low, high, shape)


def _matrix(gain: float) -> Draw:
    """Rows of `shape[-1]`: the variance of the input, times gain squared."""
    return lambda rng, shape: rng.standard_normal(shape) * (gain / np.sqrt(shape[-1]))


# The first that matches counts.
_RULES: tuple[tuple[str, Draw], ...] = (
    (r"^rope_|rope_freqs|rope_factors", _uniform(1.0, 4.0)),  # frequencies are divided by them
    (r"attn_sinks", _normal(0.0, 1.0)),
    (r"layer_output_scale", _uniform(0.7, 1.0)),
    (r"\.(input_scale|scale)$", _uniform(0.7, 1.3)),
    (r"ssm_a", _uniform(-1.5, -0.2)),  # states decay
    (r"ssm_dt\.bias", _uniform(-2.0, 0.0)),
    (r"ssm_d$|ssm_d\.weight", _normal(1.0, 0.2)),
    (r"ssm_conv1d\.weight|shortconv\.conv\.weight", _matrix(1.0)),
    (r"time_mix_(w0|decay)", _uniform(-2.0, 0.0)),
    (r"time_mix_lerp|channel_mix_lerp", _uniform(0.0, 1.0)),
    (r"exp_probs_b", _normal(0.0, 0.2)),  # moves the choice of experts
    (r"norm.*\.bias$|ln\.bias$|_ln.*\.bias$", _normal(0.0, 0.2)),
    (r"norm|time_mix_ln|_ln\.weight", _normal(1.0, 0.2)),
    (r"\.bias$|\.b$", _normal(0.0, 0.4)),
    (r"^(token_embd|position_embd|token_types|output)\.weight", _matrix(2.0)),
    (r"attn_(q|k|qkv)\.weight", _matrix(1.5)),
    (r"ffn_gate_inp\.weight", _matrix(2.0)),  # experts' shares differ
    (r"ffn_down", _matrix(1.5)),
)


def random_tensor(name: str, shape: tuple[int, ...], seed: int) -> Array:
    """f32 of numpy's shape (ggml's reversed)."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    draw = next((draw for pattern, draw in _RULES if re.search(pattern, name)), None)
    if draw is None:
        draw = _matrix(1.0) if len(shape) > 1 else _normal(0.0, 0.5)
    return np.ascontiguousarray(draw(rng, shape), np.float32)
