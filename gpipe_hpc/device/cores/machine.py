"""CPU topology and CPU quotas as reported by Linux.

A CPU is a hardware thread as numbered by Linux; with SMT a core has two or more.
"""

import os
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final, NamedTuple

_SYSTEM: Final = Path("/sys")
_PROCESS: Final = Path("/proc/self")
_CGROUPS: Final = Path("/sys/fs/cgroup")


class Core(NamedTuple):
    """The CPUs of one physical core and its NUMA node."""

    cpus: frozenset[int]
    node: int


class Quota(NamedTuple):
    """CPU time limit of a control group, as a number of CPUs, and the identity of the group."""

    num_cpus: float
    group: str


def parse_cpus(text: str) -> frozenset[int]:
    """Parse a Linux CPU list: ``0-2,8`` is 0, 1, 2 and 8."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def cpus_text(cpus: Collection[int]) -> str:
    """Format CPU numbers as a Linux CPU list: 0, 1, 2 and 8 are ``0-2,8``."""
    spans: list[list[int]] = []
    for cpu in sorted(cpus):
        if spans and cpu == spans[-1][1] + 1:
            spans[-1][1] = cpu
        else:
            spans.append([cpu, cpu])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def allowed_cpus() -> frozenset[int] | None:
    """Return the CPUs that the calling thread may use; None if the system does not report them."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    return frozenset(os.sched_getaffinity(0))


def cores_with(cpus: Collection[int], system: Path = _SYSTEM) -> tuple[Core, ...]:
    """Return all online cores of the machine, sorted by their first CPU.

    `cpus` are CPUs known to exist. A CPU without topology information counts as a core of its own
    on node 0.
    """
    folder = system / "devices/system"
    online = parse_cpus(_text(folder / "cpu/online")) | frozenset(cpus)
    node_of = {
        cpu: int(path.parent.name.removeprefix("node"))
        for path in folder.glob("node/node[0-9]*/cpulist")
        for cpu in parse_cpus(_text(path))
    }
    found = {
        (parse_cpus(_text(folder / f"cpu/cpu{cpu}/topology/thread_siblings_list")) & online) | {cpu}
        for cpu in online
    }
    return tuple(Core(core, node_of.get(min(core), 0)) for core in sorted(found, key=min))


def node_of_pci(domain: int, bus: int, device: int, system: Path = _SYSTEM) -> int | None:
    """Return the NUMA node of a PCI device; None if the system does not report it."""
    name = f"{domain:04x}:{bus:02x}:{device:02x}.0"
    text = _text(system / "bus/pci/devices" / name / "numa_node").strip()
    return int(text) if text.isdigit() else None  # -1: not known


def tightest_quota(process: Path = _PROCESS, groups: Path = _CGROUPS) -> Quota | None:
    """Return the smallest CPU quota of this process's control groups; None if unlimited.

    Reads version 2 (``cpu.max``) and version 1 (``cpu.cfs_quota_us``) and parent groups.
    """
    return min(_quotas(process, groups), key=lambda quota: quota.num_cpus, default=None)


def _quotas(process: Path, groups: Path) -> Iterator[Quota]:
    for line in _text(process / "cgroup").splitlines():
        kinds, name = line.split(":", 2)[1:]
        roots = [groups / kinds, groups / "cpu"] if "cpu" in kinds.split(",") else []
        root = next(filter(Path.is_dir, roots), groups) if kinds else groups
        if kinds and not roots:
            continue
        folder = root / name.lstrip("/")
        for each in [folder, *folder.parents]:
            if each.is_relative_to(root):
                yield from _quota(each)


def _quota(folder: Path) -> Iterator[Quota]:
    words = _text(folder / "cpu.max").split() or [
        _text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")
    ]
    if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):
        facts = folder.stat()
        yield Quota(int(words[0]) / int(words[1]), f"{facts.st_dev}:{facts.st_ino}")


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
