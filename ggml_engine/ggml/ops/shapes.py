"""The same elements under other shapes, strides and types, and copies of them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ggml_engine.ggml.ops.graph_context import GraphContext
from ggml_engine.ggml.ops.tensors import FLOAT_TYPES, Tensor, refusal, require, require_countable, wrap
from ggml_engine.ggml.tensor_types import TensorType


class ShapeOps(GraphContext):
    """Views, copies, repetition."""

    def reshape(self, a: Tensor, *ne: int, name: str = "") -> Tensor:
        """The same elements under a shape of one to four dimensions."""
        if not a.is_contiguous:
            raise refusal("reshape", "a contiguous tensor is needed", a)
        if not (1 <= len(ne) <= 4 and min(ne) > 0):
            raise refusal("reshape", f"bad shape {ne}", a)
        if math.prod(ne) != a.n_elements:
            raise refusal("reshape", f"{ne} has another number of elements", a)
        if ne[0] % a.type.block_size:
            raise refusal("reshape", f"rows of {ne[0]} do not fill blocks", a)
        base = self.base
        makers = (base.ggml_reshape_1d, base.ggml_reshape_2d, base.ggml_reshape_3d, base.ggml_reshape_4d)
        return self._named(makers[len(ne) - 1](self._room("reshape", a), a.ptr, *ne), name)

    def view(self, a: Tensor, ne: tuple[int, ...], strides: tuple[int, ...], offset: int, name: str = "") -> Tensor:
        """Part of a tensor: 1 to 4 dimensions `ne`, strides in bytes of dimensions 1 and up, offset in bytes."""
        kind = a.type
        if not (1 <= len(ne) <= 4 and len(strides) == len(ne) - 1):
            raise refusal("view", f"bad shape {ne}, strides {strides}", a)
        if min(*ne, *strides, 1) <= 0 or offset < 0:
            raise refusal("view", "negative", a)
        if ne[0] % kind.block_size:
            raise refusal("view", f"rows of {ne[0]} do not fill blocks", a)
        row = kind.row_bytes(ne[0])
        last = offset + row
        n_rows = 1
        for n, stride in zip(ne[1:], strides, strict=True):
            last += (n - 1) * stride
            n_rows *= n
        if last > a.span_bytes:
            raise refusal("view", f"ends at byte {last} of {a.span_bytes}", a)
        # ggml counts a view as if its rows did not overlap, from the first byte of the tensor that holds the data
        source = a.ptr.view_src
        packed = (a.ptr.view_offs if source else 0) + offset + row * n_rows
        held = wrap(source) if source else a
        if packed > held.span_bytes:
            raise refusal("view", f"its rows overlap too far: {packed} of {held.span_bytes} bytes", a)
        unit = kind.block_bytes
        if any(n % unit for n in (offset, *strides)):
            raise refusal("view", "unaligned stride or offset", a)
        makers = (self.base.ggml_view_1d, self.base.ggml_view_2d, self.base.ggml_view_3d, self.base.ggml_view_4d)
        make = makers[len(ne) - 1]
        return self._named(make(self._room("view", a), a.ptr, *ne, *strides, offset), name)

    def permute(self, a: Tensor, *axes: int, name: str = "") -> Tensor:
        """Dimension i of `a` becomes dimension axes[i]."""
        require(sorted(axes) == [0, 1, 2, 3], "permute", f"axes {axes} are no permutation", a)
        # a column of blocks would pass for a row
        require(a.type.block_size == 1 or axes[0] == 0, "permute", "blocks cannot be transposed", a)
        return self._named(self.base.ggml_permute(self._room("permute", a), a.ptr, *axes), name)

    def transpose(self, a: Tensor, name: str = "") -> Tensor:
        """Dimensions 0 and 1 swapped; a view."""
        require(a.type.block_size == 1, "transpose", "blocks cannot be transposed", a)
        return self._named(self.base.ggml_transpose(self._room("transpose", a), a.ptr), name)

    def cont_2d(self, a: Tensor, ne0: int, ne1: int, name: str = "") -> Tensor:
        """A contiguous copy under a shape of two dimensions."""
        require(ne0 > 0 and ne1 > 0 and ne0 * ne1 == a.n_elements, "cont_2d", f"[{ne0}, {ne1}] does not fit", a)
        require(a.type in FLOAT_TYPES, "cont_2d", "floats are needed", a)
        return self._named(self.base.ggml_cont_2d(self._room("cont_2d", a), a.ptr, ne0, ne1), name)

    def repeat(self, a: Tensor, n: int, name: str = "") -> Tensor:
        """`n` copies of a tensor of at most three dimensions, along dimension 3."""
        require(a.ne[3] == 1, "repeat", "at most three dimensions are needed", a)
        return self.repeat_to(a, *a.ne[:3], n, name=name)

    def repeat_to(self, a: Tensor, ne0: int, ne1: int, ne2: int, ne3: int, name: str = "") -> Tensor:
        """Copies of `a`, f32, beside each other until the shape is reached; each dimension is a multiple of a's."""
        ne = (ne0, ne1, ne2, ne3)
        require(a.type == TensorType.F32 and a.has_contiguous_rows, "repeat", "f32 rows are needed", a)
        fits = all(n > 0 and n % small == 0 for n, small in zip(ne, a.ne, strict=True))
        require(fits, "repeat", f"{list(ne)} are no multiples", a)
        require_countable("repeat", ne)
        return self._named(self.base.ggml_repeat_4d(self._room("repeat", a), a.ptr, *ne), name)

    def sum_rows(self, a: Tensor, name: str = "") -> Tensor:
        """The sum of each row: dimension 0 becomes 1."""
        require(a.type == TensorType.F32 and a.has_contiguous_rows, "sum_rows", "f32 rows are needed", a)
        return self._named(self.base.ggml_sum_rows(self._room("sum_rows", a), a.ptr), name)

    def cont(self, a: Tensor, name: str = "") -> Tensor:
        """A contiguous copy."""
        return self._named(self.base.ggml_cont(self._room("cont", a), a.ptr), name)

    def copy(self, a: Tensor, b: Tensor, name: str = "") -> Tensor:
        """Copies the bytes of `a` into `b`, which is alike in type and shape: b. The two must not overlap."""
        require(a.type == b.type and a.ne == b.ne, "copy", "types or shapes differ", a, b)
        require(a.has_contiguous_rows and b.has_contiguous_rows, "copy", "rows must be contiguous", a, b)
        return self._named(self.base.ggml_cpy(self._room("copy", a, b), a.ptr, b.ptr), name)

    def cast(self, a: Tensor, tensor_type: TensorType, name: str = "") -> Tensor:
        """A contiguous copy in another type: between floats, or between f32 and i32, where the fraction is cut off."""
        kinds = {a.type, tensor_type}
        known = kinds <= FLOAT_TYPES or kinds <= {TensorType.F32, TensorType.I32}
        require(known, "cast", f"between floats, or between f32 and i32; not to {tensor_type!r}", a)
        return self._named(self.base.ggml_cast(self._room("cast", a), a.ptr, int(tensor_type)), name)

    def concat(self, a: Tensor, b: Tensor, dim: int, name: str = "") -> Tensor:
        """a, then b, along dimension `dim`; a copy."""
        require(dim in {0, 1, 2, 3}, "concat", f"dimension {dim}", a, b)
        require(a.type == b.type and (dim > 0 or a.type.block_size == 1), "concat", "types do not go together", a, b)
        alike = all(a.ne[d] == b.ne[d] for d in range(4) if d != dim)
        require(alike, "concat", f"shapes differ outside of dimension {dim}", a, b)
        # copied by rows, other than 16 and 32 bit types
        by_rows = a.type not in {*FLOAT_TYPES, TensorType.I16, TensorType.I32}
        rows = a.has_contiguous_rows and b.has_contiguous_rows
        require(rows or not by_rows, "concat", "rows must be contiguous in this type", a, b)
        require_countable("concat", tuple(n + b.ne[d] if d == dim else n for d, n in enumerate(a.ne)))
        return self._named(self.base.ggml_concat(self._room("concat", a, b), a.ptr, b.ptr, dim), name)

    def concat_all(self, parts: Sequence[Tensor], dim: int) -> Tensor:
        """All parts in their order; neighbours are joined in pairs, so that an element is copied log2(parts) times."""
        require(len(parts) > 0, "concat_all", "there are no parts")
        while len(parts) > 1:
            pairs = [self.concat(parts[i], parts[i + 1], dim) for i in range(0, len(parts) - 1, 2)]
            parts = pairs if len(parts) % 2 == 0 else [*pairs, parts[-1]]
        return parts[0]
