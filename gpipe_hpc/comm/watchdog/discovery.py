"""Discovery of neighbouring watchers: their addresses are exchanged through the store."""

import json
import os
import socket
import time
from typing import Final

from torch.distributed.distributed_c10d import Store

from gpipe_hpc.comm.net.addresses import address_of, address_outside, address_towards, is_loopback
from gpipe_hpc.comm.watchdog.helper import Helper
from gpipe_hpc.comm.watchdog.json_connection import Message
from gpipe_hpc.comm.watchdog.neighbours import neighbours, opens_connection
from gpipe_hpc.device.host.machine import shared_identity

_LOOPBACK: Final = "127.0.0.1"
_FIRST_PAUSE_S: Final = 0.02
_LONGEST_PAUSE_S: Final = 1.0


class WatcherDiscovery:
    """Passes the addresses of neighbouring watchers to this rank's watcher once they are published.

    A rank queries the store only for its neighbours. The watcher listens on loopback and, if a
    neighbour is on another host, also on an address reachable from there.
    """

    def __init__(
        self, store: Store, helper: Helper, rank: int, size: int, address: str | None
    ) -> None:
        self._store, self._helper, self._rank, self._address = store, helper, rank, address
        self._missing = set(neighbours(rank, size))
        self._network = shared_identity("net") or socket.gethostname()
        self._is_open_outside = False
        self._pause_s = _FIRST_PAUSE_S
        self._due_s = time.monotonic()
        self._listen(_LOOPBACK)

    @property
    def due_s(self) -> float:
        """Return the time of the next query; infinity once all neighbours are found."""
        return self._due_s if self._missing else float("inf")

    def publish(self, listening: Message) -> None:
        """Publish the address and port on which this rank's watcher listens."""
        host, port = listening["host"], listening["port"]
        if host == _LOOPBACK:
            entry = {"network": self._network, "port": port}
            self._store.set(f"watch/{self._rank}", json.dumps(entry))
        elif port:
            self._store.set(f"watch/outside/{self._rank}", json.dumps({"host": host, "port": port}))

    def advance(self) -> None:
        """Query the store for the neighbours not found yet, at increasing intervals."""
        for other in sorted(self._missing):
            if self._find(other):
                self._missing.discard(other)
        self._pause_s = min(1.5 * self._pause_s, _LONGEST_PAUSE_S)
        self._due_s = time.monotonic() + self._pause_s

    def _find(self, other: int) -> bool:
        if not self._store.check([f"watch/{other}"]):
            return False
        entry = json.loads(self._store.get(f"watch/{other}"))
        if entry["network"] == self._network:
            self._point(other, _LOOPBACK, entry["port"])
            return True
        if not self._is_open_outside:
            self._is_open_outside = True
            self._listen(outside_address(self._address))
        if not opens_connection(self._rank, other):
            return True
        if not self._store.check([f"watch/outside/{other}"]):
            return False
        outside = json.loads(self._store.get(f"watch/outside/{other}"))
        self._point(other, outside["host"], outside["port"])
        return True

    def _listen(self, host: str) -> None:
        self._helper.send(kind="listen", host=host)

    def _point(self, other: int, host: str, port: int) -> None:
        self._helper.send(kind="peer", rank=other, host=host, port=port)


def outside_address(chosen: str | None) -> str:
    """Return an address of this host at which other hosts reach it.

    The first that exists: `chosen`, the interface in GLOO_SOCKET_IFNAME, the route to MASTER_ADDR,
    the default route, the first interface with an address, loopback.
    """
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0]
    found = (
        chosen or "",
        address_of(wanted) if wanted else "",
        address_towards(os.environ.get("MASTER_ADDR", "")),
        address_outside(),
    )
    return next((each for each in found if each and not is_loopback(each)), _LOOPBACK)
