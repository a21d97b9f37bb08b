"""What would kill the process inside ggml is a typed error of ours before ggml is called.

`raw_probe` makes the same calls without the guards, in child processes: they prove that the guards are needed.
"""

from __future__ import annotations

import math
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import raw_probe
from graphs import Bench, random
from hypothesis import given, settings
from hypothesis import strategies as st

from ggml_engine.errors import AllocationError, ComputeError, EngineError, GraphError, OptionError
from ggml_engine.ggml import backends, library
from ggml_engine.ggml.backends import Backend, Buffer, Graph
from ggml_engine.ggml.library import ffi
from ggml_engine.ggml.ops import GraphBuilder, Rope, Tensor, TensorContext, wrap
from ggml_engine.ggml.tensor_types import TensorType

F32, F16, BF16 = TensorType.F32, TensorType.F16, TensorType.BF16
I32, I64 = TensorType.I32, TensorType.I64
Q8_0, Q4_0 = TensorType.Q8_0, TensorType.Q4_0


class Shapes:
    """A builder and tensors without data, for operations that are never run."""

    def __init__(self) -> None:
        self.builder = GraphBuilder(library.load(), 64)

    def __call__(self, kind: TensorType, *ne: int) -> Tensor:
        return self.builder.new_tensor("", kind, *ne)

    def turned(self, kind: TensorType, *ne: int) -> Tensor:
        """Columns where rows should be."""
        return self.builder.permute(self(kind, *ne), 1, 0, 2, 3)

    def apart(self, kind: TensorType, *ne: int) -> Tensor:
        """Contiguous rows, of which those of dimension 2 are not where dimension 1 ends."""
        return self.builder.permute(self(kind, ne[0], ne[2], ne[1]), 0, 2, 1, 3)

    def chosen(
        self,
        *,
        experts: Tensor | None = None,
        x: Tensor | None = None,
        ids: Tensor | None = None,
    ):  # type: ignore[no-untyped-def]
        """Two of six experts for each of three tokens."""
        return self.builder.mul_mat_id(experts or self(F32, 8, 4, 6), x or self(F32, 8, 1, 3), ids or self(I32, 2, 3))

    def biased(self, *, a: Tensor | None = None, b: Tensor | None = None, ids: Tensor | None = None):  # type: ignore[no-untyped-def]
        return self.builder.add_id(a or self(F32, 8, 2, 3), b or self(F32, 8, 6), ids or self(I32, 2, 3))

    def rope(
        self, *, a: Tensor | None = None, positions: Tensor | None = None, factors: Tensor | None = None, **rope: Any
    ):  # type: ignore[no-untyped-def]
        options = Rope(**{"n_dims": 8, "base": 1e4, **rope})
        return self.builder.rope(a or self(F32, 8, 2, 3), positions or self(I32, 3), options, factors)

    def flash(
        self,
        q: Tensor | None = None,
        k: Tensor | None = None,
        v: Tensor | None = None,
        mask: Tensor | None = None,
        scale: float = 1.0,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ):  # type: ignore[no-untyped-def]
        q, k, v = q or self(F32, 8, 4, 4), k or self(F16, 8, 6, 2), v or self(F16, 8, 6, 2)
        return self.builder.flash_attention(q, k, v, mask or self(F16, 6, 4), scale, softcap=softcap, sinks=sinks)


Refusal = Callable[[Shapes], Any]


def scattered(s: Shapes, n: int) -> Tensor:
    """A vector of every second element."""
    return s.builder.permute(s.builder.view(s(F32, 2, n), (1, n), (8,), 0), 1, 0, 2, 3)


