"""Which processes read the same clock."""

import os
import zlib

from gpipe_hpc.device.host.machine import shared_identity


def clock_identity() -> int:
    """Return a number from 0 up that processes share if `time.perf_counter` is one clock to them.

    That is the monotonic clock of a running kernel, in one time namespace. Where the system does
    not tell, the process is alone with its clock.
    """
    alone = f"process {os.uname().nodename} {os.getpid()}"
    return zlib.crc32((shared_identity("time") or alone).encode())
