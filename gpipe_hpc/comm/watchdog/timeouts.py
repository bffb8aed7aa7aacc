"""Limits and checks of time-outs."""

import math
from typing import Final

from gpipe_hpc.errors import ConfigError

MAX_TIMEOUT_S: Final = 1e6
"""About eleven days: in milliseconds, as poll and torch use it, just below 2^31."""

DEFAULT_REACH_S: Final = 20.0
"""Time in seconds within which a host must answer; all ranks then end within half a minute."""


def checked_timeout(timeout_s: float, where: str) -> float:
    """Return a time-out in seconds; raise ConfigError if it is out of range."""
    # Written so that NaN fails the comparison.
    if isinstance(timeout_s, int | float) and 0 < timeout_s <= MAX_TIMEOUT_S:
        return float(timeout_s)
    got = "not a number" if isinstance(timeout_s, float) and math.isnan(timeout_s) else timeout_s
    raise ConfigError(
        f"{where}: expected more than 0 and at most {MAX_TIMEOUT_S:.0f} seconds, got {got}; "
        f"correct it"
    )