REFUSALS: dict[str, Refusal] = {
    # ---- tensors
    "new_tensor: no dimension": lambda s: s.builder.new_tensor("", F32),
    "new_tensor: five dimensions": lambda s: s.builder.new_tensor("", F32, 1, 1, 1, 1, 1),
    "new_tensor: dimension 0": lambda s: s(F32, 4, 0),
    "new_tensor: a negative dimension": lambda s: s(F32, -4, 4),
    "new_tensor: too many elements": lambda s: s(F32, 1 << 40, 1 << 40),
    "new_tensor: too many bytes": lambda s: s(TensorType.F64, 1 << 61),
    "new_tensor: type 99": lambda s: s.builder.new_tensor("", 99, 4),  # type: ignore[arg-type]
    "new_tensor: removed type 4": lambda s: s.builder.new_tensor("", 4, 4),  # type: ignore[arg-type]
    "new_tensor: a type that is never stored": lambda s: s.builder.new_tensor("", 15, 256),  # type: ignore[arg-type]
    "new_tensor: a q4_0 row of 33": lambda s: s(Q4_0, 33),
    "new_tensor: a q4_K row of 32": lambda s: s(TensorType.Q4_K, 32),
    # ---- arithmetic
    "add: shapes that do not repeat": lambda s: s.builder.add(s(F32, 4), s(F32, 3)),
    "add: a larger second": lambda s: s.builder.add(s(F32, 4), s(F32, 4, 2)),
    "add: f16 to f32": lambda s: s.builder.add(s(F32, 4), s(F16, 4)),
    "add: bf16 to f16": lambda s: s.builder.add(s(F16, 4), s(BF16, 4)),
    "add: integers": lambda s: s.builder.add(s(I32, 4), s(I32, 4)),
    "add: a quantised first": lambda s: s.builder.add(s(Q8_0, 32), s(F32, 32)),
    "add: a transposed first": lambda s: s.builder.add(s.turned(F32, 4, 4), s(F32, 4)),
    "mul: shapes that do not repeat": lambda s: s.builder.mul(s(F32, 4, 3), s(F32, 4, 2)),
    "mul: f16 by i32": lambda s: s.builder.mul(s(F16, 4), s(I32, 4)),
    "mul: a transposed second": lambda s: s.builder.mul(s(F32, 4, 4), s.turned(F32, 4, 4)),
    "sub: shapes that do not repeat": lambda s: s.builder.sub(s(F32, 4), s(F32, 3)),
    "sub: f16 from f32": lambda s: s.builder.sub(s(F32, 4), s(F16, 4)),
    "div: a larger second": lambda s: s.builder.div(s(F32, 4), s(F32, 4, 2)),
    "div: by i32": lambda s: s.builder.div(s(F32, 4), s(I32, 4)),
    "clamp: i32": lambda s: s.builder.clamp(s(I32, 4), 0, 1),
    "clamp: transposed": lambda s: s.builder.clamp(s.turned(F32, 4, 3), 0, 1),
    "clamp: rows in another order": lambda s: s.builder.clamp(s.apart(F32, 4, 3, 2), 0, 1),
    "clamp: nothing between the bounds": lambda s: s.builder.clamp(s(F32, 4), 1, 0),
    "clamp: a bound of NaN": lambda s: s.builder.clamp(s(F32, 4), math.nan, 0),
    "fill: i32": lambda s: s.builder.fill(s(I32, 4), 0),
    "fill: transposed": lambda s: s.builder.fill(s.turned(F32, 4, 3), 0),
    "fill: NaN": lambda s: s.builder.fill(s(F32, 4), math.nan),
    "layer_norm: a negative eps": lambda s: s.builder.layer_norm(s(F32, 4), -1e-6),
    "layer_norm: f16": lambda s: s.builder.layer_norm(s(F16, 4), 1e-6),
    "layer_norm: transposed": lambda s: s.builder.layer_norm(s.turned(F32, 4, 3), 1e-6),
    "scale: f16": lambda s: s.builder.scale(s(F16, 4), 2.0),
    "scale: transposed": lambda s: s.builder.scale(s.turned(F32, 4, 3), 2.0),
    "scale: NaN": lambda s: s.builder.scale(s(F32, 4), math.nan),
    "silu: q8_0": lambda s: s.builder.silu(s(Q8_0, 32)),
    "xielu: i32": lambda s: s.builder.xielu(s(I32, 4), 1, 1, 1, 0),
    "xielu: rows in another order": lambda s: s.builder.xielu(s.apart(F32, 4, 3, 2), 1, 1, 1, 0),
    "xielu: a slope of NaN": lambda s: s.builder.xielu(s(F32, 4), math.nan, 1, 1, 0),
    "xielu: an infinite eps": lambda s: s.builder.xielu(s(F32, 4), 1, 1, 1, math.inf),
    "swiglu: shapes differ": lambda s: s.builder.swiglu(s(F32, 4), s(F32, 5)),
    "swiglu: types differ": lambda s: s.builder.swiglu(s(F32, 4), s(F16, 4)),
    "swiglu: transposed": lambda s: s.builder.swiglu(s.turned(F32, 4, 3), s.turned(F32, 4, 3)),
    "geglu: shapes differ": lambda s: s.builder.geglu(s(F32, 4, 2), s(F32, 4)),
    "swiglu: rows in another order": lambda s: s.builder.swiglu(s.apart(F32, 4, 3, 2), s(F32, 4, 3, 2)),
    "swiglu: a second with rows in another order": lambda s: s.builder.swiglu(s(F32, 4, 3, 2), s.apart(F32, 4, 3, 2)),
    "geglu_erf: transposed": lambda s: s.builder.geglu_erf(s.turned(F32, 4, 3), s(F32, 3, 4)),
    "reglu: shapes differ": lambda s: s.builder.reglu(s(F32, 4), s(F32, 5)),
    "reglu: i32": lambda s: s.builder.reglu(s(I32, 4), s(I32, 4)),
    "swiglu_oai: shapes differ": lambda s: s.builder.swiglu_oai(s(F32, 4), s(F32, 5), 1, 1),
    "swiglu_oai: f16": lambda s: s.builder.swiglu_oai(s(F16, 4), s(F16, 4), 1, 1),
    "swiglu_oai: a negative limit": lambda s: s.builder.swiglu_oai(s(F32, 4), s(F32, 4), 1, -1),
    "swiglu_oai: a limit of NaN": lambda s: s.builder.swiglu_oai(s(F32, 4), s(F32, 4), 1, math.nan),
    "swiglu_oai: an infinite alpha": lambda s: s.builder.swiglu_oai(s(F32, 4), s(F32, 4), math.inf, 1),
    "swiglu_halves: an odd row": lambda s: s.builder.swiglu_halves(s(F32, 5)),
    "swiglu_halves: transposed": lambda s: s.builder.swiglu_halves(s.turned(F32, 4, 4)),
    "geglu_halves: i32": lambda s: s.builder.geglu_halves(s(I32, 4)),
    "geglu_halves: rows in another order": lambda s: s.builder.geglu_halves(s.apart(F32, 4, 3, 2)),
    "geglu: f16": lambda s: s.builder.geglu(s(F16, 4), s(F16, 4)),
    "rms_norm: a negative eps": lambda s: s.builder.rms_norm(s(F32, 4), -1e-6),
    "rms_norm: eps NaN": lambda s: s.builder.rms_norm(s(F32, 4), math.nan),
    "rms_norm: eps infinite": lambda s: s.builder.rms_norm(s(F32, 4), math.inf),
    "rms_norm: f16": lambda s: s.builder.rms_norm(s(F16, 4), 1e-6),
    "rms_norm: transposed": lambda s: s.builder.rms_norm(s.turned(F32, 4, 3), 1e-6),
    "mul_mat: row lengths differ": lambda s: s.builder.mul_mat(s(F32, 4, 4), s(F32, 5, 4)),
    "mul_mat: batches do not repeat": lambda s: s.builder.mul_mat(s(F32, 4, 4, 2), s(F32, 4, 4, 3)),
    "mul_mat: fewer batches in the second": lambda s: s.builder.mul_mat(s(F32, 4, 4, 2), s(F32, 4, 4)),
    "mul_mat: outer batches do not repeat": lambda s: s.builder.mul_mat(s(F32, 4, 4, 1, 2), s(F32, 4, 4, 1, 3)),
    "mul_mat: an i32 weight": lambda s: s.builder.mul_mat(s(I32, 4, 4), s(F32, 4, 4)),
    "mul_mat: an i8 weight": lambda s: s.builder.mul_mat(s(TensorType.I8, 4, 4), s(F32, 4, 4)),
    "mul_mat: an f64 weight": lambda s: s.builder.mul_mat(s(TensorType.F64, 4, 4), s(F32, 4, 4)),
    "mul_mat: a quantised second": lambda s: s.builder.mul_mat(s(F32, 32, 4), s(Q8_0, 32, 4)),
    "mul_mat: f16 under q4_0": lambda s: s.builder.mul_mat(s(Q4_0, 32, 4), s(F16, 32, 4)),
    "mul_mat: bf16 under f16": lambda s: s.builder.mul_mat(s(F16, 32, 4), s(BF16, 32, 4)),
    "mul_mat: a transposed first": lambda s: s.builder.mul_mat(s.turned(F32, 4, 4), s(F32, 4, 4)),
    "mul_mat: a transposed second": lambda s: s.builder.mul_mat(s(F32, 4, 4), s.turned(F32, 4, 4)),
    "mul_mat: a result of too many elements": lambda s: s.builder.mul_mat(s(F32, 1, 1 << 40), s(F32, 1, 1 << 40)),
    "hadamard: no square": lambda s: s.builder.hadamard(s(F32, 4, 4), s(F32, 4, 2)),
    "hadamard: an f16 matrix": lambda s: s.builder.hadamard(s(F32, 4, 4), s(F16, 4, 4)),
    "hadamard: no power of two": lambda s: s.builder.hadamard(s(F32, 6, 6), s(F32, 6, 6)),
    "hadamard: rows in no whole pieces": lambda s: s.builder.hadamard(s(F32, 6, 4), s(F32, 4, 4)),
    "hadamard: f16": lambda s: s.builder.hadamard(s(F16, 4, 4), s(F32, 4, 4)),
    # ---- experts
    "top_k: none": lambda s: s.builder.top_k(s(F32, 6, 3), 0),
    "top_k: more than there are": lambda s: s.builder.top_k(s(F32, 6, 3), 7),
    "top_k: f16": lambda s: s.builder.top_k(s(F16, 6, 3), 2),
    "top_k: transposed": lambda s: s.builder.top_k(s.turned(F32, 3, 6), 2),
    "top_k: rows in another order": lambda s: s.builder.top_k(s.apart(F32, 6, 3, 2), 2),
    "top_k: longer rows than i32 counts": lambda s: s.builder.top_k(s(F32, 1 << 31), 2),
    "mul_mat_id: row lengths differ": lambda s: s.chosen(x=s(F32, 9, 1, 3)),
    "mul_mat_id: i32 experts": lambda s: s.chosen(experts=s(I32, 8, 4, 6)),
    "mul_mat_id: transposed experts": lambda s: s.chosen(experts=s.turned(F32, 4, 8, 6)),
    "mul_mat_id: experts of four dimensions": lambda s: s.chosen(experts=s(F32, 8, 4, 6, 2)),
    "mul_mat_id: an f16 second": lambda s: s.chosen(x=s(F16, 8, 1, 3)),
    "mul_mat_id: a transposed second": lambda s: s.chosen(x=s.turned(F32, 2, 8, 3)),
    "mul_mat_id: a second of four dimensions": lambda s: s.chosen(x=s(F32, 8, 1, 3, 2)),
    "mul_mat_id: rows that do not repeat": lambda s: s.chosen(x=s(F32, 8, 3, 3)),
    "mul_mat_id: i64 ids": lambda s: s.chosen(ids=s(I64, 2, 3)),
    "mul_mat_id: ids of other tokens": lambda s: s.chosen(ids=s(I32, 2, 4)),
    "mul_mat_id: ids of three dimensions": lambda s: s.chosen(ids=s(I32, 2, 3, 2)),
    "mul_mat_id: a result of too many elements": lambda s: s.chosen(
        experts=s(F32, 1, 1 << 40, 2), x=s(F32, 1, 1, 1 << 30), ids=s(I32, 1, 1 << 30)
    ),
    "mul_mat_id: a table of too many elements": lambda s: s.chosen(
        experts=s(F32, 1, 1, 1 << 40), x=s(F32, 1, 1, 1 << 30), ids=s(I32, 1, 1 << 30)
    ),
    "add_id: row lengths differ": lambda s: s.biased(b=s(F32, 9, 6)),
    "add_id: f16": lambda s: s.biased(a=s(F16, 8, 2, 3)),
    "add_id: an f16 second": lambda s: s.biased(b=s(F16, 8, 6)),
    "add_id: a transposed first": lambda s: s.biased(a=s.turned(F32, 2, 8, 3)),
    "add_id: a transposed second": lambda s: s.biased(b=s.turned(F32, 6, 8)),
    "add_id: a second of three dimensions": lambda s: s.biased(b=s(F32, 8, 6, 2)),
    "add_id: a first of four dimensions": lambda s: s.biased(a=s(F32, 8, 2, 3, 2)),
    "add_id: i64 ids": lambda s: s.biased(ids=s(I64, 2, 3)),
    "add_id: ids of other tokens": lambda s: s.biased(ids=s(I32, 2, 4)),
    "add_id: too few ids a token": lambda s: s.biased(ids=s(I32, 1, 3)),
    "add_id: ids of three dimensions": lambda s: s.biased(ids=s(I32, 2, 3, 2)),
    # ---- shapes
    "reshape: another number of elements": lambda s: s.builder.reshape(s(F32, 4, 4), 4, 5),
    "reshape: no dimension": lambda s: s.builder.reshape(s(F32, 1)),
    "reshape: five dimensions": lambda s: s.builder.reshape(s(F32, 4, 4), 2, 2, 2, 2, 1),
    "reshape: negative": lambda s: s.builder.reshape(s(F32, 4, 4), -4, -4),
    "reshape: transposed": lambda s: s.builder.reshape(s.turned(F32, 4, 3), 3, 4),
    "reshape: parts of blocks": lambda s: s.builder.reshape(s(Q8_0, 64, 4), 16, 16),
    "view: past the end": lambda s: s.builder.view(s(F32, 4), (4,), (), 8),
    "view: a last row past the end": lambda s: s.builder.view(s(F32, 4, 4), (4, 4), (16,), 16),
    "view: a long stride": lambda s: s.builder.view(s(F32, 4, 4), (4, 2, 2), (16, 64), 0),
    "view: a negative offset": lambda s: s.builder.view(s(F32, 4), (2,), (), -4),
    "view: a stride of 0": lambda s: s.builder.view(s(F32, 4), (2, 2), (0,), 0),
    "view: dimension 0": lambda s: s.builder.view(s(F32, 4), (0,), (), 0),
    "view: five dimensions": lambda s: s.builder.view(s(F32, 4), (1, 1, 1, 1, 1), (4, 4, 4, 4), 0),
    "view: strides missing": lambda s: s.builder.view(s(F32, 4, 4), (4, 4), (), 0),
    "view: an unaligned offset": lambda s: s.builder.view(s(F32, 4), (2,), (), 2),
    "view: an unaligned stride": lambda s: s.builder.view(s(F16, 8), (2, 2), (5,), 0),
    "view: part of a block": lambda s: s.builder.view(s(Q8_0, 64), (16,), (), 0),
    "view: an offset inside a block": lambda s: s.builder.view(s(Q8_0, 64), (32,), (), 17),
    "view: overlapping rows": lambda s: s.builder.view(s(F32, 13), (4, 10), (4,), 0),
    "view: overlapping rows at the end": lambda s: s.builder.view(
        s.builder.view(s(F32, 20), (13,), (), 28), (4, 4), (12,), 0
    ),
    "permute: one axis twice": lambda s: s.builder.permute(s(F32, 4), 0, 0, 1, 2),
    "permute: axis 4": lambda s: s.builder.permute(s(F32, 4), 0, 1, 2, 4),
    "permute: three axes": lambda s: s.builder.permute(s(F32, 4), 0, 1, 2),
    "transpose: columns of blocks": lambda s: s.builder.transpose(s(Q8_0, 32, 32)),
    "cont_2d: another number of elements": lambda s: s.builder.cont_2d(s(F32, 4), 2, 3),
    "cont_2d: quantised": lambda s: s.builder.cont_2d(s(Q8_0, 32, 2), 64, 1),
    "permute: columns of blocks": lambda s: s.turned(Q8_0, 32, 32),
    "cast: to a quantised type": lambda s: s.builder.cast(s(F32, 32), Q8_0),
    "cast: from a quantised type": lambda s: s.builder.cast(s(Q8_0, 32), F32),
    "cast: from i32 to f16": lambda s: s.builder.cast(s(I32, 32), F16),
    "cast: from f16 to i32": lambda s: s.builder.cast(s(F16, 32), I32),
    "cast: to i64": lambda s: s.builder.cast(s(F32, 32), I64),
    "repeat_to: no multiple": lambda s: s.builder.repeat_to(s(F32, 4, 2), 4, 3, 1, 1),
    "repeat_to: fewer": lambda s: s.builder.repeat_to(s(F32, 4, 2), 4, 1, 1, 1),
    "repeat_to: a dimension of 0": lambda s: s.builder.repeat_to(s(F32, 4, 2), 4, 2, 0, 1),
    "repeat_to: a negative dimension": lambda s: s.builder.repeat_to(s(F32, 4, 2), 4, 2, -1, 1),
    "repeat_to: i64": lambda s: s.builder.repeat_to(s(I64, 4), 8, 1, 1, 1),
    "repeat_to: transposed": lambda s: s.builder.repeat_to(s.turned(F32, 4, 3), 3, 8, 1, 1),
    "repeat_to: too many elements": lambda s: s.builder.repeat_to(s(F32, 4), 1 << 40, 1 << 30, 1, 1),
    "repeat: transposed": lambda s: s.builder.repeat(s.turned(F32, 4, 3), 2),
    "repeat: no times": lambda s: s.builder.repeat(s(F32, 4, 2), 0),
    "repeat: four dimensions": lambda s: s.builder.repeat(s(F32, 4, 2, 2, 2), 2),
    "repeat: i32": lambda s: s.builder.repeat(s(I32, 4), 2),
    "repeat: too many elements": lambda s: s.builder.repeat(s(F32, 1 << 40), 1 << 30),
    "argmax: f16": lambda s: s.builder.argmax(s(F16, 4, 2)),
    "argmax: transposed": lambda s: s.builder.argmax(s.turned(F32, 4, 3)),
    "argmax: three dimensions": lambda s: s.builder.argmax(s(F32, 4, 3, 2)),
    "argmax: longer rows than i32 counts": lambda s: s.builder.argmax(s(F32, 1 << 31)),
    "largest: none": lambda s: s.builder.largest(s(F32, 6, 3), 0),
    "largest: more than there are": lambda s: s.builder.largest(s(F32, 6, 3), 7),
    "largest: f16": lambda s: s.builder.largest(s(F16, 6, 3), 2),
    "largest: transposed": lambda s: s.builder.largest(s.turned(F32, 3, 6), 2),
    "largest: longer rows than i32 counts": lambda s: s.builder.largest(s(F32, 1 << 31), 2),
    "step: f16": lambda s: s.builder.step(s(F16, 4)),
    "sum_rows: f16": lambda s: s.builder.sum_rows(s(F16, 4)),
    "sum_rows: strided rows": lambda s: s.builder.sum_rows(s.turned(F32, 4, 3)),
    "copy: shapes differ": lambda s: s.builder.copy(s(F32, 4, 4), s(F32, 8, 2)),
    "copy: types differ": lambda s: s.builder.copy(s(F32, 4, 4), s(F16, 4, 4)),
    "copy: a transposed first": lambda s: s.builder.copy(s.turned(F32, 4, 4), s(F32, 4, 4)),
    "copy: a transposed second": lambda s: s.builder.copy(s(F32, 4, 4), s.turned(F32, 4, 4)),
    "concat: dimension 4": lambda s: s.builder.concat(s(F32, 4), s(F32, 4), 4),
    "concat: dimension -1": lambda s: s.builder.concat(s(F32, 4), s(F32, 4), -1),
    "concat: shapes differ": lambda s: s.builder.concat(s(F32, 4, 4), s(F32, 5, 4), 1),
    "concat: types differ": lambda s: s.builder.concat(s(F32, 4), s(F16, 4), 0),
    "concat: strided rows of i64": lambda s: s.builder.concat(s.turned(I64, 4, 3), s.turned(I64, 4, 3), 0),
    "concat: too many elements": lambda s: s.builder.concat(s(F32, 1 << 58), s(F32, 1 << 58), 0),
    # ---- rows
    "get_rows: f32 ids": lambda s: s.builder.get_rows(s(F32, 4, 3), s(F32, 2)),
    "get_rows: i64 ids": lambda s: s.builder.get_rows(s(F32, 4, 3), s(I64, 2)),
    "get_rows: rows of i64": lambda s: s.builder.get_rows(s(I64, 4, 3), s(I32, 2)),
    "get_rows: batches differ": lambda s: s.builder.get_rows(s(F32, 4, 3, 2), s(I32, 2)),
    "get_rows: outer batches differ": lambda s: s.builder.get_rows(s(F32, 4, 3, 1, 2), s(I32, 2)),
    "get_rows: ids of four dimensions": lambda s: s.builder.get_rows(s(F32, 4, 3), s(I32, 2, 1, 1, 2)),
    "get_rows: transposed": lambda s: s.builder.get_rows(s.turned(F32, 4, 3), s(I32, 2)),
    "get_rows: too many elements": lambda s: s.builder.get_rows(s(F32, 1 << 40, 2), s(I32, 1 << 40)),
    "set_rows: f32 ids": lambda s: s.builder.set_rows(s(F32, 4, 3), s(F32, 4, 2), s(F32, 2)),
    "set_rows: f16 rows": lambda s: s.builder.set_rows(s(F16, 4, 3), s(F16, 4, 2), s(I64, 2)),
    "set_rows: into i32": lambda s: s.builder.set_rows(s(I32, 4, 3), s(F32, 4, 2), s(I64, 2)),
    "set_rows: into a type without quantiser": lambda s: s.builder.set_rows(
        s(TensorType.IQ2_XXS, 256, 3), s(F32, 256, 2), s(I64, 2)
    ),
    "set_rows: row lengths differ": lambda s: s.builder.set_rows(s(F32, 4, 3), s(F32, 5, 2), s(I64, 2)),
    "set_rows: too few ids": lambda s: s.builder.set_rows(s(F32, 4, 3), s(F32, 4, 2), s(I64, 1)),
    "set_rows: batches differ": lambda s: s.builder.set_rows(s(F32, 4, 3, 2), s(F32, 4, 2, 3), s(I64, 2, 3)),
    "set_rows: outer batches differ": lambda s: s.builder.set_rows(s(F32, 4, 3, 1, 2), s(F32, 4, 2), s(I64, 2)),
    "set_rows: ids of batches that do not repeat": lambda s: s.builder.set_rows(
        s(F32, 4, 3, 4), s(F32, 4, 2, 4), s(I64, 2, 3)
    ),
    "set_rows: ids of outer batches that do not repeat": lambda s: s.builder.set_rows(
        s(F32, 4, 3, 1, 4), s(F32, 4, 2, 1, 4), s(I64, 2, 1, 3)
    ),
    "set_rows: ids of four dimensions": lambda s: s.builder.set_rows(s(F32, 4, 3), s(F32, 4, 2), s(I64, 2, 1, 1, 2)),
    "set_rows: a transposed pool": lambda s: s.builder.set_rows(s.turned(F32, 3, 4), s(F32, 4, 2), s(I64, 2)),
    "set_rows: transposed rows": lambda s: s.builder.set_rows(s(F32, 4, 3), s.turned(F32, 2, 4), s(I64, 2)),
    # ---- attention
    "soft_max: f16": lambda s: s.builder.soft_max(s(F16, 4, 3), s(F32, 4, 3), 1.0),
    "soft_max: transposed": lambda s: s.builder.soft_max(s.turned(F32, 3, 4), s(F32, 4, 3), 1.0),
    "soft_max: an i32 mask": lambda s: s.builder.soft_max(s(F32, 4, 3), s(I32, 4, 3), 1.0),
    "soft_max: a mask of too few rows": lambda s: s.builder.soft_max(s(F32, 4, 3), s(F32, 4, 2), 1.0),
    "soft_max: a mask of other rows": lambda s: s.builder.soft_max(s(F32, 4, 3), s(F32, 8, 3), 1.0),
    "soft_max: a mask of other heads": lambda s: s.builder.soft_max(s(F32, 4, 3, 4), s(F32, 4, 3, 3), 1.0),
    "soft_max: a mask of other batches": lambda s: s.builder.soft_max(s(F32, 4, 3, 1, 4), s(F32, 4, 3, 1, 3), 1.0),
    "soft_max: a transposed mask": lambda s: s.builder.soft_max(s(F32, 4, 4), s.turned(F32, 4, 4), 1.0),
    "soft_max: an infinite scale": lambda s: s.builder.soft_max(s(F32, 4, 3), s(F32, 4, 3), math.inf),
    "soft_max: transposed, without a mask": lambda s: s.builder.soft_max(s.turned(F32, 3, 4)),
    "soft_max: sinks of other heads": lambda s: s.builder.soft_max(s(F32, 4, 3, 2), sinks=s(F32, 3)),
    "soft_max: f16 sinks": lambda s: s.builder.soft_max(s(F32, 4, 3, 2), sinks=s(F16, 2)),
    "soft_max: sinks in two dimensions": lambda s: s.builder.soft_max(s(F32, 4, 3, 2), sinks=s(F32, 2, 3)),
    "soft_max: scattered sinks": lambda s: s.builder.soft_max(s(F32, 4, 3, 4), sinks=scattered(s, 4)),
    "rope: an odd head": lambda s: s.rope(a=s(F32, 9, 2, 3)),
    "rope: no dimension": lambda s: s.rope(n_dims=0),
    "rope: a negative dimension": lambda s: s.rope(n_dims=-2),
    "rope: an odd number of dimensions": lambda s: s.rope(n_dims=3),
    "rope: more dimensions than a head": lambda s: s.rope(n_dims=10),
    "rope: too few positions": lambda s: s.rope(positions=s(I32, 2)),
    "rope: i64 positions": lambda s: s.rope(positions=s(I64, 3)),
    "rope: scattered positions": lambda s: s.rope(
        positions=s.builder.permute(s.builder.view(s(I32, 2, 3), (1, 3), (8,), 0), 1, 0, 2, 3)
    ),
    "rope: too few factors": lambda s: s.rope(factors=s(F32, 3)),
    "rope: f16 factors": lambda s: s.rope(factors=s(F16, 4)),
    "rope: scattered factors": lambda s: s.rope(factors=s.turned(F32, 2, 4)),
    "rope: a base of NaN": lambda s: s.rope(base=math.nan),
    "rope: a base of 0": lambda s: s.rope(base=0.0),
    "rope: a scale of 0": lambda s: s.rope(scale=0.0),
    "rope: an infinite scale": lambda s: s.rope(scale=math.inf),
    "rope: an odd mode": lambda s: s.rope(mode=1),
    "rope: a mode of four positions": lambda s: s.rope(mode=8),
    "rope: a negative original context": lambda s: s.rope(n_ctx_orig=-1),
    "rope: an original context beyond int": lambda s: s.rope(n_ctx_orig=1 << 31),
    "rope: YaRN without an original context": lambda s: s.rope(ext_factor=1.0),
    "rope: YaRN with a beta of 0": lambda s: s.rope(ext_factor=1.0, n_ctx_orig=64, beta_slow=0.0),
    "rope: an attention factor of NaN": lambda s: s.rope(attn_factor=math.nan),
    "rope: bf16": lambda s: s.rope(a=s(BF16, 8, 2, 3)),
    "rope: transposed": lambda s: s.rope(a=s.turned(F32, 2, 8, 3)),
    "flash attention: an f32 mask": lambda s: s.flash(mask=s(F32, 6, 4)),
    "flash attention: a mask of too few tokens": lambda s: s.flash(mask=s(F16, 6, 3)),
    "flash attention: a mask of other rows": lambda s: s.flash(mask=s(F16, 8, 4)),
    "flash attention: a mask of other heads": lambda s: s.flash(mask=s(F16, 6, 4, 3)),
    "flash attention: a transposed mask": lambda s: s.flash(
        k=s(F16, 8, 4, 2), v=s(F16, 8, 4, 2), mask=s.turned(F16, 4, 4)
    ),
    "flash attention: k and v of other lengths": lambda s: s.flash(v=s(F16, 8, 5, 2)),
    "flash attention: k and v of other heads": lambda s: s.flash(v=s(F16, 8, 6, 4)),
    "flash attention: head sizes differ": lambda s: s.flash(k=s(F16, 16, 6, 2)),
    "flash attention: heads that do not group": lambda s: s.flash(q=s(F32, 8, 4, 3)),
    "flash attention: other batches": lambda s: s.flash(q=s(F32, 8, 4, 4, 2)),
    "flash attention: f16 queries": lambda s: s.flash(q=s(F16, 8, 4, 4)),
    "flash attention: i32 keys": lambda s: s.flash(k=s(I32, 8, 6, 2)),
    "flash attention: i8 values": lambda s: s.flash(v=s(TensorType.I8, 8, 6, 2)),
    "flash attention: transposed queries": lambda s: s.flash(q=s.turned(F32, 4, 8, 4)),
    "flash attention: transposed keys": lambda s: s.flash(k=s.turned(F16, 6, 8, 2)),
    "flash attention: transposed values": lambda s: s.flash(v=s.turned(F16, 6, 8, 2)),
    "flash attention: sinks of other heads": lambda s: s.flash(sinks=s(F32, 2)),
    "flash attention: f16 sinks": lambda s: s.flash(sinks=s(F16, 4)),
    "flash attention: scattered sinks": lambda s: s.flash(sinks=scattered(s, 4)),
    "flash attention: a scale of NaN": lambda s: s.flash(scale=math.nan),
    "flash attention: an infinite cap": lambda s: s.flash(softcap=math.inf),
}

