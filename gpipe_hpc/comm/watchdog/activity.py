"""Current activity of a rank and its stall limit."""

import re
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from gpipe_hpc.comm.watchdog.published_status import StatusPublisher

_TIMES_LONGEST: Final = 10.0
_LEAST_S: Final = 30.0
_SHARE_OF_TIMEOUT: Final = 0.5
_TORCH_WAITS: Final = "torch/distributed/distributed_c10d.py"
_STANDARD_WAITS: Final = ("threading.py", "queue.py", "selectors.py", "contextlib.py")


@dataclass(frozen=True)
class Phase:
    """An activity that all ranks perform together, such as a step or a checkpoint."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class BetweenPhases:
    """The time between two phases, which is spent in the user's own code."""

    after: str

    def __str__(self) -> str:
        return f"the caller's own work after {self.after}"


class ActivityTracker:
    """Activity tracker of a rank's thread, read by the failure board and the watcher process.

    `limit_s` is the time that an action may take: `stall_s` if given, else ten times the longest
    action so far in phases of the same name, but at least 30 s and at most half of `timeout_s`. The
    first phase of a name may take half of `timeout_s`, because it may include compilation or
    indexing of data.
    """

    def __init__(
        self,
        timeout_s: float,
        stall_s: float | None,
        display: StatusPublisher | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._display = display
        self.count = 0
        self.activity: object = "starting"
        self.waits_for: Sequence[int] | None = None
        self._thread = threading.get_ident()
        self._clock = clock
        self._since_s = clock()
        self._stall_s, self._most_s = stall_s, _SHARE_OF_TIMEOUT * timeout_s
        self._phase = self._name = ""
        self._longest_s: dict[str, float] = {}  # by name, of phases that have ended
        self._longest_now_s = 0.0

    def note(self, activity: object) -> None:
        """Record the start of a new activity."""
        now_s = self._clock()
        if now_s - self._since_s > self._longest_now_s:
            self._longest_now_s = now_s - self._since_s
        self.count += 1
        self.activity, self.waits_for, self._since_s = activity, None, now_s
        if isinstance(activity, Phase | BetweenPhases):
            self._turn(activity)
            if self._display is not None:
                is_together = isinstance(activity, Phase)
                self._display.show_phase(self.count, activity, is_together=is_together)
        elif self._display is not None:
            self._display.show_action(self.count, activity)

    def wait_for(self, ranks: Sequence[int] | None) -> None:
        """Record the ranks for which this rank waits; None if it no longer waits."""
        self.waits_for = ranks

    def _turn(self, activity: Phase | BetweenPhases) -> None:
        before, longest_s = self._phase, self._longest_s
        if before:
            longest_s[before] = max(longest_s.get(before, 0.0), self._longest_now_s)
        self._phase = kind_of(activity.name) if isinstance(activity, Phase) else ""
        self._name = str(activity)
        self._longest_now_s = 0.0
        self._thread = threading.get_ident()

    @property
    def is_inside(self) -> bool:
        """Return whether the rank is in a phase that all ranks do together."""
        return not isinstance(self.activity, BetweenPhases)

    @property
    def waits(self) -> bool:
        """Return whether this rank waits for other ranks."""
        return self.waits_for is not None or _waits_in_torch(self._thread)

    @property
    def limit_s(self) -> float:
        """Return the time in seconds that the current activity may take."""
        if self._stall_s is not None:
            return self._stall_s
        longest_s = self._longest_s.get(self._phase)
        if longest_s is None:
            return self._most_s
        return min(max(_TIMES_LONGEST * longest_s, _LEAST_S), self._most_s)

    def __str__(self) -> str:
        activity, awaited = self.activity, self.waits_for
        within = isinstance(activity, Phase | BetweenPhases) or not self._phase
        where = str(activity) if within else f"{activity} in {self._name}"
        if awaited is None:
            return where
        names = ", ".join(map(str, awaited[:8])) + (", ..." if len(awaited) > 8 else "")
        return f"{where}, waiting for rank{'s' if len(awaited) > 1 else ''} {names}"


def kind_of(phase: str) -> str:
    """Return the name of a phase without numbers, so that phases of one kind have equal names."""
    return re.sub(r"\d+", "", phase)


def _waits_in_torch(thread: int) -> bool:
    """Return whether a thread is in a torch.distributed call that waits for other ranks."""
    frame = sys._current_frames().get(thread)
    while frame is not None and frame.f_code.co_filename.endswith(_STANDARD_WAITS):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.endswith(_TORCH_WAITS)
