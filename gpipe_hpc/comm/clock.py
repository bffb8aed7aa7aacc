"""Which processes read the same clock."""

import os
import zlib
from pathlib import Path


def clock_identity() -> int:
    """Return a number from 0 up that processes share if `time.perf_counter` is one clock to them.

    That is the monotonic clock of a running kernel, in one time namespace. Where the system does
    not tell, the process is alone with its clock.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/time")
    except OSError:
        boot, namespace = "process", f"{os.uname().nodename} {os.getpid()}"
    return zlib.crc32(f"{boot} {namespace}".encode())