UNARY = ["tanh", "sigmoid", "silu", "gelu", "gelu_erf", "relu", "softplus", "exp", "sqr", "sqrt"]
for _operation in UNARY:
    REFUSALS[f"{_operation}: i32"] = lambda s, operation=_operation: getattr(s.builder, operation)(s(I32, 4))
    REFUSALS[f"{_operation}: transposed"] = lambda s, operation=_operation: getattr(s.builder, operation)(
        s.turned(F32, 4, 3)
    )


@pytest.mark.parametrize("refused", REFUSALS.values(), ids=REFUSALS)
def test_an_unfit_operation_is_refused_and_takes_no_room(refused: Refusal) -> None:
    shapes = Shapes()
    with pytest.raises(GraphError) as caught:
        refused(shapes)
    assert str(caught.value)
    # as many descriptions as were counted: nothing was made half
    n_used = shapes.builder.base.ggml_used_mem(shapes.builder.ctx) - Shapes().builder.base.ggml_used_mem(
        Shapes().builder.ctx
    )
    assert n_used == shapes.builder.n_tensors * shapes.builder.base.ggml_tensor_overhead()


def test_the_fit_twin_of_the_refusals_is_taken() -> None:
    shapes = Shapes()
    assert shapes.rope().ne == (8, 2, 3, 1)
    assert shapes.flash().ne == (8, 4, 4, 1)
    assert shapes.flash(sinks=shapes(F32, 4)).ne == (8, 4, 4, 1)
    assert shapes.chosen().ne == (4, 2, 3, 1)
    assert shapes.biased().ne == (8, 2, 3, 1)
    assert shapes.builder.soft_max(shapes(F32, 4, 3, 4), sinks=shapes(F32, 4)).ne == (4, 3, 4, 1)
    assert shapes.builder.repeat_to(shapes(F32, 4, 2), 4, 4, 3, 1).ne == (4, 4, 3, 1)


