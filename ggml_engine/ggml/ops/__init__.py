"""Graph operations with their preconditions checked, so that a bad shape is a GraphError and not a dead process.

ggml aborts on a misfit; every method here states in Python what ggml would assert, and checks it before the call.
Owns the ggml context that holds a graph's tensors. Knows no model and no cache. Shapes are in ggml's order, ne0 (the
contiguous one) first; every Tensor has four dimensions. Data (row ids, positions) is checked where it is set.
Source of the conditions: ggml.c and ggml-cpu/ops.cpp of the checked version.
"""

from __future__ import annotations

from ggml_engine.ggml.ops.activations import ActivationOps
from ggml_engine.ggml.ops.arithmetic import ArithmeticOps
from ggml_engine.ggml.ops.attention import AttentionOps
from ggml_engine.ggml.ops.candidates import CandidateOps
from ggml_engine.ggml.ops.cells import CellOps
from ggml_engine.ggml.ops.experts import ExpertOps
from ggml_engine.ggml.ops.joint import JointOps
from ggml_engine.ggml.ops.products import ProductOps
from ggml_engine.ggml.ops.rope import ROPE_NEOX, ROPE_NORMAL, Rope, RopeOps
from ggml_engine.ggml.ops.rows import RowOps
from ggml_engine.ggml.ops.tensors import FLOAT_TYPES, MATMUL_TYPES, Shape, Tensor, TensorContext, wrap

__all__ = [
    "FLOAT_TYPES",
    "MATMUL_TYPES",
    "ROPE_NEOX",
    "ROPE_NORMAL",
    "GraphBuilder",
    "Rope",
    "Shape",
    "Tensor",
    "TensorContext",
    "wrap",
]


class GraphBuilder(
    ArithmeticOps, ActivationOps, ProductOps, JointOps, ExpertOps, RowOps, AttentionOps, CellOps, RopeOps, CandidateOps
):
    """Builds one graph. Every operation takes a name for its result, as a builder of llama.cpp names its nodes."""
