"""Models by definition: those of `ggml_engine.reference.naive`."""

from ggml_engine.reference.naive import NaiveModel, ggml_gelu, rotate, silu, softmax, visible

__all__ = ["NaiveModel", "ggml_gelu", "rotate", "silu", "softmax", "visible"]
