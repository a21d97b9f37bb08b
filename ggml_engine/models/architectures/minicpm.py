"""`minicpm`: MiniCPM 1 and 4, dense and with experts.

As `granite`, with defaults for the scales, which older files do not have. Hu et al. 2024, arXiv:2404.06395; llama.cpp's
src/models/minicpm.cpp. Its default for logits is taken as it is: they come out larger than the paper's by the square of
width over base, in the same order.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ggml_engine.ggml.ops import ROPE_NORMAL
from ggml_engine.models.architecture import Architecture
from ggml_engine.models.architectures.granite import graph, read_inverse_logit_scale, read_optional_experts, tensors
from ggml_engine.models.config import Hyperparameters
from ggml_engine.models.metadata import MetadataReader
from ggml_engine.models.sizes import read_scale
from ggml_engine.models.uniform import read_uniform

_EMBEDDING_SCALE = 12.0
_DEPTH_SCALE = 1.4  # of residuals, over the root of the number of layers
_BASE_WIDTH = 256


def hyperparameters(reader: MetadataReader) -> Hyperparameters:
    """Read and check."""
    hp = read_uniform(reader, ROPE_NORMAL)
    residual_scale = float(np.float32(_DEPTH_SCALE) / np.sqrt(np.float32(hp.n_layer)))
    logit_scale = float(np.float32(_BASE_WIDTH) / np.float32(hp.n_embd))
    return replace(
        hp,
        embedding_scale=read_scale(reader, "embedding_scale", _EMBEDDING_SCALE),
        residual_scale=read_scale(reader, "residual_scale", residual_scale),
        logit_scale=read_inverse_logit_scale(reader, logit_scale),
        experts=read_optional_experts(reader, hp),
    )


ARCHITECTURE = Architecture("minicpm", hyperparameters, tensors, graph)
