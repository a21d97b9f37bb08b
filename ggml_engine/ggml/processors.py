"""How many cores compute best here: those that this process may use, physical ones, and not the slow ones.

Owns the reading of what the system says of its processors: affinity, topology and quota of Linux, the levels of macOS.
Knows nothing of ggml. A graph's nodes are cut into as many parts as there are threads, and every node waits for the
last part: a thread on a second hyperthread, on a slow core or beyond a quota holds up all others.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Final

__all__ = ["count_cores"]

Sysctl = Callable[[str], int | None]

_CPUS: Final = "sys/devices/system/cpu"
_CGROUPS: Final = "sys/fs/cgroup"
_GAIN: Final = 1.1  # by which slower cores must add to what faster ones compute without them
_FEW: Final = 4  # processors that are taken for cores where nothing says what they are


def count_cores(
    root: Path = Path("/"),
    *,
    platform: str = sys.platform,
    allowed: Collection[int] | None = None,
    sysctl: Sysctl | None = None,
) -> int:
    """The number of cores to compute on, at least 1: physical, fast ones that this process may run on.

    `root` is where `sys` and `proc` are, `platform` as `sys.platform`, `allowed` the processors that this process may
    run on (by default what the system says), `sysctl` what asks macOS for a number. On Linux a cgroup's quota of
    processor time is a bound as well, rounded down.
    """
    if platform == "darwin":
        ask = sysctl or _ask_sysctl
        n_cores = ask("hw.perflevel0.physicalcpu") or ask("hw.physicalcpu")
        return n_cores or _count_unknown(os.cpu_count() or 1)
    cpus = set(_allowed_cpus() if allowed is None else allowed)
    if platform != "linux":
        return _count_unknown(len(cpus))
    n_cores = len(_cores(root, _fast_cpus(root, cpus)))
    quota = _quota(root)
    return max(1, n_cores if quota is None else min(n_cores, int(quota)))


def _allowed_cpus() -> Collection[int]:
    try:
        return os.sched_getaffinity(0)
    except AttributeError:  # not on Windows and macOS
        return range(os.cpu_count() or 1)


def _count_unknown(n_cpus: int) -> int:
    """As llama.cpp guesses: many processors are two for every core."""
    return max(1, n_cpus if n_cpus <= _FEW else n_cpus // 2)


# ---- which processors, on Linux


def _fast_cpus(root: Path, cpus: set[int]) -> set[int]:
    """Those of `cpus` that are performance cores; all of them where they do not differ."""
    fast = cpus & _cpu_list(_text(root / "sys/devices/cpu_core/cpus"))  # hybrid x86-64
    if fast:
        return fast
    capacities = {cpu: _integer(_text(root / _CPUS / f"cpu{cpu}" / "cpu_capacity")) for cpu in cpus}
    if not cpus or any(not capacity for capacity in capacities.values()):
        return cpus
    return _fastest({cpu: capacity or 0 for cpu, capacity in capacities.items()})


def _fastest(capacities: dict[int, int]) -> set[int]:
    """The processors to compute on: n of them, the slowest of capacity c, compute as fast as n * c."""
    best: set[int] = set()
    most = 0.0
    for least in sorted(set(capacities.values()), reverse=True):
        taken = {cpu for cpu, capacity in capacities.items() if capacity >= least}
        if len(taken) * least >= _GAIN * most:
            best, most = taken, len(taken) * least
    return best


def _cores(root: Path, cpus: Iterable[int]) -> set[frozenset[int]]:
    """The physical cores of processors, each as its hyperthreads; one whose siblings are not known is a core."""
    found = set()
    for cpu in cpus:
        topology = root / _CPUS / f"cpu{cpu}" / "topology"
        siblings = _cpu_list(_text(topology / "core_cpus_list") or _text(topology / "thread_siblings_list"))
        found.add(frozenset(siblings | {cpu}))
    return found


def _cpu_list(text: str) -> set[int]:
    """What a list as "0-3,8" names; nothing for text that is none."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        begin, end = _integer(first), _integer(last or first)
        if begin is None or end is None or not 0 <= begin <= end < 1 << 16:
            return set()
        found.update(range(begin, end + 1))
    return found


# ---- how much of them, on Linux


def _quota(root: Path) -> float | None:
    """Processors' worth of time that this process's control groups grant it; None without a bound."""
    found = []
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not controllers:
            for mount in (root / _CGROUPS, root / _CGROUPS / "unified"):
                found += [_quota_v2(_text(group / "cpu.max")) for group in _groups(mount, path)]
        elif "cpu" in controllers.split(","):
            for mount in (root / _CGROUPS / controllers, root / _CGROUPS / "cpu"):
                found += [_quota_v1(group) for group in _groups(mount, path)]
    quotas = [quota for quota in found if quota is not None]
    return min(quotas) if quotas else None


def _groups(mount: Path, path: str) -> list[Path]:
    """A group and those that it is in; a container may see none of them but the outermost."""
    group = mount / path.strip().strip("/")
    if ".." in group.parts:  # a group outside of what is mounted here
        return [mount]
    return [group, *(each for each in group.parents if each == mount or mount in each.parents)]


def _quota_v2(text: str) -> float | None:
    """Of "200000 100000" 2.0, of "max 100000" None."""
    quota, _, period = text.strip().partition(" ")
    return _ratio(_integer(quota), _integer(period))


def _quota_v1(group: Path) -> float | None:
    return _ratio(_integer(_text(group / "cpu.cfs_quota_us")), _integer(_text(group / "cpu.cfs_period_us")))


def _ratio(quota: int | None, period: int | None) -> float | None:
    return quota / period if quota and period and quota > 0 and period > 0 else None


# ---- reading


def _text(path: Path) -> str:
    try:
        return path.read_text("ascii", "replace")
    except OSError:
        return ""


def _integer(text: str) -> int | None:
    try:
        return int(text)
    except ValueError:
        return None


def _ask_sysctl(name: str) -> int | None:
    """A number that macOS knows by a name; None where it does not."""
    import ctypes  # noqa: PLC0415  # on macOS alone

    value, size = ctypes.c_int(0), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
    try:
        failed = ctypes.CDLL(None).sysctlbyname(name.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
    except (OSError, AttributeError):
        return None
    return None if failed else value.value
