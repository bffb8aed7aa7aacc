"""How long a rank may be told to wait."""

import math
from typing import Final

from gpipe_hpc.errors import ConfigError

MAX_TIMEOUT_S: Final = 1e6
"""Some eleven days: in milliseconds, as poll and torch take it, little less than 2^31."""

DEFAULT_REACH_S: Final = 20.0
"""In which a host has to answer at all: with this all ranks have ended half a minute later."""


def checked_timeout(timeout_s: float, where: str) -> float:
    """Return a time to wait in seconds; raise ConfigError for one that no wait takes."""
    # Not a number is in no range, so this is asked the positive way.
    if isinstance(timeout_s, int | float) and 0 < timeout_s <= MAX_TIMEOUT_S:
        return float(timeout_s)
    got = "not a number" if isinstance(timeout_s, float) and math.isnan(timeout_s) else timeout_s
    raise ConfigError(
        f"{where}: expected more than 0 and at most {MAX_TIMEOUT_S:.0f} seconds, got {got}; "
        f"correct it"
    )
