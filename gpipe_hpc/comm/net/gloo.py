"""Gloo groups that listen on a chosen address, created through torch's backend registry.

torch's own backend `gloo` takes no options: its groups listen on GLOO_SOCKET_IFNAME or on the
address of the host name, and the address cannot be queried. So our groups use a separate backend,
which opens Gloo's device on a given address and passes it to torch's `ProcessGroupGloo`.
"""

import ipaddress
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Final

import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from gpipe_hpc.comm.net.addresses import address_of, holder_of
from gpipe_hpc.errors import LaunchError
from gpipe_hpc.torch_compat import gloo_options

NAME: Final = "gpipe_hpc_gloo"
"""Name under which this backend is registered with torch."""
INTERFACE_VARIABLE: Final = "GLOO_SOCKET_IFNAME"
LAZY_VARIABLE: Final = "TORCH_GLOO_LAZY_INIT"

_DEVICES: Final = ("cpu", "cuda")  # as torch's own Gloo, which copies CUDA tensors to the host
_NUM_THREADS: Final = 2  # torch's default for a group with one device
_LOOPBACK: Final = "127.0.0.1"


def listening_address(chosen: str | None) -> str:
    """Return the address of this host on which Gloo listens.

    The first that applies: `chosen`, the first interface of GLOO_SOCKET_IFNAME with an address, the
    address of the host name if it belongs to this host, loopback.
    """
    names = os.environ.get(INTERFACE_VARIABLE, "").split(",")
    named = next(filter(None, map(address_of, filter(None, names))), "")
    return chosen or named or next(_addresses_of_host(), _LOOPBACK)


def _addresses_of_host() -> Iterator[str]:
    with suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        for family, kind, _, _, address in found:
            host = str(address[0])
            with suppress(OSError, ValueError), socket.socket(family, kind) as probe:
                probe.bind(address)
                if not ipaddress.ip_address(host).is_link_local:
                    yield host


def open_device(address: str) -> Any:
    """Open a Gloo device that listens on an address of this host, on a port chosen by the kernel.

    Raises LaunchError.
    """
    try:
        return dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=False)
    except RuntimeError as error:
        raise cannot_listen(address, error) from error


def cannot_listen(address: str, error: Exception) -> LaunchError:
    """Return the LaunchError to raise if listening on an address failed."""
    return LaunchError(
        f"launch: Gloo cannot listen on {address} of {socket.gethostname()} ({error}); set "
        f"comm.interface to an interface, or unset {INTERFACE_VARIABLE}"
    )


def connect(
    store: Store,
    rank: int,
    size: int,
    device: Any,
    timeout: timedelta,
    num_threads: int = _NUM_THREADS,
) -> dist.ProcessGroupGloo:
    """Connect all ranks of a store with one another through a device of `open_device`."""
    gloo: Any = dist.ProcessGroupGloo
    assert gloo_options is not None, "torch was built without Gloo"
    options = gloo_options()
    options._devices, options._threads, options._timeout = [device], num_threads, timeout
    connected: dist.ProcessGroupGloo = gloo(store, rank, size, options)
    return connected


def register(address: str) -> None:
    """Register the Gloo backend with torch; its groups listen on `address` from now on."""
    dist.Backend.register_backend(
        NAME, partial(_create, address), extended_api=True, devices=list(_DEVICES)
    )


def _create(address: str, given: Any, _: object) -> dist.ProcessGroupGloo:
    device = open_device(address)
    return connect(given.store, given.group_rank, given.group_size, device, given.timeout)


@contextmanager
def default_group_settings(address: str | None = None) -> Iterator[None]:
    """Set the environment so that a default group created in this context connects lazily.

    Two ranks then connect when they first communicate. Otherwise every rank connects with all
    others at the start and queries the store for each of them. Groups of this package are small and
    do not connect lazily: the first message would block, without a time-out, until both ranks use
    the connection. If `address` is given, the group listens on its interface.
    """
    changed = {LAZY_VARIABLE: "1"}
    interface = holder_of(address) if address is not None else None
    if interface is not None:
        changed[INTERFACE_VARIABLE] = interface.name
    before = {name: os.environ.get(name) for name in changed}
    os.environ.update(changed)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
