"""A range of ports from which all comes that this package and Gloo listen on."""

import contextlib
import os
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from gpipe_hpc.errors import ConfigError

PORTS_OF_RANK: Final = 3
"""Of Gloo one for our groups and one for torch's default group; one of the watcher."""

_LARGEST: Final = 65535


@dataclass(frozen=True)
class Ports:
    """Ports from `first` to `last`."""

    first: int
    last: int

    @classmethod
    def parsed(cls, text: str | None) -> "Ports | None":
        """Read `29600-29699`; None for None. Raises ConfigError."""
        if text is None:
            return None
        found = re.fullmatch(r"\s*(\d{1,5})\s*-\s*(\d{1,5})\s*", str(text))
        ports = cls(int(found[1]), int(found[2])) if found else None
        if ports is None or not 0 < ports.first <= ports.last <= _LARGEST:
            raise ConfigError(
                f"comm.ports: expected a range as 29600-29699, within 1-{_LARGEST}, got {text!r}; "
                f"correct it"
            )
        return ports

    def __len__(self) -> int:
        return self.last - self.first + 1

    def __contains__(self, port: object) -> bool:
        return isinstance(port, int) and self.first <= port <= self.last

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"

    def in_turn(self, start: int | None = None) -> Iterator[int]:
        """Yield all ports once, from another one in each process: ranks of a host rarely meet."""
        start = os.getpid() * PORTS_OF_RANK if start is None else start
        for step in range(len(self)):
            yield self.first + (start + step) % len(self)

    def check_room(self, local_size: int, serves: bool) -> None:
        """Raise ConfigError if the ranks of a host need more; `serves`: rank 0 needs one, too."""
        needed = PORTS_OF_RANK * local_size + serves
        if len(self) < needed:
            store = ", and 1 for the store" if serves else ""
            raise ConfigError(
                f"comm.ports={self}: expected at least {needed} ports ({PORTS_OF_RANK} for each of "
                f"the {local_size} ranks of a host{store}), got {len(self)}; give a larger range, "
                f"and one that no other job on these hosts has"
            )

    def all_taken(self) -> ConfigError:
        """Return what to raise where none of them is free."""
        return ConfigError(
            f"comm.ports={self}: expected a free port on {socket.gethostname()}, got none of "
            f"{len(self)}; end what holds them, or give another range: two jobs on a host need one "
            f"each"
        )


def listen(address: str, ports: Ports | None, backlog: int) -> socket.socket:
    """Listen on a port of the range, or on any; raises OSError, where none is free too."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    for port in ports.in_turn() if ports is not None else (0,):
        with contextlib.suppress(OSError) if ports is not None else contextlib.nullcontext():
            return socket.create_server((address, port), family=family, backlog=backlog)
    raise OSError(str(ports.all_taken()) if ports is not None else "no port")
