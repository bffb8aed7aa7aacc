"""Time limit for connecting the ranks, which may hang if a link fails at that moment.

The watchdog starts only after ranks have connected, and the store's client waits for an answer as
long as TCP retries: a quarter of an hour.
"""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from gpipe_hpc.comm.watchdog.output_streams import print_line
from gpipe_hpc.comm.watchdog.torchrun_report import write_torchrun_error
from gpipe_hpc.comm.world.launcher import Launch
from gpipe_hpc.config import ExitCode

GRACE_S: Final = 8.0
"""Time for ranks to exit by themselves after receiving the reason of a failed rendezvous."""


@contextmanager
def limit_start_time(launch: Launch, limit_s: float) -> Iterator[None]:
    """Context that ends the process with a message after `limit_s` seconds plus a grace time."""
    timer = threading.Timer(limit_s + GRACE_S, _end, [launch, limit_s])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(launch: Launch, limit_s: float) -> None:
    text = (
        f"gpipe_hpc: launch: rank {launch.rank} on {socket.gethostname()} did not connect to the "
        f"other {launch.world_size - 1} ranks within {limit_s:g} s: {launch.master_addr}:"
        f"{launch.master_port} answered at first and then stopped; check whether the link to it "
        f"is cut or a firewall drops packets, or raise comm.reach_s"
    )
    print_line(text)
    write_torchrun_error(text, is_cause=True)
    os._exit(ExitCode.FAILED)
