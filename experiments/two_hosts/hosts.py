"""Two simulated hosts and the link between them, as a context manager."""

from contextlib import ExitStack
from types import TracebackType
from typing import Final

from experiments.two_hosts.link import Link
from experiments.two_hosts.machine import Host

NAMES: Final = ("host1", "host2")
_ADDRESSES: Final = ("10.77.0.1", "10.77.0.2")  # visible within a pair only
MTU: Final = 9000  # jumbo frames: packets of 1,500 bytes would need six times the work


class TwoHosts:
    """Two hosts connected by a link, as a context manager.

    Args:
        rate: bits per second in each direction, see `Link`
        delay_s: seconds in each direction
        own_address: address of a host's own name on that host; None for the address that the other
            host uses. Debian's installer writes 127.0.1.1.

    `hosts` has both `Host`s, `link` the `Link`. When the block or this process ends, the kernel
    ends all processes of both hosts and removes interfaces, mounts and addresses. Nothing has a
    name outside of the namespaces, so several pairs may exist at once. Raises LackingError on
    entering if this machine does not permit it.
    """

    def __init__(
        self,
        rate: float,
        delay_s: float,
        *,
        queue_bytes: int | None = None,
        mtu: int = MTU,
        own_address: str | None = None,
    ) -> None:
        self._own_address = own_address
        self._shape, self._mtu = (rate, delay_s, queue_bytes), mtu
        self._stack = ExitStack()

    def __enter__(self) -> "TwoHosts":
        names = dict(zip(NAMES, _ADDRESSES, strict=True))
        with ExitStack() as stack:
            hosts = []
            for name, address in names.items():
                known = names | {name: self._own_address or address}
                hosts.append(Host(name, address, known, self._mtu))
                stack.callback(hosts[-1].power_off)
            self.hosts = tuple(hosts)
            self.link = Link([host.link_end for host in hosts], *self._shape)
            stack.callback(self.link.end)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()
