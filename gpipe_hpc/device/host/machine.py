"""Which machine this process is on, as far as one of its namespaces goes."""

import os
import platform
import socket
from collections.abc import Collection
from pathlib import Path
from typing import Final

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_USERS: Final = Path("/proc/self/uid_map")
_MAX_ANCESTORS: Final = 32
_INITIAL_PIDS: Final = "pid:[4026531836]"  # PROC_PID_INIT_INO of Linux: no container


def shared_identity(namespace: str) -> str:
    """Return a text that two processes share if both are in one namespace of one running kernel.

    `namespace`, a name in /proc/self/ns, is what is to be shared: `net` (127.0.0.1 is the same
    interface), `mnt` (a path leads to the same file), `pid` (a number means the same process),
    `time` (the monotonic clock is one). Two containers of a host have the kernel in common, but
    namespaces of their own. Empty where the system does not tell: with nobody for sure.
    """
    try:
        return f"{_BOOT.read_text().strip()} {os.readlink(f'/proc/self/ns/{namespace}')}"
    except OSError:
        return ""


def folder_identity(folder: Path) -> str:
    """Return a text that two processes share if files in `folder` are the same ones to both.

    Containers have mounts of their own, but may see one folder of their host under the same path;
    what counts is the folder itself, and that both are one user there. Empty where the system does
    not tell: with nobody for sure.
    """
    try:
        facts, users = folder.stat(), _USERS.read_text().split()
        boot = _BOOT.read_text().strip()
    except OSError:
        return ""
    user = f"{os.getuid()} of {'-'.join(users)}"
    return f"{boot} {folder} {facts.st_dev}:{facts.st_ino} {user}"


def kernel_identity() -> str:
    """Return a text that all processes of one running kernel share, those of containers too."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return socket.gethostname()


def processor_name() -> str:
    """Return what the processor is called, where the system tells; else its kind."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def started_by(names: Collection[str], proc: Path = Path("/proc")) -> bool | None:
    """Say whether an ancestor of this process runs a program that has one of these names in its.

    None where that cannot be told: nobody of them is found, but this process numbers processes for
    itself, as in a container, so that its ancestors outside are not seen.
    """
    pid, found = os.getpid(), False
    for _ in range(_MAX_ANCESTORS):
        try:
            words = (proc / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
            status = (proc / str(pid) / "stat").read_text()
        except OSError:
            break
        programs = {Path(word).name for word in words[:3]}
        found = found or any(name in program for name in names for program in programs)
        pid = int(status.rpartition(")")[2].split()[1])
        if pid == 0:
            break
    if found:
        return True
    try:
        return False if os.readlink("/proc/self/ns/pid") == _INITIAL_PIDS else None
    except OSError:
        return False
