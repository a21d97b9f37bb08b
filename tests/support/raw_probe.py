"""One raw call of ggml, without guards, that kills or hangs its process. Run as `python raw_probe.py NAME`.

Prints READY on stdout when all is prepared, then makes the call. Ends with code 0 only if it survived.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from ggml_engine.ggml import backends, library
from ggml_engine.ggml.library import ffi

F32, F16, I32, I64, Q4_0 = 0, 1, 26, 27, 2
THREADS = 2


class Raw:
    """A context of raw tensors, a graph over them and a CPU scheduler."""

    def __init__(self) -> None:
        self.libraries = library.load()
        self.base = self.libraries.base
        self.ctx = self.context(1 << 20)
        self.backend = backends.Backend(self.libraries, backends.cpu_device(self.libraries), THREADS)

    def context(self, n_bytes: int) -> Any:
        params = {"mem_size": n_bytes, "mem_buffer": ffi.NULL, "no_alloc": True}
        return self.base.ggml_init(ffi.new("struct ggml_init_params *", params)[0])

    def tensor(self, kind: int, *ne: int) -> Any:
        return self.base.ggml_new_tensor(self.ctx, kind, len(ne), ffi.new("int64_t[]", ne))

    def ids(self, kind: int, *values: int) -> Any:
        """A tensor that is filled before the run."""
        tensor = self.tensor(kind, len(values))
        self.base.ggml_set_input(tensor)
        self._fill = (tensor, np.array(values, np.int32 if kind == I32 else np.int64))
        return tensor

    _fill: tuple[Any, Any] | None = None

    def compute(self, result: Any) -> None:
        base = self.base
        graph = base.ggml_new_graph_custom(self.ctx, 64, False)
        base.ggml_build_forward_expand(graph, result)
        array = ffi.new("ggml_backend_t[]", [self.backend.ptr])
        sched = base.ggml_backend_sched_new(array, ffi.NULL, 1, 256, False, False)
        ready()
        base.ggml_backend_sched_alloc_graph(sched, graph)
        if self._fill is not None:
            tensor, values = self._fill
            base.ggml_backend_tensor_set(tensor, ffi.from_buffer(values), 0, values.nbytes)
        with library.running_graph("the probe"):
            base.ggml_backend_sched_graph_compute(sched, graph)

    def rope(self, n_dims: int = 8, mode: int = 0, n_positions: int = 3, factors: Any = ffi.NULL) -> Any:
        a, positions = self.tensor(F32, 8, 2, 3), self.tensor(I32, n_positions)
        ready()
        return self.base.ggml_rope_ext(self.ctx, a, positions, factors, n_dims, mode, 0, 1e4, 1.0, 0.0, 1.0, 32.0, 1.0)

    def turned(self, kind: int, *ne: int) -> Any:
        """Columns where rows should be."""
        return self.base.ggml_transpose(self.ctx, self.tensor(kind, *ne))

    def swapped(self, *ne: int) -> Any:
        """f32 rows, dimensions 1 and 2 of which have changed places."""
        return self.base.ggml_permute(self.ctx, self.tensor(F32, *ne), 0, 2, 1, 3)

    def mul_mat_id(self, x: tuple[int, ...], ids: Any, kind: int = F32, x_kind: int = F32) -> Any:
        experts, rows = self.tensor(kind, 32, 4, 6), self.tensor(x_kind, *x)
        ready()
        return self.base.ggml_mul_mat_id(self.ctx, experts, rows, ids)

    def flash(self, mask: Any, n_batch: int = 1) -> Any:
        q, k, v = self.tensor(F32, 8, 4, 2, n_batch), self.tensor(F16, 8, 6, 2), self.tensor(F16, 8, 6, 2)
        ready()
        return self.base.ggml_flash_attn_ext(self.ctx, q, k, v, mask, 1.0, 0.0, 0.0)


def ready() -> None:
    """Say that whatever happens next is the call's doing."""
    sys.stdout.write("READY\n")
    sys.stdout.flush()


