"""On which network interface the libraries below torch.distributed listen while they connect.

Each has a variable of its own, and by default an idea of its own: NCCL passes over the loopback
interface even where all ranks are on one machine, and would listen to the network.
"""

import os
import socket
from typing import Final

GLOO: Final = "GLOO_SOCKET_IFNAME"
# A list of names, which "=" says to be whole names: NCCL and RCCL, and HCCL, which follows them.
_LISTS: Final = ("NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
# One name: oneCCL, and libfabric below it.
_NAMES: Final = ("CCL_KVS_IFACE", "FI_TCP_IFACE")


def keep_local() -> None:
    """Let all of them listen on loopback alone, except those that are told otherwise."""
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None:
        os.environ.setdefault(GLOO, loopback)
    follow_gloo()


def follow_gloo() -> None:
    """Let the others listen where Gloo is told to, except those that are told otherwise."""
    chosen = os.environ.get(GLOO)
    if not chosen:
        return
    for variable in _LISTS:
        os.environ.setdefault(variable, f"={chosen}")
    for variable in _NAMES:
        os.environ.setdefault(variable, chosen.partition(",")[0])
