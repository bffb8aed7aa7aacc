"""State of a rank as known to its watcher."""

from dataclasses import dataclass
from typing import Final

from gpipe_hpc.comm.watchdog.json_connection import Message
from gpipe_hpc.comm.watchdog.published_status import PublishedStatus

MAX_DOING: Final = 200
"""Maximum number of characters of an activity that are kept and passed on."""


@dataclass
class RankStatus:
    """The last known activity of the rank; times are those of the watcher's clock."""

    count: int = -1  # number of actions begun
    text: str = "starting"
    waits: bool = False
    inside: bool = False  # whether in a phase that all ranks do together
    shows_together: bool = False  # the same according to shared memory, never outdated
    ends: bool = False  # whether it may be killed once the run has failed
    limit_s: float = float("inf")
    changed_s: float = 0.0
    num_warnings: int = 0  # warnings about lack of progress, each after twice the time
    stack_requested_s: float | None = None
    answered_s: float = float("-inf")
    stopped_s: float | None = None
    is_suspect: bool = False
    has_left: bool = False
    disconnected_s: float | None = None  # time when its connection ended

    def note(self, message: Message, now_s: float) -> None:
        """Update the state from a message of the rank."""
        self.inside, self.ends, self.limit_s = (message[k] for k in ("inside", "ends", "limit_s"))
        self._count_to(message["count"], now_s)
        if message["count"] == self.count:  # else it is older than the shared memory
            self.text, self.waits = message["text"][:MAX_DOING], message["waits"]

    def update_from(self, shown: PublishedStatus | None, now_s: float) -> None:
        """Update the state from the activity published in shared memory."""
        self.shows_together = shown is not None and shown.is_together
        if shown is not None and shown.num_actions > self.count:
            self._count_to(shown.num_actions, now_s)
            self.text, self.waits = shown.text[:MAX_DOING], False

    def exclude_pause(self, pause_s: float) -> None:
        """Exclude a period in which the watcher was not running from all measured durations."""
        self.changed_s += pause_s
        if self.stopped_s is not None:
            self.stopped_s += pause_s

    def _count_to(self, count: int, now_s: float) -> None:
        if count > self.count:
            self.count, self.changed_s, self.num_warnings = count, now_s, 0