def _after_ready(call: Callable[[Raw], Any]) -> Callable[[Raw], Any]:
    def run(raw: Raw) -> None:
        ready()
        call(raw)

    return run


def _full_context(raw: Raw) -> None:
    small = raw.context(raw.base.ggml_tensor_overhead())
    ready()
    for _ in range(3):
        raw.base.ggml_new_tensor(small, F32, 1, ffi.new("int64_t[]", [1]))


def _full_graph(raw: Raw) -> None:
    graph = raw.base.ggml_new_graph_custom(raw.ctx, 2, False)
    tensor = raw.tensor(F32, 4)
    ready()
    for _ in range(5):
        tensor = raw.base.ggml_tanh(raw.ctx, tensor)
    raw.base.ggml_build_forward_expand(graph, tensor)


def _tensor_set(raw: Raw, n_elements: int, offset: int) -> None:
    device = backends.cpu_device(raw.libraries)
    tensor = raw.tensor(F32, 4)
    if n_elements:
        raw.base.ggml_backend_alloc_ctx_tensors_from_buft(raw.ctx, raw.base.ggml_backend_dev_buffer_type(device.ptr))
    data = np.zeros(4, np.float32)
    ready()
    raw.base.ggml_backend_tensor_set(tensor, ffi.from_buffer(data), offset, data.nbytes)


def _threads(raw: Raw, n_threads: int) -> None:
    address = raw.base.ggml_backend_reg_get_proc_address(
        raw.base.ggml_backend_dev_backend_reg(raw.backend.device.ptr), b"ggml_backend_set_n_threads"
    )
    ffi.cast("ggml_backend_set_n_threads_t", address)(raw.backend.ptr, n_threads)
    raw.compute(raw.base.ggml_mul_mat(raw.ctx, raw.tensor(F32, 64, 64), raw.tensor(F32, 64, 64)))


def _view(raw: Raw, ne: tuple[int, int], stride: int) -> None:
    a = raw.tensor(F32, 13)
    ready()
    raw.base.ggml_view_2d(raw.ctx, a, *ne, stride, 0)


def _sched(raw: Raw, n_backends: int) -> None:
    array = ffi.new("ggml_backend_t[]", [raw.backend.ptr] * n_backends)
    ready()
    raw.base.ggml_backend_sched_new(array, ffi.NULL, n_backends, 64, False, False)


def _mapped(raw: Raw) -> None:
    memory = np.zeros(256, np.uint8)
    ready()
    raw.base.ggml_backend_dev_buffer_from_host_ptr(raw.backend.device.ptr, ffi.from_buffer(memory[1:]), 200, 200)


