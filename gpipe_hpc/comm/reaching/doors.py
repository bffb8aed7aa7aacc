"""What Gloo listens on: opened by us, so that its address is known, and can be chosen."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Final, NamedTuple

import torch.distributed as dist
import torch.distributed.distributed_c10d as torch_groups
from torch.distributed.distributed_c10d import Store

from gpipe_hpc.comm.reaching.binding import bound_within
from gpipe_hpc.comm.reaching.ports import Ports
from gpipe_hpc.errors import LaunchError

_NUM_THREADS: Final = 2  # as torch itself gives a group
_NUM_TRIES: Final = 8  # for a port that another process takes in the same moment
_FILES: Final = "/proc/self/fd"


class Door(NamedTuple):
    """A device of Gloo, and where it listens; an empty address: that is not known."""

    device: Any
    address: str
    port: int


class Doors:
    """Opens devices of Gloo.

    `address`: of this machine, on which they listen; None for the interface GLOO_SOCKET_IFNAME, or
    what the name of the host means. `ports`: a range to take them from. Then all groups share one
    device, which does the work of all with one thread; else each has its own.
    """

    def __init__(self, address: str | None = None, ports: Ports | None = None) -> None:
        self.address, self.ports = address, ports
        self._shared: dict[bool, Door] = {}

    def open(self, *, lazily: bool) -> Door:
        """Open one; `lazily`: two ranks connect when they first need it. Raises LaunchError."""
        if self.ports is None:
            return self._look(lazily)
        if lazily not in self._shared:
            self._shared[lazily] = self._open_within(self.ports, lazily)
        return self._shared[lazily]

    def _look(self, lazily: bool) -> Door:
        before = _files()
        device = self._create(lazily)
        address, port = next(_listeners(_files() - before), ("", 0))
        return Door(device, address, port)

    def _open_within(self, ports: Ports, lazily: bool) -> Door:
        start = next(ports.in_turn())
        for attempt in range(_NUM_TRIES):
            before = _files()
            with bound_within(ports, start + attempt) as taken, suppress(LaunchError):
                device = self._create(lazily)
                for address, port in _listeners(_files() - before):
                    if port in taken:
                        return Door(device, address, port)
                raise AssertionError(f"Gloo listens elsewhere than on {taken}")
        raise ports.all_taken()

    def _create(self, lazily: bool) -> Any:
        try:
            if self.address is None:
                return dist.ProcessGroupGloo.create_default_device(lazy_init=lazily)
            return dist.ProcessGroupGloo.create_device(hostname=self.address, lazy_init=lazily)
        except RuntimeError as error:
            raise LaunchError(
                f"launch: Gloo cannot listen on {self.address or 'the default interface'} of "
                f"{socket.gethostname()}, expected an address of this machine, got {error}; set "
                f"comm.interface to an interface, or unset GLOO_SOCKET_IFNAME"
            ) from error


def options(door: Door, timeout: timedelta, num_threads: int) -> Any:
    """Return what a group of Gloo is made with, to use a device of ours."""
    gloo: Any = dist.ProcessGroupGloo
    made = gloo._Options()
    made._devices, made._threads, made._timeout = [door.device], num_threads, timeout
    return made


@contextmanager
def through(door: Door) -> Iterator[None]:
    """Let the groups that torch makes meanwhile use a device of ours; it has no setting for it."""

    class Through(dist.ProcessGroupGloo):
        def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
            super().__init__(store, rank, size, options(door, timeout, _NUM_THREADS))

    torch_side: Any = torch_groups
    own = torch_side.ProcessGroupGloo
    torch_side.ProcessGroupGloo = Through
    try:
        yield
    finally:
        torch_side.ProcessGroupGloo = own


def _files() -> set[str]:
    with suppress(OSError):
        return set(os.listdir(_FILES))
    return set()


def _listeners(files: set[str]) -> Iterator[tuple[str, int]]:
    """Yield where those of some open files listen that are sockets and do."""
    for name in sorted(files):
        with suppress(OSError):
            if not os.readlink(f"{_FILES}/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as seen:
                if seen.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    yield seen.getsockname()[:2]