def test_a_null_pointer_is_no_tensor() -> None:
    with pytest.raises(GraphError, match="null"):
        wrap(ffi.cast("struct ggml_tensor *", 0))


@given(
    kind=st.sampled_from([F32, F16, Q8_0, Q4_0, I64]),
    ne=st.tuples(*[st.integers(1, 5)] * 4),
    axes=st.permutations(range(4)),
    start=st.integers(0, 2),
)
@settings(deadline=None, max_examples=150)
def test_the_bytes_that_a_tensor_spans_are_ggmls(
    kind: TensorType, ne: tuple[int, ...], axes: list[int], start: int
) -> None:
    shapes = Shapes()
    tensor = shapes(kind, ne[0] * kind.block_size, *ne[1:])
    if kind.block_size == 1 or axes[0] == 0:
        tensor = shapes.builder.permute(tensor, *axes)
    assert tensor.span_bytes == shapes.builder.base.ggml_nbytes(tensor.ptr)
    if kind.block_size == 1 and tensor.has_contiguous_rows and tensor.ne[1] > start:
        ne2 = (tensor.ne[0], tensor.ne[1] - start)
        view = shapes.builder.view(tensor, ne2, (tensor.nb[1],), start * tensor.nb[1])
        assert view.span_bytes == shapes.builder.base.ggml_nbytes(view.ptr)
    shapes.builder.free()


