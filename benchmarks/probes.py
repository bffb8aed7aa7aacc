"""What Linux says about this process and this machine. Loads no torch."""

import ctypes
import gc
import os
import platform
import resource
import signal
import time
from pathlib import Path
from typing import NamedTuple

_KIB = 1024


_PR_SET_PDEATHSIG = 1


def end_with_parent() -> None:
    """Let the kernel kill this process when its parent ends: it may be stopped by then."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Usage(NamedTuple):
    """Processor time of this process so far, and how often it had to make room for another."""

    cpu_s: float
    num_preempted: int


def usage() -> Usage:
    """Return what this process has used, all threads together."""
    return Usage(time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw)


def machine_busy_s() -> float:
    """Return the time that all processors have worked for anybody, in steps of a clock tick.

    Includes what the host of a virtual machine took away.
    """
    first = Path("/proc/stat").read_text("utf-8").split("\n", 1)[0]
    user, nice, system, _, _, irq, softirq, stolen = map(int, first.split()[1:9])
    return (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")


def is_disturbed(wall_s: float, foreign_s: float) -> bool:
    """Say whether others took so much processor time that a measurement does not count.

    More than a tenth of one core, beyond what two ticks of the clock may hide.
    """
    return foreign_s > 0.1 * wall_s + 0.02


class Memory(NamedTuple):
    """Memory of a process that belongs to it: without the pages of files it has mapped.

    `shared_bytes` is what another process touches too; half of it is in the other figures.
    """

    now_bytes: int
    peak_bytes: int
    shared_bytes: int


def memory() -> Memory:
    """Return what is resident now, and the most since `forget_peak`.

    Shared memory counts half: here always two ranks touch it. Pages of mapped files (libraries)
    are taken off: they come in when first used, whoever runs first.
    """
    status = {}
    for line in Path("/proc/self/status").read_text("utf-8").splitlines():
        name, _, value = line.partition(":")
        if value.endswith("kB"):
            status[name] = int(value.split()[0]) * _KIB
    shared = status["RssShmem"]
    others = status["RssFile"] + shared // 2
    return Memory(status["VmRSS"] - others, status["VmHWM"] - others, shared)


def forget_peak() -> None:
    """Give free memory back to the kernel, and let the peak start from what is left."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", "utf-8")


def machine() -> str:
    """Return a line on the machine: processor, cores, memory, system."""
    model = "unknown processor"
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return (
        f"{os.cpu_count()} cores of {model}, {pages / 2**30:.0f} GiB, "
        f"Linux {platform.release().split('-')[0]}, Python {platform.python_version()}"
    )
