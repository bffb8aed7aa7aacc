"""State of a watcher's connection to one neighbouring rank."""

from dataclasses import dataclass

from gpipe_hpc.comm.watchdog.watcher_connection import WatcherConnection


@dataclass
class NeighbourLink:
    """A neighbouring rank and the connection to its watcher process."""

    rank: int
    dials: bool
    address: tuple[str, int] | None = None
    talk: WatcherConnection | None = None  # authenticated, or still in progress if we opened it
    last_message_s: float | None = None  # time of the last message; None before the first
    ended_s: float | None = None  # time when a working connection was lost
    dialled_s: float = float("-inf")
    host: str = ""
    peer_address: str = ""  # address of the neighbour's end of the connection
    doing: str = "not known"
    helper: str = ""  # process id of its watcher
    has_left: bool = False  # has ended without failure
    is_suspect: bool = False  # a warning about its silence was sent

    @property
    def is_up(self) -> bool:
        """Return whether the connection is open and authenticated."""
        return self.talk is not None and self.talk.is_proven and self.talk.line.is_open

    @property
    def name(self) -> str:
        """Return the neighbour's rank and host, for messages."""
        return f"rank {self.rank}" + (f" on {self.where}" if self.host else "")

    @property
    def where(self) -> str:
        """Return the neighbour's host, with its address if it is on another host."""
        far = self.peer_address and not self.peer_address.startswith("127.")
        return f"{self.host} ({self.peer_address})" if far else self.host

    def silent_s(self, now_s: float) -> float:
        """Return the seconds since the neighbour's last message; 0 before the first one."""
        return 0.0 if self.last_message_s is None else now_s - self.last_message_s

    def exclude_pause(self, pause_s: float) -> None:
        """Exclude a period in which this watcher was not running from all measured durations."""
        if self.last_message_s is not None:
            self.last_message_s += pause_s
        if self.ended_s is not None:
            self.ended_s += pause_s
