"""Keeps a broken AMX kernel out of the process.

On x86 processors with matrix tiles a natively built ggml multiplies weights in an "AMX" buffer type. Some compilers
(GCC 12 among them) drop the stores that fill the tile configuration, so the first such product kills the process, here
and in llama.cpp (its pull request 26954). `guard()` tries one product in a forked child, and takes the buffer type off
the list that ggml hands out when the child dies or errs; weights then go where they would without tiles. The list is
ggml's own, so libllama in the same process is kept from it, too.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import sys
import time
import warnings
from typing import Any

from ggml_engine.ggml._bindings import ffi

__all__ = ["guard"]

log = logging.getLogger("ggml_engine.native")

_TIMEOUT_S = 5.0
_N_IN, _N_OUT, _N_ROWS = 256, 64, 32  # more than one row: only then are tiles used
_ONES_Q4_0 = bytes([0x00, 0x3C]) + bytes([0x99]) * 16  # a block of 32: scale 1.0 (f16), each nibble 9 - 8


def guard(base: Any, registry: Any) -> bool:
    """Take "AMX" off ggml's list of buffer types if a product in it fails. True if it was taken off.

    base, registry: the open cffi libraries. To be called before anything asks for the list. Costs a fork where the
    list holds AMX, and nothing elsewhere.
    """
    if sys.platform != "linux":  # the fault is of compilers used there, and the rest of this needs fork
        return False
    listed = _extra_buffer_types(base, registry)
    found = [listed[i] for i in range(_length(listed))]
    amx = next((each for each in found if ffi.string(base.ggml_backend_buft_name(each)) == b"AMX"), None)
    if amx is None or _works_in_child(base, registry, amx):
        return False
    kept = [each for each in found if each != amx]
    for i, each in enumerate([*kept, ffi.NULL]):
        listed[i] = each
    log.info("this build of ggml has a broken AMX kernel: it is not used (GCC 12 compiles it wrongly, GCC 13 does not)")
    return True


def _cpu(base: Any, registry: Any) -> Any:
    for i in range(registry.ggml_backend_dev_count()):
        device = registry.ggml_backend_dev_get(i)
        if base.ggml_backend_dev_type(device) == base.GGML_BACKEND_DEVICE_TYPE_CPU:
            return device
    return ffi.NULL


def _extra_buffer_types(base: Any, registry: Any) -> Any:
    device = _cpu(base, registry)
    if device == ffi.NULL:
        return ffi.NULL
    address = base.ggml_backend_reg_get_proc_address(
        base.ggml_backend_dev_backend_reg(device), b"ggml_backend_dev_get_extra_bufts"
    )
    return ffi.NULL if address == ffi.NULL else ffi.cast("ggml_backend_dev_get_extra_bufts_t", address)(device)


def _length(listed: Any) -> int:
    n = 0
    while listed != ffi.NULL and listed[n] != ffi.NULL:
        n += 1
    return n


def _works_in_child(base: Any, registry: Any, buffer_type: Any) -> bool:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads: the child takes no lock of theirs
        pid = os.fork()
    if not pid:
        _die_quietly(base, registry, buffer_type)
    deadline = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
        time.sleep(0.0005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def _die_quietly(base: Any, registry: Any, buffer_type: Any) -> None:
    """The child: its exit status is the answer; no core file, no traceback."""
    code = 1
    try:
        import resource  # noqa: PLC0415  # not on Windows

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        faulthandler.disable()
        for number in (signal.SIGSEGV, signal.SIGILL, signal.SIGBUS):
            signal.signal(number, signal.SIG_DFL)
        code = 0 if _product_of_ones(base, registry, buffer_type) else 1
    finally:
        os._exit(code)


def _product_of_ones(base: Any, registry: Any, buffer_type: Any) -> bool:
    """Whether ones times ones in `buffer_type` gives the number of addends everywhere."""
    device = _cpu(base, registry)
    backend = base.ggml_backend_dev_init(device, ffi.NULL)
    params = ffi.new("struct ggml_init_params *", {"mem_size": 1 << 20, "no_alloc": True})[0]
    weights, inputs = base.ggml_init(params), base.ggml_init(params)
    w = base.ggml_new_tensor(weights, base.GGML_TYPE_Q4_0, 2, [_N_IN, _N_OUT])
    x = base.ggml_new_tensor(inputs, base.GGML_TYPE_F32, 2, [_N_IN, _N_ROWS])
    base.ggml_backend_alloc_ctx_tensors_from_buft(weights, buffer_type)
    base.ggml_backend_alloc_ctx_tensors_from_buft(inputs, base.ggml_backend_get_default_buffer_type(backend))
    blocks = _ONES_Q4_0 * (_N_IN // 32 * _N_OUT)
    base.ggml_backend_tensor_set(w, blocks, 0, len(blocks))
    ones = ffi.new("float[]", [1.0] * (_N_IN * _N_ROWS))
    base.ggml_backend_tensor_set(x, ones, 0, ffi.sizeof(ones))
    graph_context = base.ggml_init(params)
    graph = base.ggml_new_graph_custom(graph_context, 16, False)
    y = base.ggml_mul_mat(graph_context, w, x)
    base.ggml_build_forward_expand(graph, y)
    set_threads = base.ggml_backend_reg_get_proc_address(
        base.ggml_backend_dev_backend_reg(device), b"ggml_backend_set_n_threads"
    )
    ffi.cast("ggml_backend_set_n_threads_t", set_threads)(backend, 1)  # a team of threads does not survive a fork
    backends = ffi.new("ggml_backend_t[1]", [backend])
    scheduler = base.ggml_backend_sched_new(backends, ffi.NULL, 1, 16, False, True)
    if base.ggml_backend_sched_graph_compute(scheduler, graph) != base.GGML_STATUS_SUCCESS:
        return False
    out = ffi.new("float[]", _N_OUT * _N_ROWS)
    base.ggml_backend_tensor_get(y, out, 0, ffi.sizeof(out))
    return all(abs(value - _N_IN) < _N_IN / 50 for value in out)
