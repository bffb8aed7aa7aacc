"""An end for a start that nothing ends: a call over a link that was cut meanwhile may never return.

Until ranks are in touch nobody watches them, and the store's client waits for an answer for as long
as TCP tries to get one: a quarter of an hour.
"""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from gpipe_hpc.comm.watchdog.saying import say
from gpipe_hpc.comm.watchdog.torchrun_report import tell_torchrun
from gpipe_hpc.comm.world.launcher import Launch
from gpipe_hpc.config import ExitCode

GRACE_S: Final = 8.0
"""In which ranks that were told why they do not meet have ended by themselves."""


@contextmanager
def meeting_within(launch: Launch, limit_s: float) -> Iterator[None]:
    """End the process, with a message, if the block takes longer than `limit_s` and a grace."""
    timer = threading.Timer(limit_s + GRACE_S, _end, [launch, limit_s])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(launch: Launch, limit_s: float) -> None:
    text = (
        f"gpipe_hpc: launch: rank {launch.rank} on {socket.gethostname()} expected to meet the "
        f"other {launch.world_size - 1} ranks, by way of {launch.master_addr}:"
        f"{launch.master_port}, within {limit_s:g} s, got an answer at first and then none; look "
        f"whether the link to it is cut or a firewall drops packets, or raise comm.reach_s"
    )
    say(text)
    tell_torchrun(text, is_cause=True)
    os._exit(ExitCode.FAILED)
