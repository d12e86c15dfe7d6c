"""How many threads compute where nobody says how many: one per physical core that we may use.

A core's second hardware thread adds nothing to loops that its memory or its vector units limit. A
program may be confined to some of the processors (an affinity mask) or to a share of their time (a
container's CPU quota), and torch heeds only the first.
"""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

_ROOT = Path("/")
_V1_MOUNTS = ("cpu", "cpu,cpuacct")


def default_threads() -> int:
    """Threads to compute with if the user names no number.

    Physical cores within affinity mask and CPU quota; of a fraction of a core, a whole one. It is
    torch's own number where that is lower, so that `torch.set_num_threads` and `MKL_NUM_THREADS`
    can lower it, and where `OMP_NUM_THREADS` is set, which can raise it too.
    """
    count = torch.get_num_threads()
    return count if os.environ.get("OMP_NUM_THREADS") else min(count, usable_cores())


def set_threads(count: int | None) -> None:
    """Compute with so many threads from now on; None is `default_threads()`."""
    torch.set_num_threads(default_threads() if count is None else count)


def usable_cores() -> int:
    """Physical cores that this process may use, at least 1."""
    listed = _cores_of_cpuinfo()
    cores = {_siblings(cpu) or listed.get(cpu, f"processor {cpu}") for cpu in usable_processors()}
    return max(1, math.ceil(min(len(cores), quota())))


def usable_processors() -> set[int]:
    """Logical processors that the affinity mask allows."""
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def quota() -> float:
    """Processors' worth of time that the control groups around this process grant; or infinity."""
    limits = (limit for group in _groups() if (limit := _limit(group)) is not None)
    return min(limits, default=math.inf)


def processor_name() -> str:
    """What the processor is called, as far as the system says."""
    lines = (_read(_ROOT / "proc/cpuinfo") or "").splitlines()
    fields = (line.partition(":") for line in lines)
    named = (value.strip() for name, _, value in fields if name.strip() == "model name")
    return next(filter(None, named), platform.processor() or platform.machine() or "unknown")


def _siblings(cpu: int) -> str | None:
    """The hardware threads of a logical processor's core, as a list; None if it is not known."""
    topology = _ROOT / f"sys/devices/system/cpu/cpu{cpu}/topology"
    return _read(topology / "core_cpus_list") or _read(topology / "thread_siblings_list")


def _cores_of_cpuinfo() -> dict[int, str]:
    """Logical processor → package and core, as far as /proc/cpuinfo says."""
    cores = {}
    for paragraph in (_read(_ROOT / "proc/cpuinfo") or "").split("\n\n"):
        lines = (line.partition(":") for line in paragraph.splitlines())
        fields = {name.strip(): value.strip() for name, _, value in lines}
        if fields.get("processor", "").isdecimal() and "core id" in fields:
            place = f"package {fields.get('physical id', '0')} core {fields['core id']}"
            cores[int(fields["processor"])] = place
    return cores


def _groups() -> Iterator[Path]:
    """Directories of this process's control groups and of those around them.

    In a container the path may be the host's, of which nothing but the root is mounted.
    """
    for line in (_read(_ROOT / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        mounts = [""] if not controllers else _V1_MOUNTS if "cpu" in controllers.split(",") else []
        own = Path(path.lstrip("/"))
        for mount in mounts:
            for group in (own, *own.parents):
                yield _ROOT / "sys/fs/cgroup" / mount / group


def _limit(group: Path) -> float | None:
    """Processors that a control group grants, of version 2 or 1; None where it sets no limit."""
    words = (_read(group / "cpu.max") or "").split()
    if not words:
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        words = [_read(group / name) or "" for name in names]
    if len(words) != 2 or not all(word.isdecimal() for word in words):  # "max", or -1
        return None
    time_us, period_us = map(int, words)
    return time_us / period_us if time_us and period_us else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:  # not there, or not Linux
        return None
