"""Check that other ranks are reachable over TCP before Gloo connects to them.

Gloo tries for minutes, cannot be interrupted, does not name the unreachable rank and does not
expose its port. So each rank listens on an additional port of the same address during the check,
and the other ranks connect to that port. The kernel accepts these connections even if the process
is busy.
"""

import errno
import os
import select
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, NamedTuple

from gpipe_hpc.comm.net.gloo import cannot_listen

_UNDER_WAY: Final = (0, errno.EINPROGRESS, errno.EWOULDBLOCK)


class ListenAddress(NamedTuple):
    """Address and port on which a rank listens; published to other ranks as `host|address|port`."""

    host: str
    address: str
    port: int

    @classmethod
    def parsed(cls, text: str) -> "ListenAddress":
        """Parse a published place."""
        host, address, port = text.split("|")
        return cls(host, address, int(port))

    def encoded(self) -> str:
        """Return the published form, `host|address|port`."""
        return f"{self.host}|{self.address}|{self.port}"

    def __str__(self) -> str:
        ends = f"[{self.address}]" if ":" in self.address else self.address
        return f"{ends}:{self.port}"


@contextmanager
def listening(address: str, backlog: int) -> Iterator[ListenAddress]:
    """Listen on an address of this host for up to `backlog` connections; LaunchError on failure."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        listener = socket.create_server((address, 0), family=family, backlog=backlog)
    except OSError as error:
        raise cannot_listen(address, error) from error
    with listener:
        yield ListenAddress(_host(), address, int(listener.getsockname()[1]))


def _host() -> str:
    return socket.gethostname().replace("|", "_")


def calls(own: ListenAddress, other: ListenAddress) -> bool:
    """Return whether Gloo makes rank `own` connect to rank `other` rather than the reverse.

    Gloo connects from the greater address to the smaller one. False for two ranks with the same
    address, which are on one host.
    """
    return own.address != other.address and _packed_address(own.address) > _packed_address(
        other.address
    )


def unanswered(places: Mapping[int, ListenAddress], limit_s: float) -> dict[int, str]:
    """Connect to all ranks at once; return the unreachable ranks, each with the reason."""
    poller, failed = select.poll(), dict[int, str]()
    waiting: dict[int, tuple[int, socket.socket]] = {}
    for rank, place in places.items():
        call = socket.socket(socket.AF_INET6 if ":" in place.address else socket.AF_INET)
        call.setblocking(False)
        code = call.connect_ex((place.address, place.port))
        if code in _UNDER_WAY:
            poller.register(call, select.POLLOUT)
            waiting[call.fileno()] = rank, call
        else:
            failed[rank] = os.strerror(code)
            call.close()
    deadline_s = time.monotonic() + limit_s
    while waiting and (left_s := deadline_s - time.monotonic()) > 0:
        for descriptor, _ in poller.poll(1e3 * left_s):
            rank, call = waiting.pop(descriptor)
            poller.unregister(descriptor)
            code = call.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                failed[rank] = os.strerror(code)
            call.close()
    for rank, call in waiting.values():
        failed[rank] = f"no answer within {limit_s:g} s"
        call.close()
    return failed


def _packed_address(address: str) -> bytes:
    return socket.inet_pton(socket.AF_INET6 if ":" in address else socket.AF_INET, address)
