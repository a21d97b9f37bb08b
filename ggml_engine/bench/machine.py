"""What a benchmark ran on: the processor, the system, and the versions that compute."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from ggml_engine.control.machine_memory import machine_memory
from ggml_engine.ggml.library import load
from ggml_engine.ggml.threads import default_threads


def describe_machine() -> dict[str, Any]:
    """Names and counts; memory in bytes, null where it cannot be told."""
    memory = machine_memory()
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "usable_cores": default_threads(),
        "memory_bytes": None if memory is None else memory.total,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "python": platform.python_version(),
        "ggml_engine": _version("ggml-engine"),
        "llama_cpp_python": _version("llama-cpp-python"),
        "ggml": load().version,
        "openblas_coretype": os.environ.get("OPENBLAS_CORETYPE"),  # it slows numpy where it names another processor
    }


def cpu_name() -> str:
    """The processor's name as the system gives it."""
    system: str = sys.platform
    try:
        if system == "linux":
            return cpu_name_in(Path("/proc/cpuinfo").read_text("utf-8", "replace")) or platform.machine()
        if system == "darwin":
            command = ["/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string"]
            return subprocess.run(command, capture_output=True, text=True, timeout=5, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        pass
    return platform.processor() or platform.machine()


def cpu_name_in(cpuinfo: str) -> str:
    """The name in Linux's /proc/cpuinfo; empty where it has none."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("model name", "Model", "Hardware") and value.strip():
            return value.strip()
    return ""


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None
