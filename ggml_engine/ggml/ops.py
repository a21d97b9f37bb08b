"""Graph operations with their preconditions checked, so that a bad shape is a GraphError and not a dead process.

ggml aborts on a misfit; every method here states in Python what ggml would assert, and checks it before the call.
Owns the ggml context that holds a graph's tensors. Knows no model and no cache. Shapes are in ggml's order, ne0 (the
contiguous one) first; every Tensor has four dimensions. Data (row ids, positions) is checked where it is set.
Source of the conditions: ggml.c and ggml-cpu/ops.cpp of the checked version.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ggml_engine.errors import AllocationError, GraphError
from ggml_engine.ggml.library import Libraries, ffi
from ggml_engine.ggml.tensor_types import TYPES_BY_NUMBER, TensorType, describe_refusal

ROPE_NORMAL = 0
ROPE_NEOX = 2

FLOAT_TYPES = frozenset({TensorType.F32, TensorType.F16, TensorType.BF16})
MATMUL_TYPES = frozenset(kind for kind in TensorType if kind.can_multiply)
_MAX_ELEMENTS = 2**63 - 1
_MAX_TENSORS = 1 << 20
_FLASH_KV_TYPES = MATMUL_TYPES
_SET_ROWS_TYPES = frozenset(
    {
        TensorType.F32,
        TensorType.F16,
        TensorType.BF16,
        TensorType.Q8_0,
        TensorType.Q4_0,
        TensorType.Q4_1,
        TensorType.Q5_0,
        TensorType.Q5_1,
        TensorType.IQ4_NL,
    }
)
Shape = tuple[int, int, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Tensor:
    """A tensor of ggml: the pointer, and what never changes about it. `nb` are strides in bytes."""

    ptr: Any
    type: TensorType
    ne: Shape
    nb: Shape

    @property
    def name(self) -> str:
        """The name that was given to it."""
        return str(ffi.string(self.ptr.name).decode("utf-8", "replace"))

    @property
    def n_elements(self) -> int:
        """Number of elements."""
        return math.prod(self.ne)

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie one after the other in ne0, ne1, ne2, ne3 order."""
        expected = self.type.block_bytes
        if self.nb[0] != expected:
            return False
        expected = self.type.row_bytes(self.ne[0])
        for n, stride in zip(self.ne[1:], self.nb[1:], strict=True):
            if n != 1 and stride != expected:
                return False
            expected = stride * n if n != 1 else expected * n
        return True

    @property
    def has_contiguous_rows(self) -> bool:
        """Whether each row's elements lie one after the other."""
        return self.nb[0] == self.type.block_bytes

    @property
    def span_bytes(self) -> int:
        """Bytes from the first element to one past the last."""
        if self.type.block_size == 1:
            return self.type.block_bytes + sum((n - 1) * stride for n, stride in zip(self.ne, self.nb, strict=True))
        rows = sum((n - 1) * stride for n, stride in zip(self.ne[1:], self.nb[1:], strict=True))
        return self.type.row_bytes(self.ne[0]) + rows

    def __repr__(self) -> str:
        return f"{self.name or 'tensor'} {self.type.name} {list(self.ne)}"


def wrap(ptr: Any) -> Tensor:
    """The Tensor behind a `struct ggml_tensor *`. Raises GraphError for null."""
    if ptr == ffi.NULL:
        raise GraphError("a null pointer is no tensor")
    return Tensor(ptr, TYPES_BY_NUMBER[ptr.type], tuple(ffi.unpack(ptr.ne, 4)), tuple(ffi.unpack(ptr.nb, 4)))


def _require(condition: bool, operation: str, reason: str, *tensors: Tensor) -> None:
    if not condition:
        shown = ", ".join(repr(tensor) for tensor in tensors)
        raise GraphError(f"{operation}: {reason} (given: {shown})" if shown else f"{operation}: {reason}")


def _repeats(small: Tensor, large: Tensor) -> bool:
    return all(n and big % n == 0 for n, big in zip(small.ne, large.ne, strict=True))


