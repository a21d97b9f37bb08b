"""Tests of what goes by its last reference."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collector() -> Iterator[None]:
    """Without the collector of cycles: what goes, goes by its last reference."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
