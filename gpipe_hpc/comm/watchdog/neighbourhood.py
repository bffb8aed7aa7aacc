"""The connections of a rank's watcher to the watchers of neighbouring ranks."""

import socket
from collections.abc import Sequence
from typing import Final

from gpipe_hpc.comm.net.secret import Secret
from gpipe_hpc.comm.watchdog.json_connection import JsonConnection, Message
from gpipe_hpc.comm.watchdog.link import NeighbourLink
from gpipe_hpc.comm.watchdog.neighbours import neighbours, opens_connection
from gpipe_hpc.comm.watchdog.watcher_connection import WatcherConnection

_GREETING_S: Final = 5.0
_REDIAL_S: Final = 0.5
_MAX_STRANGERS: Final = 64


class Neighbourhood:
    """The neighbours of one rank, and accepted connections that are not authenticated yet."""

    def __init__(self, host: str) -> None:
        self.links: dict[int, NeighbourLink] = {}
        self.listeners: list[socket.socket] = []
        self._host, self._rank, self._secret = host, -1, Secret(b"", "nothing yet")
        self._strangers: list[WatcherConnection] = []
        self._has_changed = False

    def begin(self, rank: int, size: int, secret: Secret) -> None:
        """Set this rank, the world size and the secret, and compute the neighbours."""
        self._rank, self._secret = rank, secret
        for other in neighbours(rank, size):
            self.links[other] = NeighbourLink(other, opens_connection(rank, other))

    def listen(self, host: str, port: int = 0) -> int:
        """Listen on an address of this machine and return the port. Raises OSError.

        `port` is given if the neighbours already know it.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=_MAX_STRANGERS)
        listener.setblocking(False)
        self.listeners.append(listener)
        return int(listener.getsockname()[1])

    def connections(self) -> list[WatcherConnection]:
        """Return all open connections, authenticated or not."""
        own = [link.talk for link in self.links.values() if link.talk is not None]
        return [talk for talk in (*own, *self._strangers) if talk.line.is_open]

    def accept(self, listener: socket.socket, now_s: float) -> None:
        """Accept a connection; if too many are not authenticated, close the oldest of them."""
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        if len(self._strangers) >= _MAX_STRANGERS:
            self._strangers.pop(0).line.close()
        self._strangers.append(self._talk(connection, None, now_s))

    def dial(self, now_s: float) -> None:
        """Connect to the neighbours to which this rank has to connect and is not connected."""
        for link in self.links.values():
            pending = link.talk is not None and link.talk.line.is_open
            due = now_s > link.dialled_s + _REDIAL_S
            if not link.dials or link.address is None or link.has_left or pending or not due:
                continue
            link.dialled_s = now_s
            family = socket.AF_INET6 if ":" in link.address[0] else socket.AF_INET
            connection = socket.socket(family)
            connection.setblocking(False)
            try:
                connection.connect_ex(link.address)
            except OSError:
                connection.close()
                continue
            link.talk = self._talk(connection, link.rank, now_s)

    def receive(
        self, talk: WatcherConnection, greeting: Sequence[Message], now_s: float
    ) -> list[tuple[NeighbourLink, Message]]:
        """Return the messages received from a neighbour, if it is authenticated.

        Sends `greeting` to a neighbour that has just been authenticated.
        """
        was_proven = talk.is_proven
        talk.line.flush()
        messages = talk.receive()
        if talk.is_proven and not was_proven:
            self._welcome(talk, greeting)
        if not talk.is_proven:
            return []
        assert talk.peer is not None, "an authenticated peer must have a rank"
        link = self.links[talk.peer]
        link.last_message_s = now_s
        return [(link, message) for message in messages]

    def broadcast(self, message: Message, without: NeighbourLink | None = None) -> None:
        """Send a message to all connected neighbours except `without`."""
        for link in self.links.values():
            if link is not without and link.is_up and link.talk is not None:
                link.talk.line.send(message)

    def part(self, link: NeighbourLink) -> None:
        """Record that a neighbour has ended without failure; close its connection."""
        link.has_left = True
        if link.talk is not None:
            link.talk.line.close()
        self._has_changed = True

    def drop_strangers(self) -> None:
        """Close connections that are not authenticated."""
        for talk in self.connections():
            if not talk.is_proven:
                talk.line.close()

    def drop_ended(self, now_s: float) -> None:
        """Remove connections that have ended or were not authenticated in time."""
        for talk in self.connections():
            if not talk.is_proven and talk.began_s < now_s - _GREETING_S:
                talk.line.close()
        self._strangers = [talk for talk in self._strangers if talk.line.is_open]
        for link in self.links.values():
            if link.talk is not None and not link.talk.line.is_open:
                if link.talk.is_proven and link.ended_s is None:
                    link.ended_s = now_s
                link.talk = None
                self._has_changed = True

    def take_change(self) -> bool | None:
        """Return whether all neighbours are connected, or None if that has not changed.

        A change is returned once.
        """
        if not self._has_changed:
            return None
        self._has_changed = False
        return self.is_whole

    @property
    def is_whole(self) -> bool:
        """Return whether all neighbours that have not ended are connected."""
        return all(link.is_up or link.has_left for link in self.links.values())

    def exclude_pause(self, pause_s: float) -> None:
        """Exclude a period in which this process was not running from all measured durations."""
        for link in self.links.values():
            link.exclude_pause(pause_s)

    def close(self) -> None:
        """Close all connections and listening sockets."""
        for talk in self.connections():
            talk.line.close()
        for listener in self.listeners:
            listener.close()

    def _talk(
        self, connection: socket.socket, expected: int | None, now_s: float
    ) -> WatcherConnection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return WatcherConnection(
            JsonConnection(connection), self._rank, self._host, self._secret, expected, now_s
        )

    def _welcome(self, talk: WatcherConnection, greeting: Sequence[Message]) -> None:
        """Register a newly authenticated connection, replacing an older one to the same rank."""
        if talk in self._strangers:
            self._strangers.remove(talk)
        link = self.links.get(-1 if talk.peer is None else talk.peer)
        if link is None:
            talk.line.close()
            talk.is_proven = False
            return
        if link.talk is not None and link.talk is not talk:
            link.talk.line.close()
        link.talk, link.ended_s, link.host = talk, None, talk.host
        link.peer_address = talk.line.far_address
        for message in greeting:
            talk.line.send(message)
        self._has_changed = True
