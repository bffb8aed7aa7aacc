"""What a watched rank has said of itself, and since when it has said nothing new."""

from dataclasses import dataclass
from typing import Final

from gpipe_hpc.comm.watchdog.display import Shown
from gpipe_hpc.comm.watchdog.lines import Message

MAX_DOING: Final = 200
"""Characters of what a rank does that are kept, and passed on."""


@dataclass
class Doing:
    """The last that is known of the rank; times are those of the watcher's clock."""

    count: int = -1  # of the actions it has begun
    text: str = "starting"
    waits: bool = False
    inside: bool = False  # within something that all ranks do together
    shows_together: bool = False  # the same of a phase, as the rank shows it: never old
    ends: bool = False  # may be ended by force once the run has failed
    limit_s: float = float("inf")
    changed_s: float = 0.0
    num_said: int = 0  # times that its lack of progress was said, each twice as late
    stack_asked_s: float | None = None
    answered_s: float = float("-inf")
    stopped_s: float | None = None
    is_suspect: bool = False
    has_left: bool = False
    hung_up_s: float | None = None  # when its connection ended

    def note(self, message: Message, now_s: float) -> None:
        """Take what the rank says of itself."""
        self.inside, self.ends, self.limit_s = (message[k] for k in ("inside", "ends", "limit_s"))
        self._count_to(message["count"], now_s)
        if message["count"] == self.count:  # else it is older than what the rank shows
            self.text, self.waits = message["text"][:MAX_DOING], message["waits"]

    def look_at(self, shown: Shown | None, now_s: float) -> None:
        """Take what the rank shows in memory that both see."""
        self.shows_together = shown is not None and shown.is_together
        if shown is not None and shown.num_actions > self.count:
            self._count_to(shown.num_actions, now_s)
            self.text, self.waits = shown.text[:MAX_DOING], False

    def forgive(self, pause_s: float) -> None:
        """Take no account of a time in which the watcher itself did not run."""
        self.changed_s += pause_s
        if self.stopped_s is not None:
            self.stopped_s += pause_s

    def _count_to(self, count: int, now_s: float) -> None:
        if count > self.count:
            self.count, self.changed_s, self.num_said = count, now_s, 0