@given(
    ne=st.tuples(*[st.integers(1, 3)] * 4),
    axes=st.permutations(range(4)),
    cut=st.integers(0, 3),
    n_cut=st.integers(1, 2),
)
@settings(deadline=None, max_examples=300)
def test_packed_rows_are_those_that_one_stride_reaches(
    ne: tuple[int, ...], axes: list[int], cut: int, n_cut: int
) -> None:
    shapes = Shapes()
    whole = shapes(F32, *(n + n_cut if d == cut else n for d, n in enumerate(ne)))
    tensor = shapes.builder.permute(shapes.builder.view(whole, ne, whole.nb[1:], 0), *axes)
    n1, n2, n3 = tensor.ne[1:]
    starts = [np.dot(tensor.nb[1:], (i1, i2, i3)) for i3 in range(n3) for i2 in range(n2) for i1 in range(n1)]
    one_stride = starts == [i * tensor.nb[1] for i in range(n1 * n2 * n3)]
    assert tensor.has_packed_rows == (one_stride and tensor.nb[0] == 4)
    shapes.builder.free()


def test_a_message_says_what_was_asked_and_what_is_there() -> None:
    shapes = Shapes()
    weight = shapes.builder.new_tensor("blk.0.attn_q.weight", Q8_0, 64, 8)
    with pytest.raises(GraphError, match=r"mul_mat: row lengths differ.*blk\.0\.attn_q\.weight Q8_0 \[64, 8, 1, 1\]"):
        shapes.builder.mul_mat(weight, shapes(F32, 32, 2))


