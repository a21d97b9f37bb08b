"""The bytes of tensors in every type that ggml multiplies by: by its own quantiser, drawn at random where that is slow."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt

from ggml_engine.ggml import library
from ggml_engine.ggml.library import ffi
from ggml_engine.ggml.tensor_types import TensorType

Blocks = npt.NDArray[np.uint8]

# ggml's quantisers of these build search tables for 20 seconds; every bit pattern of theirs is valid but for the scales
DRAWN = frozenset({TensorType.IQ2_XXS, TensorType.IQ2_XS, TensorType.IQ2_S, TensorType.IQ1_S, TensorType.IQ1_M})


def blocks_of(values: npt.NDArray[np.float32], kind: TensorType) -> Blocks:
    """`values` [..., n] in a type, uint8 [..., bytes of a row]; of DRAWN types other values that spread as much."""
    rows = np.ascontiguousarray(values, np.float32).reshape(-1, values.shape[-1])
    if kind == TensorType.F32:
        raw = rows.view(np.uint8)
    else:
        raw = _drawn(rows, kind) if kind in DRAWN else _quantised(rows, kind)
    return raw.reshape(*values.shape[:-1], kind.row_bytes(values.shape[-1]))


def _quantised(rows: npt.NDArray[np.float32], kind: TensorType) -> Blocks:
    """With an importance of one everywhere."""
    n_rows, n_columns = rows.shape
    raw = np.zeros(kind.tensor_bytes((n_columns, n_rows)), np.uint8)
    importance = np.ones(n_columns, np.float32)
    written = library.load().base.ggml_quantize_chunk(
        int(kind), ffi.from_buffer("float[]", rows), ffi.from_buffer(raw, require_writable=True), 0, n_rows, n_columns,
        ffi.from_buffer("float[]", importance),
    )  # fmt: skip
    assert written == raw.nbytes
    return raw


def _drawn(rows: npt.NDArray[np.float32], kind: TensorType) -> Blocks:
    """Random blocks that mean values with the standard deviation of `rows`."""
    rng = np.random.default_rng([*rows.shape, int(kind), *rows[0, :4].view(np.uint32)])
    blocks = rng.integers(0, 256, (rows.size // kind.block_size, kind.block_bytes), np.uint8)
    _set_scales(blocks, kind, 1.0)
    spread = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(int(kind))).std()
    _set_scales(blocks, kind, float(rows.std() / spread))
    return blocks


def _set_scales(blocks: Blocks, kind: TensorType, scale: float) -> None:
    bits = int(np.float16(scale).view(np.uint16))
    if kind == TensorType.IQ1_M:  # a nibble in the top of each of the last four words
        for i in range(4):
            word = -7 + 2 * i
            blocks[:, word] = blocks[:, word] & 0x0F | (bits >> 4 * i & 0xF) << 4
    else:
        blocks[:, 0], blocks[:, 1] = bits & 0xFF, bits >> 8