def _require_countable(operation: str, ne: tuple[int, ...]) -> None:
    # times 16: in bytes of the widest type, and with the padding of buffers
    _require(math.prod(ne) * 16 <= _MAX_ELEMENTS, operation, f"too many elements: {list(ne)}")


def _require_tensor_count(n_tensors: int, least: int) -> None:
    if not least <= n_tensors <= _MAX_TENSORS:
        raise GraphError(f"room for {n_tensors} tensors was asked for, {least} to {_MAX_TENSORS} are possible")


class TensorContext:
    """A ggml context: room for the descriptions of at most `max_tensors` tensors, their data lies elsewhere."""

    def __init__(self, libraries: Libraries, max_tensors: int, extra_bytes: int = 0) -> None:
        _require_tensor_count(max_tensors, 1)
        self.libraries = libraries
        self.base = libraries.base
        self.max_tensors = max_tensors
        self.n_tensors = 0
        n_bytes = self.base.ggml_tensor_overhead() * max_tensors + extra_bytes
        params = {"mem_size": n_bytes, "mem_buffer": ffi.NULL, "no_alloc": True}
        self._ctx = self.base.ggml_init(ffi.new("struct ggml_init_params *", params)[0])
        if self._ctx == ffi.NULL:
            raise AllocationError(f"a ggml context of {n_bytes} bytes could not be had")

    @property
    def ctx(self) -> Any:
        """The open context's pointer."""
        if self._ctx is None:
            raise GraphError("the context was freed before")
        return self._ctx

    def free(self) -> None:
        """Free the descriptions; the tensors must not be used afterwards."""
        ctx, self._ctx = self._ctx, None
        if ctx is not None:
            self.base.ggml_free(ctx)

    def _room(self, operation: str, *_inputs: Tensor | None) -> Any:
        """The context, for one more tensor that is made of `inputs`."""
        if self.n_tensors >= self.max_tensors:
            raise GraphError(f"{operation}: the context is full ({self.max_tensors} tensors)")
        ctx = self.ctx
        self.n_tensors += 1
        return ctx

    def new_tensor(self, name: str, tensor_type: TensorType, *ne: int) -> Tensor:
        """A tensor without data, of one to four dimensions."""
        _require(1 <= len(ne) <= 4, "new_tensor", f"1 to 4 dimensions, asked for {len(ne)}")
        _require(all(0 < n <= _MAX_ELEMENTS for n in ne), "new_tensor", f"dimensions must be positive, asked for {ne}")
        _require_countable("new_tensor", ne)
        kind = TYPES_BY_NUMBER.get(int(tensor_type))
        if kind is None:
            raise GraphError(f"new_tensor: {describe_refusal(int(tensor_type))}")
        _require(ne[0] % kind.block_size == 0, "new_tensor", f"rows of {ne[0]} do not fill blocks of {kind.block_size}")
        ptr = self.base.ggml_new_tensor(self._room("new_tensor"), int(kind), len(ne), ffi.new("int64_t[]", ne))
        return self._named(ptr, name)

    def _named(self, ptr: Any, name: str) -> Tensor:
        if ptr == ffi.NULL:
            raise GraphError(f"ggml made no tensor for {name!r}")
        if name:
            self.base.ggml_set_name(ptr, name.encode("utf-8")[:63])
        self._note(ptr)
        return wrap(ptr)

    def _note(self, ptr: Any) -> None:
        """Called with every tensor that was made here."""