# ---- room


def test_a_full_context_is_refused() -> None:
    context = TensorContext(library.load(), 3)
    for _ in range(3):
        context.new_tensor("", F32, 1)
    with pytest.raises(GraphError, match="the context is full"):
        context.new_tensor("", F32, 1)
    context.free()


@pytest.mark.parametrize("n", [0, -1, (1 << 20) + 1, 1 << 62])
def test_room_for_an_impossible_number_of_tensors_is_refused(n: int) -> None:
    with pytest.raises(GraphError):
        TensorContext(library.load(), n)
    with pytest.raises(GraphError):
        GraphBuilder(library.load(), n)
    if n:
        with pytest.raises(GraphError):
            GraphBuilder(library.load(), 4, n_outside=n)


def test_more_outside_tensors_than_the_graph_holds_are_refused() -> None:
    libraries = library.load()
    outside = TensorContext(libraries, 8)
    weights = [outside.new_tensor(f"w{i}", F32, 4) for i in range(8)]
    builder = GraphBuilder(libraries, 4, n_outside=2)
    total = builder.add(builder.add(weights[0], weights[1]), weights[2])
    with pytest.raises(GraphError, match="the graph is full"):
        builder.add(total, weights[3])
    builder.expand(total)
    assert [wrap(ptr).name for ptr in builder.outside[:3]] == ["w0", "w1", "w2"]
    outside.free()


