"""How much memory the machine, or the container that this process is in, has and could still give."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

_KIB = 1024
_NO_LIMIT = 1 << 60  # what version 1 of cgroups says where there is none is near 2**63


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """Bytes: all there are, and those that can be had without swapping (caches that would be dropped count)."""

    total: int
    available: int

    @property
    def used_share(self) -> float:
        """How much of it is taken, 0 to 1."""
        return 1 - self.available / self.total


def give_back() -> None:
    """Free what nobody refers to, and let the C library return what it keeps of it to the system.

    glibc keeps freed memory for later calls, hundreds of MB after a large model. Other C libraries are left alone.
    """
    gc.collect()
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def machine_memory() -> MachineMemory | None:
    """What there is now; None where it cannot be told."""
    platform: str = sys.platform  # as a variable: a type checker would leave out what is for others
    try:
        if platform == "linux":
            return within_limit(parse_meminfo(Path("/proc/meminfo").read_text(encoding="ascii")), _cgroup())
        if platform == "darwin":
            return _vm_stat()
        if platform == "win32":
            return _windows()
    except (OSError, ValueError, KeyError, AttributeError):
        pass
    return None


def parse_meminfo(text: str) -> MachineMemory:
    """What Linux says in /proc/meminfo. Raises KeyError where it does not say it."""
    found = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE))
    return MachineMemory(int(found["MemTotal"]) * _KIB, int(found["MemAvailable"]) * _KIB)


def parse_vm_stat(text: str, total: int) -> MachineMemory:
    """What vm_stat of macOS prints. Raises KeyError or AttributeError where it does not say it."""
    page = int(re.search(r"page size of (\d+) bytes", text).group(1))  # type: ignore[union-attr]
    found = dict(re.findall(r"^Pages ([\w ]+):\s+(\d+)\.$", text, re.MULTILINE))
    n = sum(int(found[name]) for name in ("free", "inactive", "speculative"))
    return MachineMemory(total, min(total, n * page))


def _vm_stat() -> MachineMemory:
    import subprocess  # noqa: PLC0415  # slow to import, and other systems do without

    try:
        done = subprocess.run(["/usr/bin/vm_stat"], capture_output=True, text=True, timeout=5, check=True)
    except subprocess.SubprocessError as error:
        raise OSError(f"vm_stat: {error}") from error
    return parse_vm_stat(done.stdout, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def within_limit(machine: MachineMemory, limit: tuple[int, int] | None) -> MachineMemory:
    """`machine`, for a process that may have no more than `limit`: (bytes, those taken that cannot be dropped)."""
    if limit is None or limit[0] >= machine.total:
        return machine
    most, taken = limit
    return MachineMemory(most, max(0, min(machine.available, most - taken)))


def _cgroup() -> tuple[int, int] | None:
    """The limit of this process's group and what of it is taken; None where there is none."""
    for base, limit_name, usage_name, cache_name in (
        ("/sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            limit = Path(base, limit_name).read_text(encoding="ascii").strip()
            taken = int(Path(base, usage_name).read_text(encoding="ascii"))
            stat = dict(re.findall(r"^(\w+) (\d+)$", Path(base, "memory.stat").read_text("ascii"), re.MULTILINE))
        except (OSError, ValueError):
            continue
        if not limit.isdigit() or not 0 < int(limit) < _NO_LIMIT:
            return None
        return int(limit), max(0, taken - int(stat.get(cache_name, 0)))
    return None


def _windows() -> MachineMemory:
    class Status(ctypes.Structure):
        _fields_ = (
            ("length", ctypes.c_uint32),
            ("load", ctypes.c_uint32),
            *((name, ctypes.c_uint64) for name in ("total", "available", "a", "b", "c", "d", "e")),
        )

    status = Status()
    status.length = ctypes.sizeof(Status)
    if not ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):  # type: ignore[attr-defined]
        raise OSError("GlobalMemoryStatusEx failed")
    return MachineMemory(status.total, status.available)
