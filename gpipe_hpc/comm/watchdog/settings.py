"""Time limits of the watchdog."""

from dataclasses import dataclass
from typing import Final

DEFAULT_SILENCE_S: Final = 15.0


@dataclass(frozen=True)
class WatchdogConfig:
    """Time limits after which the watchdog warns of a rank or considers it lost.

    Args:
        silence_s: seconds without any message of a rank after which the rank is lost; all ranks are
            warned after 40 % of this time.
        stall_s: seconds without progress after which a live rank is reported; None for a limit that
            `ActivityTracker` derives from previous steps.
        ends_process: whether to end this process once the run has failed, whatever its threads do;
            otherwise only if it is stuck in a phase that all ranks do together.
    """

    silence_s: float = DEFAULT_SILENCE_S
    stall_s: float | None = None
    ends_process: bool = False