def test_what_an_outside_tensor_is_a_view_of_counts_too() -> None:
    libraries = library.load()
    outside = GraphBuilder(libraries, 8)
    pool = outside.new_tensor("pool", F32, 16)
    view = outside.view(pool, (4,), (), 16, name="layer")
    builder = GraphBuilder(libraries, 1, n_outside=1)
    with pytest.raises(GraphError, match="the graph is full"):
        builder.tanh(view)
    outside.free()


def test_a_freed_context_is_refused() -> None:
    shapes = Shapes()
    tensor = shapes(F32, 4)
    shapes.builder.free()
    shapes.builder.free()
    for call in (lambda: shapes(F32, 4), lambda: shapes.builder.tanh(tensor), lambda: shapes.builder.expand(tensor)):
        with pytest.raises(GraphError, match="freed"):
            call()


# ---- data


def placed(*ne: int, kind: TensorType = F32) -> tuple[Any, Tensor, Buffer]:
    libraries = library.load()
    context = TensorContext(libraries, 4)
    tensor = context.new_tensor("data", kind, *ne)
    with Backends() as backend:
        buffer = backends.allocate_tensors(libraries, backend.buffer_type, [tensor])
    return libraries, tensor, buffer


class Backends:
    """A CPU backend for the length of a block."""

    def __enter__(self) -> Backend:
        libraries = library.load()
        self._backend = Backend(libraries, backends.cpu_device(libraries), 1)
        return self._backend

    def __exit__(self, *_: object) -> None:
        self._backend.free()


@pytest.mark.parametrize(("n", "offset"), [(5, 0), (4, 4), (1, 16), (1, -4), (1, 1 << 63)])
def test_data_outside_of_a_tensor_is_refused(n: int, offset: int) -> None:
    libraries, tensor, buffer = placed(4)
    with pytest.raises(GraphError):
        backends.set_data(libraries, tensor, np.zeros(n, np.float32), offset)
    with pytest.raises(GraphError):
        backends.get_data(libraries, tensor, np.zeros(n, np.float32), offset)
    buffer.free()


def test_data_of_a_tensor_without_memory_is_refused() -> None:
    shapes = Shapes()
    for tensor in (shapes(F32, 4), shapes.builder.view(shapes(F32, 4), (2,), (), 0)):
        with pytest.raises(GraphError, match="no data yet"):
            backends.set_data(shapes.builder.libraries, tensor, np.zeros(2, np.float32))
        with pytest.raises(GraphError, match="no data yet"):
            backends.get_data(shapes.builder.libraries, tensor, np.zeros(2, np.float32))


def test_scattered_arrays_are_refused() -> None:
    libraries, tensor, buffer = placed(4)
    scattered = np.zeros(8, np.float32)[::2]
    with pytest.raises(GraphError, match="C-contiguous"):
        backends.set_data(libraries, tensor, scattered)
    with pytest.raises(GraphError, match="C-contiguous"):
        backends.get_data(libraries, tensor, scattered)
    buffer.free()


def test_data_round_trips_in_parts() -> None:
    libraries, tensor, buffer = placed(4)
    backends.set_data(libraries, tensor, np.array([1, 2, 3, 4], np.float32))
    backends.set_data(libraries, tensor, memoryview(np.array([7, 8], np.float32)), 8)
    backends.set_data(libraries, tensor, np.empty(0, np.float32), 16)
    out = np.zeros(2, np.float32)
    backends.get_data(libraries, tensor, out, 4)
    assert out.tolist() == [2, 7]
    assert backends.get_array(libraries, tensor).tolist() == [1, 2, 7, 8]
    buffer.free()


@pytest.mark.parametrize("kind", [I32, I64])
@pytest.mark.parametrize("ids", [[0, 5], [-1, 0], [2**31 - 1, 0], [-(2**31), 0]])
def test_row_ids_out_of_range_are_refused(kind: TensorType, ids: list[int]) -> None:
    libraries, tensor, buffer = placed(2, kind=kind)
    with pytest.raises(GraphError, match="rows"):
        backends.set_row_ids(libraries, tensor, np.array(ids), 5)
    buffer.free()


def test_row_ids_of_another_kind_or_number_are_refused() -> None:
    libraries, tensor, buffer = placed(2, kind=I32)
    for ids in (np.zeros(3, np.int32), np.zeros(1, np.int32), np.zeros(2, np.float32), np.zeros(2, bool)):
        with pytest.raises(GraphError, match="integers"):
            backends.set_row_ids(libraries, tensor, ids, 5)
    with pytest.raises(GraphError, match="rows"):
        backends.set_row_ids(libraries, tensor, np.array([0, 2**32], np.int64), 5)  # would wrap to 0
    backends.set_row_ids(libraries, tensor, np.array([4, 0], np.uint64), 5)
    out = np.zeros(2, np.int32)
    backends.get_data(libraries, tensor, out)
    assert out.tolist() == [4, 0]
    buffer.free()
    libraries, tensor, buffer = placed(2)
    with pytest.raises(GraphError, match="holds no ids"):
        backends.set_row_ids(libraries, tensor, np.zeros(2, np.int32), 5)
    buffer.free()


# ---- memory


@pytest.mark.parametrize("n_bytes", [1 << 60, 1 << 63, 1 << 70, -1])
def test_memory_that_cannot_be_had_is_an_allocation_error(n_bytes: int) -> None:
    with Backends() as backend, pytest.raises(AllocationError):
        Buffer.allocate(library.load(), backend.buffer_type, n_bytes)


