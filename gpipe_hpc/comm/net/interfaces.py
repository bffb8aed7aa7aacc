"""Selection of the network interface on which Gloo, NCCL and other libraries listen.

Each library below torch.distributed has its own variable and its own default. NCCL skips the
loopback interface even if all ranks are on one machine, and would listen on the network. Gloo uses
the address of the host name, which on Debian is 127.0.1.1 and unreachable for other hosts.
"""

import ipaddress
import os
import socket
from typing import Final

from gpipe_hpc.comm.net.addresses import Interface, address_of, is_loopback, own_interfaces
from gpipe_hpc.errors import ConfigError

GLOO: Final = "GLOO_SOCKET_IFNAME"
# Variables with a list of names, exact after "=": NCCL and RCCL, and HCCL, which copies them.
_LISTS: Final = ("NCCL_SOCKET_IFNAME", "HCCL_SOCKET_IFNAME")
# Variables with one name: oneCCL, and libfabric below it.
_NAMES: Final = ("CCL_KVS_IFACE", "FI_TCP_IFACE")


def listen_on_loopback() -> None:
    """Make all libraries listen on loopback only, unless their variables are set."""
    names = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in names), None)
    if loopback is not None:
        os.environ.setdefault(GLOO, loopback)
    follow_gloo()


def listen_on(interface: Interface) -> None:
    """Make Gloo, and libraries whose variables are not set, listen on an interface."""
    os.environ[GLOO] = interface.name
    follow_gloo()


def follow_gloo() -> None:
    """Make other libraries use the interface of Gloo's variable, unless their own are set."""
    chosen = os.environ.get(GLOO)
    if not chosen:
        return
    for variable in _LISTS:
        os.environ.setdefault(variable, f"={chosen}")
    for variable in _NAMES:
        os.environ.setdefault(variable, chosen.partition(",")[0])


def requested_interface(wanted: str | None) -> Interface | None:
    """Return the interface selected by `comm.interface` or GLOO_SOCKET_IFNAME; None if unset.

    Raises ConfigError if this machine has no such interface.
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
    """Raise ConfigError if the interface is loopback, which ranks of other hosts cannot reach."""
    if is_loopback(interface.address):
        raise ConfigError(
            f"launch: rank {rank} on {socket.gethostname()} would listen on the loopback interface "
            f"{interface}, where ranks on other hosts cannot reach it; {remedy}"
        )
