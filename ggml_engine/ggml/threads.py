"""How many threads compute on a CPU."""

from __future__ import annotations

import os
from typing import Final

MAX_THREADS: Final = 512  # GGML_MAX_N_THREADS


def default_threads() -> int:
    """As many threads as this process may run on cores; libllama's default is the same for small machines."""
    try:
        n_cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on Windows and macOS
        n_cores = os.cpu_count() or 1
    return max(1, min(n_cores, MAX_THREADS))
