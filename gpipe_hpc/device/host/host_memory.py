"""Resident memory of this process and free memory of its machine and job, as Linux reports them."""

import resource
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")
_CLEAR_PEAK: Final = "5"
_CGROUPS: Final = Path("/sys/fs/cgroup")
_RECLAIMABLE: Final = ("inactive_file ", "active_file ")


def peak_bytes() -> int:
    """Return the peak resident memory of this process since the start or `reset_peak`, in bytes."""
    # Preferred over ru_maxrss, which may be inherited from the parent process.
    told = _status_bytes("VmHWM")
    if told is not None:
        return told
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak() -> None:
    """Reset the peak that `peak_bytes` returns; does nothing if the system does not allow it."""
    with suppress(OSError):
        _CLEAR.write_text(_CLEAR_PEAK)


def used_bytes() -> int:
    """Return the resident memory of this process in bytes; 0 if the system does not report it."""
    return _status_bytes("VmRSS") or 0


def free_bytes() -> int | None:
    """Return the bytes that the machine and the job's limits leave; None if not reported."""
    return min([*_machine_headroom(), *_cgroup_headroom()], default=None)


def _status_bytes(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
        (kib,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    except (OSError, ValueError, IndexError):
        return None
    return int(kib) * 1024


def _machine_headroom() -> Iterator[int]:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            yield 1024 * int(line.split()[1])


def _cgroup_headroom() -> Iterator[int]:
    """Yield the bytes left by each control group of this process (Slurm, Kubernetes)."""
    for line in _lines(Path("/proc/self/cgroup")):
        kinds, group = line.split(":", 2)[1:]
        if kinds not in ("", "memory"):
            continue
        limit, used = ("memory.max", "memory.current")
        root = _CGROUPS
        if kinds == "memory":
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
            root = _CGROUPS / "memory"
        folder = root / group.lstrip("/")
        for each in [folder, *folder.parents]:
            if each.is_relative_to(root):
                yield from _headroom(each, limit, used)


def _headroom(folder: Path, limit: str, used: str) -> Iterator[int]:
    most, now = _lines(folder / limit), _lines(folder / used)
    if most and now and most[0].isdigit():
        # The kernel reclaims file pages under memory pressure, so they count as free.
        cached = [line for line in _lines(folder / "memory.stat") if line.startswith(_RECLAIMABLE)]
        yield int(most[0]) - int(now[0]) + sum(int(line.split()[1]) for line in cached)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
