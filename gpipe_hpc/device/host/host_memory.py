"""What the system tells of the memory of this process and of its machine."""

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
_GIVEN_UP: Final = ("inactive_file ", "active_file ")


def peak_bytes() -> int:
    """Return the resident memory of this process at its fullest, or since `reset_peak`."""
    # Not what the system counts for the process: that may be the peak of who started it.
    told = _status_bytes("VmHWM")
    if told is not None:
        return told
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def reset_peak() -> None:
    """Begin a new peak of `peak_bytes`; the old one stays where the system does not allow it."""
    with suppress(OSError):
        _CLEAR.write_text(_CLEAR_PEAK)


def used_bytes() -> int:
    """Return the resident memory of this process; 0 where the system does not tell."""
    return _status_bytes("VmRSS") or 0


def free_bytes() -> int | None:
    """Return how many bytes the machine and the job leave; None where the system does not tell."""
    return min([*_of_the_machine(), *_of_the_job()], default=None)


def _status_bytes(name: str) -> int | None:
    try:
        lines = _STATUS.read_text().splitlines()
        (kib,) = (line.split()[1] for line in lines if line.startswith(f"{name}:"))
    except (OSError, ValueError, IndexError):
        return None
    return int(kib) * 1024


def _of_the_machine() -> Iterator[int]:
    for line in _lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            yield 1024 * int(line.split()[1])


def _of_the_job() -> Iterator[int]:
    """Yield what each control group around this process leaves: those of Slurm, Kubernetes."""
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
        # Pages of files are given up where memory lacks, also those read a moment ago.
        cached = [line for line in _lines(folder / "memory.stat") if line.startswith(_GIVEN_UP)]
        yield int(most[0]) - int(now[0]) + sum(int(line.split()[1]) for line in cached)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