class GraphBuilder(TensorContext):
    """Builds one graph. Every operation takes a name for its result, as a builder of llama.cpp names its nodes."""

    def __init__(self, libraries: Libraries, max_tensors: int, n_outside: int = 0) -> None:
        """Makes room for `n_outside` tensors of other contexts: weights, pool, and what these are views of."""
        _require_tensor_count(max_tensors, 1)
        _require_tensor_count(n_outside, 0)
        self.has_graph = False
        self.outside: list[Any] = []  # pointers; their data must be there before the graph runs
        self._reached: set[Any] = set()  # pointers of all tensors, made here or outside; cffi's hash by address
        self.graph_size = max_tensors + n_outside
        overhead = libraries.base.ggml_graph_overhead_custom(self.graph_size, False)
        super().__init__(libraries, max_tensors, overhead)
        self.cgraph = self.base.ggml_new_graph_custom(self.ctx, self.graph_size, False)

    # ---- what is in reach

    def _note(self, ptr: Any) -> None:
        self._reached.add(ptr)

    def _room(self, operation: str, *inputs: Tensor | None) -> Any:
        for tensor in inputs:
            if tensor is not None and tensor.ptr not in self._reached:
                self._reach(operation, tensor.ptr)
        self._require_graph_room(operation)
        return super()._room(operation, *inputs)

    def _require_graph_room(self, operation: str) -> None:
        if len(self._reached) >= self.graph_size:
            raise GraphError(f"{operation}: the graph is full ({self.graph_size} tensors, those outside included)")

    def _reach(self, operation: str, ptr: Any) -> None:
        # ggml counts what hangs below an outside tensor too, and aborts where its graph is full
        waiting = [ptr] if self.ctx else []
        while waiting:
            found = waiting.pop()
            if found == ffi.NULL or found in self._reached:
                continue
            self._require_graph_room(operation)
            self._reached.add(found)
            self.outside.append(found)
            if found.op:  # a leaf, which weights are, is made of nothing
                waiting += list(found.src)

    def seal(self) -> None:
        """The graph gets its working memory: nothing more can be added, and the bookkeeping of its making goes."""
        self.has_graph = True
        self.outside.clear()
        self._reached.clear()

    # ---- inputs, outputs, order

    def input(self, name: str, tensor_type: TensorType, *ne: int) -> Tensor:
        """A tensor that is filled before every run."""
        tensor = self.new_tensor(name, tensor_type, *ne)
        self.base.ggml_set_input(tensor.ptr)
        return tensor

    def output(self, tensor: Tensor, name: str) -> Tensor:
        """Mark a result that is read after the run."""
        self._reach("output", tensor.ptr)
        self.base.ggml_set_name(tensor.ptr, name.encode("utf-8")[:63])
        self.base.ggml_set_output(tensor.ptr)
        self.expand(tensor)
        return tensor

    def expand(self, tensor: Tensor) -> None:
        """Let everything up to `tensor` run before what is expanded later."""
        if self.has_graph:
            raise GraphError("expand: the graph has its working memory already")
        self._reach("expand", tensor.ptr)
        self.base.ggml_build_forward_expand(self.cgraph, tensor.ptr)

    # ---- arithmetic

    def _elementwise(self, operation: str, a: Tensor, b: Tensor) -> None:
        _require(a.type in FLOAT_TYPES and b.type in FLOAT_TYPES, operation, "both must be floats", a, b)
        _require(b.type in {TensorType.F32, a.type}, operation, "the second must be f32 or of the first's type", a, b)
        _require(_repeats(b, a), operation, "the second does not repeat into the first", a, b)
        _require(a.has_contiguous_rows and b.has_contiguous_rows, operation, "rows must be contiguous", a, b)

    def add(self, a: Tensor, b: Tensor, name: str = "") -> Tensor:
        """a + b; b is repeated to a's shape."""
        self._elementwise("add", a, b)
        return self._named(self.base.ggml_add(self._room("add", a, b), a.ptr, b.ptr), name)

    def mul(self, a: Tensor, b: Tensor, name: str = "") -> Tensor:
        """a * b elementwise; b is repeated to a's shape."""
        self._elementwise("mul", a, b)
        return self._named(self.base.ggml_mul(self._room("mul", a, b), a.ptr, b.ptr), name)

    def scale(self, a: Tensor, factor: float, name: str = "") -> Tensor:
        """a * factor."""
        _require(a.type == TensorType.F32 and a.is_contiguous, "scale", "f32 and contiguous is needed", a)
        _require(math.isfinite(factor), "scale", f"the factor must be finite, is {factor}")
        return self._named(self.base.ggml_scale(self._room("scale", a), a.ptr, factor), name)

    def _unary_input(self, operation: str, *tensors: Tensor) -> None:
        for a in tensors:
            _require(a.type == TensorType.F32, operation, "f32 is needed", a)
            _require(a.is_contiguous, operation, "a contiguous tensor is needed", a)

    def tanh(self, a: Tensor, name: str = "") -> Tensor:
        """Hyperbolic tangent."""
        self._unary_input("tanh", a)
        return self._named(self.base.ggml_tanh(self._room("tanh", a), a.ptr), name)

    def silu(self, a: Tensor, name: str = "") -> Tensor:
        """x * sigmoid(x)."""
        self._unary_input("silu", a)
        return self._named(self.base.ggml_silu(self._room("silu", a), a.ptr), name)

    def swiglu(self, gate: Tensor, up: Tensor, name: str = "") -> Tensor:
        """silu(gate) * up (Shazeer 2020, arXiv:2002.05202)."""
        self._unary_input("swiglu", gate, up)
        _require(gate.ne == up.ne, "swiglu", "shapes differ", gate, up)
        return self._named(self.base.ggml_swiglu_split(self._room("swiglu", gate, up), gate.ptr, up.ptr), name)

    def geglu(self, gate: Tensor, up: Tensor, name: str = "") -> Tensor:
        """gelu(gate) * up, with the tanh approximation (Shazeer 2020, arXiv:2002.05202)."""
        self._unary_input("geglu", gate, up)
        _require(gate.ne == up.ne, "geglu", "shapes differ", gate, up)
        return self._named(self.base.ggml_geglu_split(self._room("geglu", gate, up), gate.ptr, up.ptr), name)

    def rms_norm(self, a: Tensor, eps: float, name: str = "") -> Tensor:
        """a / sqrt(mean(a^2) + eps) per row (Zhang and Sennrich 2019, arXiv:1910.07467)."""
        _require(a.type == TensorType.F32 and a.has_contiguous_rows, "rms_norm", "f32 with contiguous rows", a)
        _require(math.isfinite(eps) and eps >= 0, "rms_norm", f"eps must be finite and not negative, is {eps}")
        return self._named(self.base.ggml_rms_norm(self._room("rms_norm", a), a.ptr, eps), name)

    def mul_mat(self, a: Tensor, b: Tensor, name: str = "", *, f32_accumulation: bool = False) -> Tensor:
        """a^T b: [k, m] by [k, n] gives f32 [m, n]; dimensions 2 and 3 of a are repeated to b's."""
        _require(a.type in MATMUL_TYPES, "mul_mat", "the first cannot be multiplied in this type", a, b)
        fits = b.type == TensorType.F32 or b.type == a.type in FLOAT_TYPES
        _require(fits, "mul_mat", "the second must be f32, or of the first's float type", a, b)
        _require(a.ne[0] == b.ne[0], "mul_mat", "row lengths differ", a, b)
        _require(b.ne[2] % a.ne[2] == 0 and b.ne[3] % a.ne[3] == 0, "mul_mat", "batches do not repeat", a, b)
        _require(a.nb[0] <= a.nb[1] and a.has_contiguous_rows, "mul_mat", "the first must not be transposed", a, b)
        _require(b.has_contiguous_rows, "mul_mat", "the second's rows must be contiguous", a, b)
        _require_countable("mul_mat", (a.ne[1], *b.ne[1:]))
        result = self._named(self.base.ggml_mul_mat(self._room("mul_mat", a, b), a.ptr, b.ptr), name)
        if f32_accumulation:
            self.base.ggml_prec_set_acc(result.ptr, self.base.GGML_PREC_F32)
        return result

    def hadamard(self, a: Tensor, matrix: Tensor, name: str = "") -> Tensor:
        """Rows of `a`, f32, in pieces of n = matrix.ne[0] elements, each times a Hadamard matrix f32 [n, n].

        The CPU uses a fast Walsh-Hadamard transform in place of the product. Its own inverse.
        """
        n = matrix.ne[0]
        _require(
            matrix.type == TensorType.F32 and matrix.ne == (n, n, 1, 1), "hadamard", "a square f32 matrix", a, matrix
        )
        _require(n & (n - 1) == 0, "hadamard", f"the matrix must have a power of two of rows, has {n}")
        _require(a.type == TensorType.F32 and a.ne[0] % n == 0, "hadamard", f"f32 rows in pieces of {n}", a, matrix)
        pieces = self.reshape(a, n, a.n_elements // n) if a.is_contiguous else self.cont_2d(a, n, a.n_elements // n)
        rotated = self.mul_mat(matrix, pieces)
        self.base.ggml_mul_mat_set_hint(rotated.ptr, self.base.GGML_HINT_SRC0_IS_HADAMARD)
        shape = a.ne[:2] if a.ne[2] == 1 else a.ne[:3]
        return self.reshape(rotated, *shape, name=name)

    # ---- shapes

    def reshape(self, a: Tensor, *ne: int, name: str = "") -> Tensor:
        """The same elements under a shape of two or three dimensions."""
        _require(a.is_contiguous, "reshape", "a contiguous tensor is needed", a)
        _require(len(ne) in {2, 3} and all(n > 0 for n in ne), "reshape", f"bad shape {ne}", a)
        _require(math.prod(ne) == a.n_elements, "reshape", f"{ne} has another number of elements", a)
        _require(ne[0] % a.type.block_size == 0, "reshape", f"rows of {ne[0]} do not fill blocks", a)
        make = self.base.ggml_reshape_2d if len(ne) == 2 else self.base.ggml_reshape_3d
        return self._named(make(self._room("reshape", a), a.ptr, *ne), name)

    def view(self, a: Tensor, ne: tuple[int, ...], strides: tuple[int, ...], offset: int, name: str = "") -> Tensor:
        """Part of a tensor: 1 to 4 dimensions `ne`, strides in bytes of dimensions 1 and up, offset in bytes."""
        _require(1 <= len(ne) <= 4 and len(strides) == len(ne) - 1, "view", f"bad shape {ne}, strides {strides}", a)
        _require(all(n > 0 for n in ne) and all(s > 0 for s in strides) and offset >= 0, "view", "negative", a)
        _require(ne[0] % a.type.block_size == 0, "view", f"rows of {ne[0]} do not fill blocks", a)
        last = offset + a.type.row_bytes(ne[0])
        last += sum((n - 1) * stride for n, stride in zip(ne[1:], strides, strict=True))
        _require(last <= a.span_bytes, "view", f"ends at byte {last} of {a.span_bytes}", a)
        # ggml counts a view as if its rows did not overlap, from the first byte of the tensor that holds the data
        packed = a.ptr.view_offs + offset + a.type.row_bytes(ne[0]) * math.prod(ne[1:])
        held = a if a.ptr.view_src == ffi.NULL else wrap(a.ptr.view_src)
        _require(packed <= held.span_bytes, "view", f"its rows overlap too far: {packed} of {held.span_bytes} bytes", a)
        _require(all(s % a.type.block_bytes == 0 for s in (*strides, offset)), "view", "unaligned stride or offset", a)
        makers = (self.base.ggml_view_1d, self.base.ggml_view_2d, self.base.ggml_view_3d, self.base.ggml_view_4d)
        make = makers[len(ne) - 1]
        return self._named(make(self._room("view", a), a.ptr, *ne, *strides, offset), name)

    def permute(self, a: Tensor, *axes: int, name: str = "") -> Tensor:
        """Dimension i of `a` becomes dimension axes[i]."""
        _require(sorted(axes) == [0, 1, 2, 3], "permute", f"axes {axes} are no permutation", a)
        # a column of blocks would pass for a row
        _require(a.type.block_size == 1 or axes[0] == 0, "permute", "blocks cannot be transposed", a)
        return self._named(self.base.ggml_permute(self._room("permute", a), a.ptr, *axes), name)

    def cont_2d(self, a: Tensor, ne0: int, ne1: int, name: str = "") -> Tensor:
        """A contiguous copy under a shape of two dimensions."""
        _require(ne0 > 0 and ne1 > 0 and ne0 * ne1 == a.n_elements, "cont_2d", f"[{ne0}, {ne1}] does not fit", a)
        _require(a.type in FLOAT_TYPES, "cont_2d", "floats are needed", a)
        return self._named(self.base.ggml_cont_2d(self._room("cont_2d", a), a.ptr, ne0, ne1), name)

    def repeat(self, a: Tensor, n: int, name: str = "") -> Tensor:
        """`n` copies of a tensor of at most three dimensions, along dimension 3."""
        _require(a.type == TensorType.F32, "repeat", "f32 is needed", a)
        _require(a.ne[3] == 1, "repeat", "at most three dimensions are needed", a)
        _require(n > 0, "repeat", f"{n} times", a)
        _require_countable("repeat", (*a.ne[:3], n))
        return self._named(self.base.ggml_repeat_4d(self._room("repeat", a), a.ptr, *a.ne[:3], n), name)

    def sum_rows(self, a: Tensor, name: str = "") -> Tensor:
        """The sum of each row: dimension 0 becomes 1."""
        _require(a.type == TensorType.F32 and a.has_contiguous_rows, "sum_rows", "f32 rows are needed", a)
        return self._named(self.base.ggml_sum_rows(self._room("sum_rows", a), a.ptr), name)

    def cont(self, a: Tensor, name: str = "") -> Tensor:
        """A contiguous copy."""
        return self._named(self.base.ggml_cont(self._room("cont", a), a.ptr), name)

    def copy(self, a: Tensor, b: Tensor, name: str = "") -> Tensor:
        """Copies the bytes of `a` into `b`, which is alike in type and shape: b. The two must not overlap."""
        _require(a.type == b.type and a.ne == b.ne, "copy", "types or shapes differ", a, b)
        _require(a.has_contiguous_rows and b.has_contiguous_rows, "copy", "rows must be contiguous", a, b)
        return self._named(self.base.ggml_cpy(self._room("copy", a, b), a.ptr, b.ptr), name)

    def cast(self, a: Tensor, tensor_type: TensorType, name: str = "") -> Tensor:
        """A contiguous copy in another type."""
        _require(a.type in FLOAT_TYPES and tensor_type in FLOAT_TYPES, "cast", f"floats only, to {tensor_type}", a)
        return self._named(self.base.ggml_cast(self._room("cast", a), a.ptr, int(tensor_type)), name)

    def concat(self, a: Tensor, b: Tensor, dim: int, name: str = "") -> Tensor:
        """a, then b, along dimension `dim`; a copy."""
        _require(dim in {0, 1, 2, 3}, "concat", f"dimension {dim}", a, b)
        _require(a.type == b.type and (dim > 0 or a.type.block_size == 1), "concat", "types do not go together", a, b)
        alike = all(a.ne[d] == b.ne[d] for d in range(4) if d != dim)
        _require(alike, "concat", f"shapes differ outside of dimension {dim}", a, b)
        # copied by rows, other than 16 and 32 bit types
        by_rows = a.type not in {*FLOAT_TYPES, TensorType.I16, TensorType.I32}
        rows = a.has_contiguous_rows and b.has_contiguous_rows
        _require(rows or not by_rows, "concat", "rows must be contiguous in this type", a, b)
        _require_countable("concat", tuple(n + b.ne[d] if d == dim else n for d, n in enumerate(a.ne)))
        return self._named(self.base.ggml_concat(self._room("concat", a, b), a.ptr, b.ptr, dim), name)

    # ---- rows

    def get_rows(self, a: Tensor, ids: Tensor, name: str = "") -> Tensor:
        """Rows of `a` [n, rows] at `ids` i32 [k]: f32 [n, k]. The ids are data: check them where they are set."""
        _require(ids.type == TensorType.I32, "get_rows", "ids must be i32", a, ids)
        _require(a.type in MATMUL_TYPES, "get_rows", "rows cannot be read in this type", a, ids)
        fits = a.ne[2] == ids.ne[1] and a.ne[3] == ids.ne[2] and ids.ne[3] == 1
        _require(fits, "get_rows", "the batches differ", a, ids)
        _require(a.has_contiguous_rows, "get_rows", "rows must be contiguous", a, ids)
        _require_countable("get_rows", (a.ne[0], *ids.ne))
        return self._named(self.base.ggml_get_rows(self._room("get_rows", a, ids), a.ptr, ids.ptr), name)

    def set_rows(self, a: Tensor, rows: Tensor, ids: Tensor, name: str = "") -> Tensor:
        """Write `rows` f32 [n, k] over the rows of `a` [n, m] at `ids` i64 [k]; gives `a`. The ids are data."""
        _require(a.type in _SET_ROWS_TYPES, "set_rows", "rows cannot be written in this type", a, rows, ids)
        _require(rows.type == TensorType.F32, "set_rows", "the new rows must be f32", a, rows, ids)
        _require(ids.type == TensorType.I64, "set_rows", "ids must be i64", a, rows, ids)
        _require(a.ne[0] == rows.ne[0] and rows.ne[1] == ids.ne[0], "set_rows", "shapes differ", a, rows, ids)
        flat = a.ne[2:] == rows.ne[2:] == (1, 1) and ids.ne[1:] == (1, 1, 1)
        _require(flat, "set_rows", "only two dimensions are written", a, rows, ids)
        _require(a.has_contiguous_rows and rows.has_contiguous_rows, "set_rows", "contiguous rows", a, rows, ids)
        ctx = self._room("set_rows", a, rows, ids)
        return self._named(self.base.ggml_set_rows(ctx, a.ptr, rows.ptr, ids.ptr), name)

    # ---- attention

    def soft_max(self, a: Tensor, mask: Tensor, scale: float, name: str = "") -> Tensor:
        """softmax(a * scale + mask) per row; the mask, f32 or f16, is repeated over heads."""
        _require(a.type == TensorType.F32 and a.is_contiguous, "soft_max", "f32 and contiguous", a, mask)
        _require(mask.type in {TensorType.F32, TensorType.F16}, "soft_max", "the mask must be f32 or f16", a, mask)
        fits = mask.ne[0] == a.ne[0] and mask.ne[1] >= a.ne[1] and _batches_repeat(mask, a)
        _require(fits and mask.is_contiguous, "soft_max", "the mask does not fit", a, mask)
        _require(math.isfinite(scale), "soft_max", f"the scale must be finite, is {scale}")
        ctx = self._room("soft_max", a, mask)
        return self._named(self.base.ggml_soft_max_ext(ctx, a.ptr, mask.ptr, scale, 0.0), name)

    def rope(self, a: Tensor, positions: Tensor, rope: Rope, factors: Tensor | None = None, name: str = "") -> Tensor:
        """Rotary embedding of `a` [head, heads, tokens] at `positions` i32 [tokens] (Su et al., arXiv:2104.09864)."""
        _require(a.type in {TensorType.F32, TensorType.F16}, "rope", "f32 or f16 is needed", a)
        rope.check()
        _require(0 < rope.n_dims <= a.ne[0] and rope.n_dims % 2 == 0, "rope", f"{rope.n_dims} rotated dimensions", a)
        fits = positions.type == TensorType.I32 and positions.ne == (a.ne[2], 1, 1, 1) and positions.is_contiguous
        _require(fits, "rope", "one i32 position a token is needed", a, positions)
        _require(a.has_contiguous_rows, "rope", "rows must be contiguous", a)
        if factors is not None:
            n_factors = rope.n_dims // 2
            enough = factors.type == TensorType.F32 and factors.ne[0] >= n_factors and factors.has_contiguous_rows
            _require(enough, "rope", f"{n_factors} f32 frequency factors are needed", a, factors)
        ctx = self._room("rope", a, positions, factors)
        ptr = self.base.ggml_rope_ext(
            ctx, a.ptr, positions.ptr, ffi.NULL if factors is None else factors.ptr, rope.n_dims, rope.mode,
            rope.n_ctx_orig, rope.base, rope.scale, rope.ext_factor, rope.attn_factor, rope.beta_fast, rope.beta_slow,
        )  # fmt: skip
        return self._named(ptr, name)

    def flash_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, *, softcap: float = 0.0, name: str = ""
    ) -> Tensor:
        """softmax(q k^T scale + mask) v without the scores in memory (Dao 2023, arXiv:2307.08691).

        q f32 [d, tokens, heads], k [d, rows, kv heads], v [d_v, rows, kv heads], mask f16 [rows, tokens];
        gives f32 [d_v, heads, tokens].
        """
        _require(q.type == TensorType.F32, "flash_attention", "q must be f32", q, k, v, mask)
        kv_fits = {k.type, v.type} <= _FLASH_KV_TYPES
        _require(kv_fits, "flash_attention", "k or v has an unusable type", q, k, v, mask)
        _require(q.ne[0] == k.ne[0], "flash_attention", "head sizes differ", q, k, v, mask)
        _require(k.ne[1:] == v.ne[1:], "flash_attention", "k and v differ in rows or heads", q, k, v, mask)
        grouped = q.ne[2] % k.ne[2] == 0 and q.ne[3] == k.ne[3]
        _require(grouped, "flash_attention", "query heads do not divide into groups", q, k, v, mask)
        fits = mask.ne[0] == k.ne[1] and mask.ne[1] >= q.ne[1] and _batches_repeat(mask, q)
        fits = fits and mask.type == TensorType.F16 and mask.is_contiguous
        _require(fits, "flash_attention", "an f16 mask [rows, tokens] is needed", q, k, v, mask)
        rows = q.has_contiguous_rows and k.has_contiguous_rows and v.has_contiguous_rows
        _require(rows, "flash_attention", "rows must be contiguous", q, k, v, mask)
        _require(math.isfinite(scale) and math.isfinite(softcap), "flash_attention", f"scale {scale}, cap {softcap}")
        ctx = self._room("flash_attention", q, k, v, mask)
        ptr = self.base.ggml_flash_attn_ext(ctx, q.ptr, k.ptr, v.ptr, mask.ptr, scale, 0.0, softcap)
        result = self._named(ptr, name)
        self.base.ggml_prec_set_acc(ptr, self.base.GGML_PREC_F32)
        return result