def test_a_tensor_is_placed_once_and_inside_of_its_buffer() -> None:
    libraries = library.load()
    context = TensorContext(libraries, 2)
    tensor = context.new_tensor("t", F32, 16)
    with Backends() as backend:
        buffer = Buffer.allocate(libraries, backend.buffer_type, 128)
    for offset in (-64, 96, 128, 1 << 40):
        with pytest.raises(GraphError, match="needs bytes"):
            buffer.place(tensor, offset)
    buffer.place(tensor, 64)
    with pytest.raises(GraphError, match="has data already"):
        buffer.place(tensor, 0)
    buffer.free()
    buffer.free()
    with pytest.raises(GraphError, match="freed"):
        buffer.clear()
    context.free()


def test_memory_is_mapped_at_aligned_addresses_only() -> None:
    libraries = library.load()
    device = backends.cpu_device(libraries)
    memory = np.arange(1024, dtype=np.uint8)
    start = -memory.ctypes.data % 32
    with pytest.raises(GraphError, match="to be mapped"):
        Buffer.map_host(libraries, device, memoryview(memory)[start + 1 : start + 101], memory)
    with pytest.raises(GraphError, match="to be mapped"):
        Buffer.map_host(libraries, device, memoryview(memory)[start:start], memory)
    buffer = Buffer.map_host(libraries, device, memoryview(memory)[start : start + 128], memory)
    context = TensorContext(libraries, 1)
    tensor = context.new_tensor("mapped", TensorType.I8, 32)
    buffer.place(tensor, 32)
    out = np.zeros(32, np.uint8)
    backends.get_data(libraries, tensor, out)
    assert out.tolist() == memory[start + 32 : start + 64].tolist()
    buffer.free()
    context.free()


# ---- running


@pytest.mark.parametrize("n_threads", [0, -1, 513, 100_000, True, 1.5, "2"])
def test_numbers_of_threads_that_ggml_cannot_take_are_refused(n_threads: Any) -> None:
    libraries = library.load()
    with pytest.raises(OptionError, match="threads must be 1 to 512"):
        Backend(libraries, backends.cpu_device(libraries), n_threads)
    with Backends() as backend, pytest.raises(OptionError):
        backend.set_threads(n_threads)


def test_a_graph_needs_its_backends_with_the_cpu_last() -> None:
    with Backends() as backend:
        for given in ([], [backend] * 17):
            bench = Bench()
            bench.builder.output(bench.builder.tanh(bench.input(random(4))), "y")
            with pytest.raises(GraphError, match="1 to 16 backends"):
                Graph(bench.builder, given, "g")


def test_a_graph_over_tensors_without_data_is_refused() -> None:
    libraries = library.load()
    outside = TensorContext(libraries, 1)
    weight = outside.new_tensor("weight", F32, 4)
    builder = GraphBuilder(libraries, 4, 1)
    builder.output(builder.tanh(weight), "y")
    with Backends() as backend, pytest.raises(GraphError, match=r"weight F32 .* has no data yet"):
        Graph(builder, [backend], "g")
    outside.free()


def test_one_builder_makes_one_graph_that_grows_no_more() -> None:
    bench = Bench()
    result = bench.builder.output(bench.builder.tanh(bench.input(random(4))), "y")
    with Backends() as backend:
        graph = Graph(bench.builder, [backend], "g")
        assert graph.working_bytes > 0
        with pytest.raises(GraphError, match="in use already"):
            Graph(bench.builder, [backend], "again")
        with pytest.raises(GraphError, match="has its working memory already"):
            bench.builder.output(bench.builder.tanh(result), "z")
        graph.free()
        graph.free()
        assert graph.working_bytes == 0
        with pytest.raises(GraphError, match="g was freed before"):
            graph.compute()
        with pytest.raises(GraphError, match="freed"):
            Graph(bench.builder, [backend], "again")


def test_a_graph_whose_nodes_or_backend_are_gone_is_refused() -> None:
    libraries = library.load()
    for which in ("nodes", "backend"):
        bench = Bench()
        bench.builder.output(bench.builder.tanh(bench.input(random(4))), "y")
        backend = Backend(libraries, backends.cpu_device(libraries), 1)
        graph = Graph(bench.builder, [backend], "g")
        (bench.builder if which == "nodes" else backend).free()
        with pytest.raises(GraphError, match="freed"):
            graph.compute()
        graph.free()
        backend.free()


def test_a_graph_that_was_stopped_is_a_compute_error_with_its_name() -> None:
    libraries = library.load()

    @ffi.callback("ggml_abort_callback")  # type: ignore[untyped-decorator]
    def stop(_data: Any) -> bool:
        return True

    bench = Bench()
    bench.builder.output(bench.builder.tanh(bench.input(random(4))), "y")
    with Backends() as backend:
        name = b"ggml_backend_set_abort_callback"
        address = libraries.base.ggml_backend_reg_get_proc_address(
            libraries.base.ggml_backend_dev_backend_reg(backend.device.ptr), name
        )
        ffi.cast("ggml_backend_set_abort_callback_t", address)(backend.ptr, stop, ffi.NULL)
        graph = Graph(bench.builder, [backend], "decode of 3 tokens")
        with pytest.raises(ComputeError, match="decode of 3 tokens"):
            graph.compute()
        graph.free()


def test_every_refusal_is_of_the_engines_tree() -> None:
    for error in (GraphError, AllocationError, ComputeError, OptionError):
        assert issubclass(error, EngineError)


# ---- the guards are needed

HANGS = {"rope of no dimension"}
# one of every kind of death, quick enough for every run
FAST = [
    "mul_mat of other row lengths",
    "mul_mat of an i32 weight",
    "add of f16 to f32",
    "view of overlapping rows",
    "get_rows at the number of rows",
    "a tensor of the removed type 4",
    "a full graph",
    "an unaligned mapping",
]
DEATHS = {-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGFPE}


def run_probe(name: str, timeout_s: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(Path(raw_probe.__file__)), name],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env=child_environment(),
    )


def child_environment() -> dict[str, str]:
    import os

    root = str(Path(library.__file__).parents[2])
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in raw_probe.PROBES]
)
def test_without_guards_the_process_dies_or_hangs(name: str) -> None:
    if name in HANGS:
        with pytest.raises(subprocess.TimeoutExpired) as hung:
            run_probe(name, 3)
        assert b"READY" in (hung.value.stdout or b"")
        return
    finished = run_probe(name, 60)
    assert "READY" in finished.stdout, finished.stderr
    assert finished.returncode in DEATHS, finished.stderr


def test_the_fast_probes_exist() -> None:
    assert set(FAST) <= set(raw_probe.PROBES)
