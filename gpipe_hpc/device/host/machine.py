"""Identities of this machine and its namespaces, comparable between processes."""

import os
import platform
import socket
import zlib
from collections.abc import Collection
from pathlib import Path
from typing import Final

_BOOT: Final = Path("/proc/sys/kernel/random/boot_id")
_USERS: Final = Path("/proc/self/uid_map")
_MAX_ANCESTORS: Final = 32
_INITIAL_PIDS: Final = "pid:[4026531836]"  # PROC_PID_INIT_INO of Linux: no container


def shared_identity(namespace: str) -> str:
    """Return a string equal for processes that share a namespace of one running kernel.

    `namespace` is a name in /proc/self/ns: `net` (127.0.0.1 is the same interface), `mnt` (a path
    names the same file), `pid` (a number means the same process) or `time` (the monotonic clock is
    the same). Two containers on one host share the kernel, but have their own namespaces. Empty if
    the system does not report it; then nothing may be assumed to be shared.
    """
    try:
        return f"{_BOOT.read_text().strip()} {os.readlink(f'/proc/self/ns/{namespace}')}"
    except OSError:
        return ""


def clock_identity() -> int:
    """Return a non-negative number that is equal for processes that read the same monotonic clock.

    Processes share `time.perf_counter` if they run on one kernel and in one time namespace. If the
    system does not report this, the number is unique to the process.
    """
    alone = f"process {os.uname().nodename} {os.getpid()}"
    return zlib.crc32((shared_identity("time") or alone).encode())


def folder_identity(folder: Path) -> str:
    """Return a string equal for processes to which `folder` is the same folder.

    Containers have their own mounts, but may mount the same folder of the host at the same path.
    The string therefore identifies the folder itself and the user. Empty if the system does not
    report it; then nothing may be assumed to be shared.
    """
    try:
        facts, users = folder.stat(), _USERS.read_text().split()
        boot = _BOOT.read_text().strip()
    except OSError:
        return ""
    user = f"{os.getuid()} of {'-'.join(users)}"
    return f"{boot} {folder} {facts.st_dev}:{facts.st_ino} {user}"


def kernel_identity() -> str:
    """Return a string equal for all processes of one running kernel, also in containers."""
    try:
        return _BOOT.read_text().strip()
    except OSError:
        return socket.gethostname()


def processor_name() -> str:
    """Return the model name of the processor, else its architecture."""
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


def started_by(names: Collection[str], proc: Path = Path("/proc")) -> bool | None:
    """Return whether an ancestor process runs a program whose name contains one of `names`.

    None if unknown: no such ancestor was found, but this process is in its own PID namespace (as in
    a container) and cannot see ancestors outside of it.
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
