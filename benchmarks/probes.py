"""Linux's measurements of this process and machine. Does not import torch."""

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
    """Make the kernel kill this process when its parent ends, even while it is stopped."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


class Usage(NamedTuple):
    """Processor time of this process so far, and its number of involuntary context switches."""

    cpu_s: float
    num_preempted: int


def usage() -> Usage:
    """Return the resource usage of this process, over all threads."""
    return Usage(time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw)


def machine_busy_s() -> float:
    """Return the total busy time of all processors in seconds, in steps of a clock tick.

    Includes time that the host of a virtual machine used for others (steal time).
    """
    first = Path("/proc/stat").read_text("utf-8").split("\n", 1)[0]
    user, nice, system, _, _, irq, softirq, stolen = map(int, first.split()[1:9])
    return (user + nice + system + irq + softirq + stolen) / os.sysconf("SC_CLK_TCK")


def is_disturbed(wall_s: float, foreign_s: float) -> bool:
    """Return whether other processes used so much processor time that a measurement is invalid.

    The limit is a tenth of one core, plus two ticks of the clock.
    """
    return foreign_s > 0.1 * wall_s + 0.02


class Memory(NamedTuple):
    """Memory of a process without the pages of mapped files.

    `shared_bytes` is memory shared with other processes; half of it is included in the other
    values.
    """

    now_bytes: int
    peak_bytes: int
    shared_bytes: int


def memory() -> Memory:
    """Return the resident memory now, and its peak since `forget_peak`.

    Shared memory counts half, because two ranks share it here. Pages of mapped files (libraries)
    are excluded, because they are loaded by the first process that uses them.
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
    """Return free memory to the kernel and reset the peak."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", "utf-8")


def machine() -> str:
    """Return a line that describes the machine: processor, cores, memory, system."""
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
