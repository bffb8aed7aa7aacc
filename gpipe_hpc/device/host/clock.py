"""Identity of the monotonic clock that a process reads."""

import os
import zlib

from gpipe_hpc.device.host.machine import shared_identity


def clock_identity() -> int:
    """Return a non-negative number that is equal for processes that read the same monotonic clock.

    Processes share `time.perf_counter` if they run on one kernel and in one time namespace. If the
    system does not report this, the number is unique to the process.
    """
    alone = f"process {os.uname().nodename} {os.getpid()}"
    return zlib.crc32((shared_identity("time") or alone).encode())