def _batches_repeat(mask: Tensor, a: Tensor) -> bool:
    return a.ne[2] % mask.ne[2] == 0 and a.ne[3] % mask.ne[3] == 0


@dataclass(frozen=True, slots=True)
class Rope:
    """How positions are rotated into queries and keys. The YaRN terms are ggml's (Peng et al., arXiv:2309.00071)."""

    n_dims: int
    base: float
    mode: int = ROPE_NORMAL
    scale: float = 1.0
    n_ctx_orig: int = 0
    ext_factor: float = 0.0
    attn_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def check(self) -> None:
        """Raise GraphError when ggml would hang, abort or give NaN with these."""
        _require(self.mode in {ROPE_NORMAL, ROPE_NEOX}, "rope", f"mode {self.mode}")
        _require(math.isfinite(self.base) and self.base > 0, "rope", f"the base must be positive, is {self.base}")
        _require(math.isfinite(self.scale) and self.scale > 0, "rope", f"the scale must be positive, is {self.scale}")
        yarn = (self.ext_factor, self.attn_factor, self.beta_fast, self.beta_slow)
        _require(all(math.isfinite(value) for value in yarn), "rope", f"the YaRN terms must be finite, are {yarn}")
        least = 1 if self.ext_factor else 0  # YaRN takes its logarithm
        fits = least <= self.n_ctx_orig < 1 << 31
        _require(fits, "rope", f"the original context is {self.n_ctx_orig}, {least} or more is needed")
        if self.ext_factor:
            ordered = self.beta_fast > 0 and self.beta_slow > 0 and self.base > 1
            _require(ordered, "rope", f"YaRN needs a base above 1 and positive betas, given {self.base} and {yarn}")
