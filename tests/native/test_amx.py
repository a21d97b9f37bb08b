"""A broken AMX kernel is tried in a child, and its buffer type taken off ggml's list."""

import os
import signal
import sys
from types import SimpleNamespace

import pytest

from ggml_engine.ggml import amx, library
from ggml_engine.ggml._bindings import ffi

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs fork, and the fault is of compilers on Linux")


@pytest.fixture
def listed(monkeypatch):
    """A list as ggml hands it out: AMX, CPU_REPACK, end."""
    names = {1: b"AMX", 2: b"CPU_REPACK"}
    kept = {number: ffi.new("char[]", name) for number, name in names.items()}
    types = ffi.new("ggml_backend_buffer_type_t[3]", [ffi.cast("ggml_backend_buffer_type_t", n) for n in (1, 2, 0)])
    monkeypatch.setattr(amx, "_extra_buffer_types", lambda *_: types)
    base = SimpleNamespace(ggml_backend_buft_name=lambda each: kept[int(ffi.cast("uintptr_t", each))])
    return base, lambda: [int(ffi.cast("uintptr_t", each)) for each in types]


def die(*_):
    os.kill(os.getpid(), signal.SIGSEGV)


def raise_error(*_):
    raise RuntimeError


@pytest.mark.parametrize("product", [die, raise_error, lambda *_: False], ids=["dies", "raises", "errs"])
def test_a_kernel_that_fails_is_taken_off_the_list(listed, monkeypatch, product):
    base, numbers = listed
    monkeypatch.setattr(amx, "_product_of_ones", product)
    assert amx.guard(base, None)
    assert numbers()[:2] == [2, 0]


def test_a_kernel_that_hangs_is_taken_off_the_list(listed, monkeypatch):
    base, numbers = listed
    monkeypatch.setattr(amx, "_TIMEOUT_S", 0.2)
    monkeypatch.setattr(amx, "_product_of_ones", lambda *_: signal.pause())
    assert amx.guard(base, None)
    assert numbers()[:2] == [2, 0]


def test_a_kernel_that_works_stays(listed, monkeypatch):
    base, numbers = listed
    monkeypatch.setattr(amx, "_product_of_ones", lambda *_: True)
    assert not amx.guard(base, None)
    assert numbers() == [1, 2, 0]


def test_the_trial_product_is_right_where_it_must_be():
    libraries = library.load()
    types = amx._extra_buffer_types(libraries.base, libraries.registry)
    for i in range(amx._length(types)):  # CPU_REPACK on x86; an AMX that is still listed was found to work
        assert amx._works_in_child(libraries.base, libraries.registry, types[i])
    plain = amx._cpu(libraries.base, libraries.registry)
    assert amx._works_in_child(libraries.base, libraries.registry, libraries.base.ggml_backend_dev_buffer_type(plain))
    assert not amx.guard(libraries.base, libraries.registry)
