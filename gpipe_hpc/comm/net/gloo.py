"""Gloo groups that listen on an address that we choose, created through torch's backend registry.

torch's own backend `gloo` takes no options. Its groups listen on GLOO_SOCKET_IFNAME, or on what the
host's name resolves to, and only torch knows on which address. So our groups use a backend of our
own, which opens Gloo's device on a given address and passes it to torch's `ProcessGroupGloo`.
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
"""What torch calls this backend."""
INTERFACE_VARIABLE: Final = "GLOO_SOCKET_IFNAME"
LAZY_VARIABLE: Final = "TORCH_GLOO_LAZY_INIT"

_DEVICES: Final = ("cpu", "cuda")  # as torch's own Gloo: CUDA tensors go by way of the host
_NUM_THREADS: Final = 2  # as torch gives a group with one device
_LOOPBACK: Final = "127.0.0.1"


def listening_address(chosen: str | None) -> str:
    """Return the address of this host on which Gloo listens.

    The chosen one; else that of the first interface of GLOO_SOCKET_IFNAME that has one; else what
    the host's name resolves to, if it is an address of this host; else loopback.
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
    """Let Gloo listen on an address of this host, on a port that the kernel chooses.

    Raises LaunchError.
    """
    try:
        return dist.ProcessGroupGloo.create_device(hostname=address, lazy_init=False)
    except RuntimeError as error:
        raise cannot_listen(address, error) from error


def cannot_listen(address: str, error: Exception) -> LaunchError:
    """Return what to raise if nothing can listen on an address."""
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
    """Connect the ranks of a store with one another, through a device of `open_device`."""
    gloo: Any = dist.ProcessGroupGloo
    assert gloo_options is not None, "torch has Gloo"
    options = gloo_options()
    options._devices, options._threads, options._timeout = [device], num_threads, timeout
    connected: dist.ProcessGroupGloo = gloo(store, rank, size, options)
    return connected


def register(address: str) -> None:
    """Let torch create groups of this backend, which listen on an address from now on."""
    dist.Backend.register_backend(
        NAME, partial(_create, address), extended_api=True, devices=list(_DEVICES)
    )


def _create(address: str, given: Any, _: object) -> dist.ProcessGroupGloo:
    device = open_device(address)
    return connect(given.store, given.group_rank, given.group_size, device, given.timeout)


@contextmanager
def default_group_settings(address: str | None = None) -> Iterator[None]:
    """Set how a default group that torch creates meanwhile uses Gloo.

    Two ranks of it connect when they first need it: else each rank would connect with all others,
    and ask the store for each. Our own groups are small and do not use it: there the first message
    between two ranks would wait until both ends touch it, and nothing could end that wait.
    `address`: it listens on the interface that has it.
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
