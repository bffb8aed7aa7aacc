"""On which network interface all listens that connects ranks.

The libraries below torch.distributed have a variable each, and by default an idea of their own:
NCCL passes over the loopback interface even where all ranks are on one machine, and would listen to
the network; Gloo takes what the host's name means, which on Debian is 127.0.1.1, and which other
hosts then call in vain.
"""

import ipaddress
import os
import socket
from typing import Final

from gpipe_hpc.comm.net.addresses import Interface, address_of, is_loopback, own_interfaces
from gpipe_hpc.errors import ConfigError

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


def listen_on(interface: Interface) -> None:
    """Let all of them listen on an interface, except those of others that are told otherwise."""
    os.environ[GLOO] = interface.name
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


def asked_for(wanted: str | None) -> Interface | None:
    """Return the interface that `comm.interface` or GLOO_SOCKET_IFNAME names; None if neither does.

    Raises ConfigError where this machine has none such.
    """
    if wanted is not None:
        return _find(wanted)
    names = os.environ.get(GLOO, "").split(",")
    return next((Interface(name, found) for name in names if (found := address_of(name))), None)


def _find(wanted: str) -> Interface:
    there = own_interfaces()
    try:
        network = ipaddress.ip_network(wanted, strict=False)
    except ValueError:
        found = [each for each in there if each.name == wanted]
    else:
        found = [each for each in there if ipaddress.ip_address(each.address) in network]
    if found:
        return found[0]
    names = ", ".join(map(str, there)) or "none with an address"
    raise ConfigError(
        f"comm.interface: expected the name of an interface of {socket.gethostname()}, or a subnet "
        f"in which it has an address, got {wanted!r}; choose one of {names}"
    )


def refuse_loopback(interface: Interface, rank: int, remedy: str) -> None:
    """Raise ConfigError for an interface on which ranks of other hosts cannot be reached."""
    if is_loopback(interface.address):
        raise ConfigError(
            f"launch: rank {rank} on {socket.gethostname()} would listen on {interface}, expected "
            f"an interface that leads to the ranks on other hosts, got loopback; {remedy}"
        )
