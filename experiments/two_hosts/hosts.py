"""Two simulated hosts and the link between them, as a context manager."""

from contextlib import ExitStack
from types import TracebackType
from typing import Final

from experiments.two_hosts.link import Link
from experiments.two_hosts.machine import Host

NAMES: Final = ("host1", "host2")
_ADDRESSES: Final = ("10.77.0.1", "10.77.0.2")  # nobody else sees them: every pair has the same
MTU: Final = 9000  # jumbo frames: a packet of 1,500 bytes would cost six times the work


class TwoHosts:
    """Two hosts joined by a link, from entering a `with` block to leaving it.

    ``rate``: bits a second each way; ``delay_s``: each way; see `Link`. ``hosts``: both `Host`s,
    ``link``: the `Link`. On leaving, or when this process ends in whatever way, the kernel ends
    all processes of both hosts, and interfaces, mounts and addresses go with them: nothing of it
    has a name that could be left behind, so several pairs may be there at once.

    ``own_address``: to which a host's own name resolves on it, None for that which others know;
    Debian's installer writes 127.0.1.1. Raises `LackingError`, on entering, with what this
    machine does not allow.
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
