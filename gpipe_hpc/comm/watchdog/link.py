"""What a watcher knows about one neighbour."""

from dataclasses import dataclass

from gpipe_hpc.comm.watchdog.talk import Talk


@dataclass
class Link:
    """A neighbour, and the connection to its watcher."""

    rank: int
    dials: bool
    address: tuple[str, int] | None = None
    talk: Talk | None = None  # proven, or, where we dial, under way
    heard_s: float | None = None  # when its watcher last spoke; None: never yet
    ended_s: float | None = None  # since when a connection that worked is gone
    dialled_s: float = float("-inf")
    host: str = ""
    heard_at: str = ""  # the address of its end of the connection
    doing: str = "not known"
    helper: str = ""  # the number of its helper process
    has_left: bool = False  # in good order
    is_suspect: bool = False  # all have been told that it is silent

    @property
    def is_up(self) -> bool:
        """Say whether the neighbour can be heard."""
        return self.talk is not None and self.talk.is_proven and self.talk.line.is_open

    @property
    def name(self) -> str:
        """Return the neighbour for a message."""
        return f"rank {self.rank}" + (f" on {self.where}" if self.host else "")

    @property
    def where(self) -> str:
        """Return the neighbour's host, and at which address it was heard if that is another's."""
        far = self.heard_at and not self.heard_at.startswith("127.")
        return f"{self.host} ({self.heard_at})" if far else self.host

    def silent_s(self, now_s: float) -> float:
        """Return for how long nothing was heard; 0 before the first word."""
        return 0.0 if self.heard_s is None else now_s - self.heard_s

    def forgive(self, pause_s: float) -> None:
        """Take no account of a time in which the watcher itself did not run."""
        if self.heard_s is not None:
            self.heard_s += pause_s
        if self.ended_s is not None:
            self.ended_s += pause_s
