"""Cells by definition: those of `ggml_engine.reference.cells`."""

from ggml_engine.reference.cells import NaiveCells

__all__ = ["NaiveCells"]