PROBES: dict[str, Callable[[Raw], Any]] = {
    "mul_mat of other row lengths": _after_ready(
        lambda raw: raw.base.ggml_mul_mat(raw.ctx, raw.tensor(F32, 4, 4), raw.tensor(F32, 5, 4))
    ),
    "mul_mat of an i32 weight": lambda raw: raw.compute(
        raw.base.ggml_mul_mat(raw.ctx, raw.tensor(I32, 32, 4), raw.tensor(F32, 32, 4))
    ),
    "mul_mat of q4_0 by f16": lambda raw: raw.compute(
        raw.base.ggml_mul_mat(raw.ctx, raw.tensor(Q4_0, 32, 4), raw.tensor(F16, 32, 4))
    ),
    "add of shapes that do not repeat": _after_ready(
        lambda raw: raw.base.ggml_add(raw.ctx, raw.tensor(F32, 4), raw.tensor(F32, 3))
    ),
    "add of f16 to f32": lambda raw: raw.compute(raw.base.ggml_add(raw.ctx, raw.tensor(F32, 4), raw.tensor(F16, 4))),
    "reshape to another size": _after_ready(lambda raw: raw.base.ggml_reshape_2d(raw.ctx, raw.tensor(F32, 4, 4), 4, 5)),
    "view past the end": _after_ready(lambda raw: raw.base.ggml_view_1d(raw.ctx, raw.tensor(F32, 4), 4, 8)),
    "view of overlapping rows": lambda raw: _view(raw, (4, 10), 4),
    "permute to one axis twice": _after_ready(
        lambda raw: raw.base.ggml_permute(raw.ctx, raw.tensor(F32, 4), 0, 0, 1, 2)
    ),
    "cont under another size": _after_ready(lambda raw: raw.base.ggml_cont_2d(raw.ctx, raw.tensor(F32, 4), 2, 3)),
    "concat of other shapes": _after_ready(
        lambda raw: raw.base.ggml_concat(raw.ctx, raw.tensor(F32, 4, 4), raw.tensor(F32, 5, 4), 1)
    ),
    "rms_norm with a negative eps": lambda raw: raw.compute(raw.base.ggml_rms_norm(raw.ctx, raw.tensor(F32, 4), -1.0)),
    "rms_norm of f16": lambda raw: raw.compute(raw.base.ggml_rms_norm(raw.ctx, raw.tensor(F16, 4), 1e-6)),
    "swiglu of other shapes": _after_ready(
        lambda raw: raw.base.ggml_swiglu_split(raw.ctx, raw.tensor(F32, 4), raw.tensor(F32, 5))
    ),
    "sub of shapes that do not repeat": _after_ready(
        lambda raw: raw.base.ggml_sub(raw.ctx, raw.tensor(F32, 4), raw.tensor(F32, 3))
    ),
    "div of f32 by f16": lambda raw: raw.compute(raw.base.ggml_div(raw.ctx, raw.tensor(F32, 4), raw.tensor(F16, 4))),
    "clamp of i32": lambda raw: raw.compute(raw.base.ggml_clamp(raw.ctx, raw.tensor(I32, 4), 0, 1)),
    "clamp of columns": lambda raw: raw.compute(raw.base.ggml_clamp(raw.ctx, raw.turned(F32, 4, 3), 0, 1)),
    "fill of i32": _after_ready(lambda raw: raw.base.ggml_fill(raw.ctx, raw.tensor(I32, 4), 0)),
    "fill of columns": _after_ready(lambda raw: raw.base.ggml_fill(raw.ctx, raw.turned(F32, 4, 3), 0)),
    "layer norm with a negative eps": lambda raw: raw.compute(raw.base.ggml_norm(raw.ctx, raw.tensor(F32, 4), -1.0)),
    "layer norm of f16": lambda raw: raw.compute(raw.base.ggml_norm(raw.ctx, raw.tensor(F16, 4), 1e-6)),
    "gelu of i32": lambda raw: raw.compute(raw.base.ggml_gelu(raw.ctx, raw.tensor(I32, 4))),
    "relu of columns": _after_ready(lambda raw: raw.base.ggml_relu(raw.ctx, raw.turned(F32, 4, 3))),
    "sqr of columns": lambda raw: raw.compute(raw.base.ggml_sqr(raw.ctx, raw.turned(F32, 4, 3))),
    "sqrt of i32": lambda raw: raw.compute(raw.base.ggml_sqrt(raw.ctx, raw.tensor(I32, 4))),
    "xielu of rows in another order": lambda raw: raw.compute(
        raw.base.ggml_xielu(raw.ctx, raw.swapped(4, 3, 2), 1, 1, 1, 0)
    ),
    "swiglu of rows in another order": _after_ready(
        lambda raw: raw.base.ggml_swiglu_split(raw.ctx, raw.swapped(4, 3, 2), raw.swapped(4, 3, 2))
    ),
    "reglu of i32": lambda raw: raw.compute(raw.base.ggml_reglu_split(raw.ctx, raw.tensor(I32, 4), raw.tensor(I32, 4))),
    "swiglu_oai of other shapes": _after_ready(
        lambda raw: raw.base.ggml_swiglu_oai(raw.ctx, raw.tensor(F32, 4), raw.tensor(F32, 5), 1, 1)
    ),
    "halves of columns": _after_ready(lambda raw: raw.base.ggml_swiglu(raw.ctx, raw.turned(F32, 4, 4))),
    "argsort of f16": lambda raw: raw.compute(raw.base.ggml_argsort(raw.ctx, raw.tensor(F16, 6, 3), 1)),
    "argsort of more than i32 counts": _after_ready(
        lambda raw: raw.base.ggml_argsort(raw.ctx, raw.tensor(F32, 1 << 31), 1)
    ),
    "mul_mat_id of other row lengths": lambda raw: raw.mul_mat_id((33, 1, 3), raw.tensor(I32, 2, 3)),
    "mul_mat_id of i64 ids": lambda raw: raw.mul_mat_id((32, 1, 3), raw.tensor(I64, 2, 3)),
    "mul_mat_id of other tokens": lambda raw: raw.mul_mat_id((32, 1, 3), raw.tensor(I32, 2, 4)),
    "mul_mat_id of rows that do not repeat": lambda raw: raw.mul_mat_id((32, 3, 3), raw.tensor(I32, 2, 3)),
    "mul_mat_id of four dimensions": lambda raw: raw.mul_mat_id((32, 1, 3, 2), raw.tensor(I32, 2, 3)),
    "mul_mat_id of an i32 weight": lambda raw: raw.compute(raw.mul_mat_id((32, 1, 3), raw.tensor(I32, 2, 3), kind=I32)),
    "mul_mat_id of q4_0 by f16": lambda raw: raw.compute(
        raw.mul_mat_id((32, 1, 3), raw.tensor(I32, 2, 3), kind=Q4_0, x_kind=F16)
    ),
    "add_id of other row lengths": _after_ready(
        lambda raw: raw.base.ggml_add_id(
            raw.ctx, raw.tensor(F32, 8, 2, 3), raw.tensor(F32, 9, 6), raw.tensor(I32, 2, 3)
        )
    ),
    "add_id of f16": lambda raw: raw.compute(
        raw.base.ggml_add_id(raw.ctx, raw.tensor(F16, 8, 2, 3), raw.tensor(F16, 8, 6), raw.tensor(I32, 2, 3))
    ),
    "add_id at the number of rows": lambda raw: raw.compute(
        raw.base.ggml_add_id(raw.ctx, raw.tensor(F32, 8, 1, 1), raw.tensor(F32, 8, 6), raw.ids(I32, 6))
    ),
    "repeat to no multiple": _after_ready(
        lambda raw: raw.base.ggml_repeat_4d(raw.ctx, raw.tensor(F32, 4, 2), 4, 3, 1, 1)
    ),
    "repeat of columns": lambda raw: raw.compute(raw.base.ggml_repeat_4d(raw.ctx, raw.turned(F32, 4, 3), 3, 8, 1, 1)),
    "repeat of i64": lambda raw: raw.compute(raw.base.ggml_repeat_4d(raw.ctx, raw.tensor(I64, 4), 8, 1, 1, 1)),
    "cast of i32 to f16": lambda raw: raw.compute(raw.base.ggml_cast(raw.ctx, raw.tensor(I32, 4), F16)),
    "set_rows with f32 ids": _after_ready(
        lambda raw: raw.base.ggml_set_rows(raw.ctx, raw.tensor(F32, 4, 3), raw.tensor(F32, 4, 2), raw.tensor(F32, 2))
    ),
    "set_rows of other batches": _after_ready(
        lambda raw: raw.base.ggml_set_rows(
            raw.ctx, raw.tensor(F32, 4, 3, 2), raw.tensor(F32, 4, 2, 3), raw.tensor(I64, 2, 3)
        )
    ),
    "soft_max with sinks of other heads": _after_ready(
        lambda raw: raw.base.ggml_soft_max_add_sinks(
            raw.base.ggml_soft_max_ext(raw.ctx, raw.tensor(F32, 4, 3, 2), ffi.NULL, 1.0, 0.0), raw.tensor(F32, 3)
        )
    ),
    "flash attention with f16 sinks": lambda raw: raw.base.ggml_flash_attn_ext_add_sinks(
        raw.flash(raw.tensor(F16, 6, 4)), raw.tensor(F16, 2)
    ),
    "get_rows at the number of rows": lambda raw: raw.compute(
        raw.base.ggml_get_rows(raw.ctx, raw.tensor(F32, 4, 3), raw.ids(I32, 3))
    ),
    "get_rows at -1": lambda raw: raw.compute(raw.base.ggml_get_rows(raw.ctx, raw.tensor(F32, 4, 3), raw.ids(I32, -1))),
    "get_rows with f32 ids": _after_ready(
        lambda raw: raw.base.ggml_get_rows(raw.ctx, raw.tensor(F32, 4, 3), raw.tensor(F32, 3))
    ),
    "set_rows at the number of rows": lambda raw: raw.compute(
        raw.base.ggml_set_rows(raw.ctx, raw.tensor(F32, 4, 3), raw.tensor(F32, 4, 1), raw.ids(I64, 3))
    ),
    "set_rows at -1": lambda raw: raw.compute(
        raw.base.ggml_set_rows(raw.ctx, raw.tensor(F32, 4, 3), raw.tensor(F32, 4, 1), raw.ids(I64, -1))
    ),
    "soft_max with a short mask": _after_ready(
        lambda raw: raw.base.ggml_soft_max_ext(raw.ctx, raw.tensor(F32, 4, 3), raw.tensor(F32, 4, 2), 1.0, 0.0)
    ),
    "soft_max with an i32 mask": _after_ready(
        lambda raw: raw.base.ggml_soft_max_ext(raw.ctx, raw.tensor(F32, 4, 3), raw.tensor(I32, 4, 3), 1.0, 0.0)
    ),
    "flash attention with an f32 mask": lambda raw: raw.flash(raw.tensor(F32, 6, 4)),
    "flash attention of other batches": lambda raw: raw.flash(raw.tensor(F16, 6, 4), n_batch=2),
    "rope of more dimensions than a head": lambda raw: raw.compute(raw.rope(n_dims=10)),
    "rope of an odd number of dimensions": lambda raw: raw.compute(raw.rope(n_dims=3)),
    "rope of no dimension": lambda raw: raw.compute(raw.rope(n_dims=0)),
    "rope with too few positions": lambda raw: raw.rope(n_positions=2),
    "rope with too few factors": lambda raw: raw.rope(factors=raw.tensor(F32, 2)),
    "rope of an odd mode": lambda raw: raw.rope(mode=1),
    "a full context": _full_context,
    "a full graph": _full_graph,
    "tensor_set past the end": lambda raw: _tensor_set(raw, 4, 4),
    "tensor_set without memory": lambda raw: _tensor_set(raw, 0, 0),
    "a tensor of type 99": _after_ready(lambda raw: raw.tensor(99, 4)),
    "a tensor of the removed type 4": _after_ready(lambda raw: raw.tensor(4, 4)),
    "a tensor of too many elements": _after_ready(lambda raw: raw.tensor(F32, 1 << 40, 1 << 40)),
    "a product of too many elements": _after_ready(
        lambda raw: raw.base.ggml_mul_mat(raw.ctx, raw.tensor(F32, 1, 1 << 40), raw.tensor(F32, 1, 1 << 40))
    ),
    "a null tensor": _after_ready(lambda raw: raw.base.ggml_add(raw.ctx, ffi.NULL, raw.tensor(F32, 4))),
    "100000 threads": lambda raw: _threads(raw, 100_000),
    "no backend": lambda raw: _sched(raw, 0),
    "17 backends": lambda raw: _sched(raw, 17),
    "an unaligned mapping": _mapped,
}


if __name__ == "__main__":
    PROBES[sys.argv[1]](Raw())
