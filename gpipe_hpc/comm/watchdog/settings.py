"""How closely ranks watch one another."""

from dataclasses import dataclass
from typing import Final

DEFAULT_SILENCE_S: Final = 15.0


@dataclass(frozen=True)
class Watchfulness:
    """When a rank is spoken of, and when it is given up.

    `silence_s`: without a sign of life for so long, in seconds, a rank counts as lost; all are
    told after 0.4 of it. `stall_s`: a rank that lives but does nothing new for so long is named;
    None for what `Pulse` derives from the steps so far. `ends_process`: once the run has failed,
    this process ends, whatever its threads do; if not, only where it is stuck in something that
    all ranks do together.
    """

    silence_s: float = DEFAULT_SILENCE_S
    stall_s: float | None = None
    ends_process: bool = False
